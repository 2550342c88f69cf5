"""Runs of several processes end with the weights of one process, even after interruptions; only one process writes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
import yaml

from tests.processes import Commands, Running, free_port
from tests.training.runs import class_folders, config, records, weights

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")

# Everything that is random in a step. Adam would turn the sign of a rounding error into a step.
SETTINGS = [
    "model.backbone=test_vit",
    "model.backbone_args={depth: 2, drop_path_rate: 0.2, proj_drop_rate: 0.1, attn_drop_rate: 0.1}",
    "loss.simix=true",
    "loss.rank_temperature=5",
    "training.ema=0.7",
    "training.checkpoint_every=1",
    "optimizer.name=sgd",
    "optimizer.lr=0.1",
    "batch.chunk_size=2",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launched")
    images = class_folders(path / "images")
    (path / "tiny.yaml").write_text(yaml.safe_dump(config(images, *SETTINGS).model_dump(mode="json")))
    return path


@pytest.fixture(scope="module")
def whole(home: Path, commands: Commands) -> Path:
    """A run of one process."""
    code, _, error = commands.run("train", "tiny.yaml", "--run", "whole", cwd=home)
    assert code == 0, error
    return home / "whole"


def launch(
    commands: Commands,
    number: int,
    *args: str | Path,
    cwd: Path,
    others: Path | None = None,
    before: dict[int, str] | None = None,
    world: int | None = None,
):
    """Start processes as torchrun does.

    `others` is the folder of all but the first; `before` is Python that some of them run first, by rank; `world` is the
    number of processes that they expect.
    """
    port = free_port()
    running: list[Running] = []
    for rank in range(number):
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world or number,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        variables = {name: str(value) for name, value in names.items()}
        code = f"import os\nos.environ.update({variables})\n" + (before or {}).get(rank, "")
        running.append(commands.start(*args, cwd=others if others and rank else cwd, before=code))
    return running


def wait_after(steps: int) -> str:
    """Return Python code that creates a file `here` after this number of steps, and waits for a file `go`."""
    return f"""
import importlib, pathlib, time
module = importlib.import_module("shortlist.training.loop")
real = module.learning_rate_factor
def waiting(*args):
    if args[1] == {steps}:
        pathlib.Path("here").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.002)
    return real(*args)
module.learning_rate_factor = waiting
"""


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def assert_same(run: Path, whole: Path) -> None:
    """Assert that weights and losses are equal, up to the order of sums."""
    assert largest_difference(run, whole) < 1e-4
    for found, want in zip(records(run), records(whole), strict=True):
        assert found.keys() == want.keys()
        assert found["loss"] == pytest.approx(want["loss"], abs=1e-4)
        assert found["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=1e-3)
    assert len(records(run, "validation")) == len(records(whole, "validation")) == 3
    assert sorted(file.name for file in run.iterdir()) == sorted(file.name for file in whole.iterdir())


def test_without_dropout_it_is_another_run(home: Path, commands: Commands, whole: Path) -> None:
    """Negative control: dropout is active in the first step, and the comparison can fail."""
    settings = ["model.backbone_args={depth: 2}", "training.epochs=1"]
    code, _, error = commands.run("train", "tiny.yaml", *settings, "--run", "other", cwd=home)
    assert code == 0, error
    first, other = records(whole)[0], records(home / "other")[0]
    assert abs(first["loss"] - other["loss"]) > 1e-3
    assert first["gradient_norm"] != pytest.approx(other["gradient_norm"], rel=0.05)
    assert largest_difference(home / "other", whole) > 1e-2


def test_a_run_that_is_stopped_is_resumed_with_another_number_of_processes(
    home: Path, commands: Commands, whole: Path
) -> None:
    """SIGTERM is sent to the second process; all processes stop after the same step, and one prints a message.

    The others run in another folder: they do not need that of the run, and write nothing.
    """
    others = home / "elsewhere"
    others.mkdir()
    shutil.copy(home / "tiny.yaml", others)
    where = {"cwd": home, "others": others}
    main, other = launch(commands, 2, "train", "tiny.yaml", "--run", "stopped", **where, before={1: wait_after(4)})
    other.until((others / "here").exists)
    os.kill(other.pid, signal.SIGTERM)
    (others / "go").touch()
    assert (main.wait(), other.wait()) == (130, 130)
    for name in ("here", "go"):
        (others / name).unlink()
    assert main.err == "Stopped after step 5. Resume with: shortlist train --resume stopped\n"
    assert (other.out, other.err) == ("", "")
    assert len(records(home / "stopped")) == 5

    main, *running = launch(commands, 3, "train", "--resume", "stopped", **where)
    assert main.wait() == 0, main.err
    assert "Resuming after step 5 of 9." in main.out
    assert "The run is in stopped." in main.out
    assert "The run started with processes 2, now 3: the last digits of its weights may differ" in main.err
    for each in running:
        assert (each.wait(), each.out, each.err) == (0, "", "")
    assert_same(home / "stopped", whole)
    assert [file.name for file in others.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed(victim: int, home: Path, commands: Commands, whole: Path) -> None:
    """The other process ends with a message, and a single process resumes the run."""
    name = f"killed-{victim}"
    running = launch(commands, 2, "train", "tiny.yaml", "--run", name, cwd=home, before={victim: wait_after(4)})
    assert running[victim].kill((home / "here").exists) == -signal.SIGKILL
    (home / "here").unlink()
    survivor = running[1 - victim]
    assert survivor.wait() == 1
    assert survivor.err.startswith("Error: One of the processes has ended or can no longer be reached.")
    assert f"with any number of processes: shortlist train --resume {name}" in survivor.err
    if victim == 1:
        code, _, error = commands.run("train", "--resume", name, cwd=home)
        assert code == 0, error
        assert_same(home / name, whole)


def test_a_frozen_backbone_and_whitening(home: Path, commands: Commands) -> None:
    """The other process receives what the first one learns and encodes before the first step."""
    settings = ["model.freeze=backbone", "data.views=2", "model.whitening=pca", "training.epochs=1"]
    code, _, error = commands.run("train", "tiny.yaml", *settings, "--run", "frozen-1", cwd=home)
    assert code == 0, error
    main, other = launch(commands, 2, "train", "tiny.yaml", *settings, "--run", "frozen-2", cwd=home)
    assert (main.wait(), other.wait()) == (0, 0), main.err
    assert largest_difference(home / "frozen-1", home / "frozen-2") < 1e-4


def test_a_port_that_is_taken(commands: Commands, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr("tests.training.test_launched_runs.free_port", lambda: port)
        (first,) = launch(commands, 1, "train", "tiny.yaml", "--run", "wrong", cwd=home, world=2)
        assert first.wait() == 1
    assert first.err.startswith(f"Error: The processes cannot meet at MASTER_ADDR:MASTER_PORT, 127.0.0.1:{port}: ")
    assert len(first.err.splitlines()) == 1


def test_errors_are_printed_once(home: Path, commands: Commands) -> None:
    """Errors about a recipe, images, a loss that is not finite, and a file, in the first process or in another one."""
    images = shutil.copytree(home / "images", home / "damaged")
    for file in images.rglob("*.png"):
        file.write_bytes(b"no image")
    full = """
{}
def fail(*args):
    raise OSError(28, "No space left")
{} = fail
"""
    cases: list[tuple[str, list[str], dict[int, str]]] = [
        ("optimizer.lrr: unknown key", ["optimizer.lrr=1"], {}),
        ("is not an image", [f"data.source={images}", "evaluation.tests=[]"], {}),
        ("so the run was stopped", ["optimizer.lr=1e30", "batch.chunk_size=6"], {}),
        (
            "Fix the cause, then resume it with",
            [],
            {0: full.format("from shortlist.training import RunFolder", "RunFolder.log")},
        ),
        ("Error: No space left\n", [], {1: full.format("from shortlist.training import loop", "loop.check_trackers")}),
    ]
    printed = ""
    for message, settings, before in cases:
        main, other = launch(commands, 2, "train", "tiny.yaml", *settings, "--run", "wrong", cwd=home, before=before)
        assert (main.wait(), other.wait()) == (1, 1)
        assert message in main.err
        assert main.err.count("Error: ") == 1
        assert (other.out, other.err) == ("", "")
        shutil.rmtree(home / "wrong", ignore_errors=True)
        printed += main.out
    assert "too few chunks (1) for 2 processes: 1 of them embed nothing. Set batch.chunk_size=3 or smaller." in printed
