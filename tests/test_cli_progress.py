"""What every command that can take long tells in a pipe: where it starts, how far it is, where it ends."""

# ruff: noqa: F811 - fixtures of test_cli

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from shortlist import progress
from tests.report.runs import trained
from tests.test_cli import FAST, Call, call, folders  # noqa: F401

LEFT = r" of [\d,]+ {0} \(\d+ %\)(, .+)?, [\d,.e+-]+ {0}/s, .+ left$"
IMAGES, STEPS = LEFT.format("images"), LEFT.format("steps")
COMMANDS = {  # what is told of at the start and at the end, what in between, and the command
    "train": ("training", rf"training: \d+{STEPS}", ["train", "tiny.yaml", "data.source=images", *FAST]),
    "evaluate": ("embedding images", rf"embedding images: \d+{IMAGES}", ["evaluate", "run", "--data", "images"]),
    "embed": ("embedding images", rf"embedding images: \d+{IMAGES}", ["embed", "run", "images", "-o", "v.parquet"]),
    "index": ("embedding images", rf"embedding images: \d+{IMAGES}", ["index", "run", "images", "-o", "gallery"]),
    "add": ("embedding more", rf"embedding more: \d+{IMAGES}", ["gallery", "add", "there", "more"]),
    "report": ("embedding images", rf"embedding images: \d+{IMAGES}", ["report", "run"]),
    "compare": ("embedding images", rf"embedding images: \d+{IMAGES}", ["compare", "run", "other"]),
    "export": (
        "writing model.pt (TorchScript)",
        r"writing model.pt \(TorchScript\): .+ so far$",
        ["export", "run", "--torchscript", "model.pt"],
    ),
    "ablate": (
        "training",
        rf"training: \d+{STEPS}",
        ["ablate", "k", "tiny.yaml", "data.source=images", *FAST, "--seeds=1", "--values=[1]", "--methods=RS@k"],
    ),
    "sweep": ("sweep", rf"training: \d+{STEPS}", ["sweep", "tiny.yaml", "data.source=images", *FAST, "--space=s.yaml"]),
    "check": ("opening images", rf"opening images: \d+{IMAGES}", ["data", "check", "images"]),
}


@pytest.fixture(scope="module")
def workshop(folders: Path) -> Path:
    """Beside the run, another one, and more images."""
    trained(folders / "images", folders / "other", "data.validation=none")
    shutil.copytree(folders / "images" / "class 01", folders / "more")
    return folders


@pytest.fixture
def here(workshop: Path, tmp_path: Path, call: Call) -> Path:
    """The folder of the commands, where they find all that."""
    for name in ("images", "more"):
        (tmp_path / name).symlink_to(workshop / name)
    for name in ("run", "other"):
        shutil.copytree(workshop / name, tmp_path / name, ignore=shutil.ignore_patterns("vectors"))
    (tmp_path / "s.yaml").write_text("optimizer.lr: [1e-3]")
    assert call("index", "run", "images", "-o", "there")[0] == 0
    return tmp_path


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever advances is told at once."""
    monkeypatch.setattr(progress, "INTERVAL", 0.0)


@pytest.mark.parametrize("command", COMMANDS)
def test_in_a_pipe(command: str, here: Path, call: Call, often: None) -> None:
    name, state, args = COMMANDS[command]
    code, out, err = call(*args)
    assert code == 0, err
    lines = (out + err).splitlines()
    assert lines.index(f"{name}: started") < first(lines, state) < first(lines, f"{re.escape(name)}: done")
    assert "{" not in out + err  # JSON is for those who ask for it


def first(lines: list[str], pattern: str) -> int:
    found = [number for number, line in enumerate(lines) if re.match(pattern, line)]
    assert found, "\n".join([f"nothing matches {pattern}", *lines])
    return found[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_json(command: str, here: Path, call: Call, often: None) -> None:
    name, state, args = COMMANDS[command]
    code, out, err = call(*args, "--json")
    assert code == 0, err
    told_on_stdout = command in ("train", "report", "ablate", "sweep")  # they have no other result
    told, other = (out, err) if told_on_stdout else (err, out)
    events = [json.loads(line) for line in told.splitlines()]
    assert all(("message" in event) != ("progress" in event) for event in events)
    assert {"started", "done"} <= {event["state"] for event in events if event.get("progress") == name}
    inner = state.partition(":")[0].replace("\\", "")
    running = [event for event in events if event.get("progress") == inner and event["state"] == "running"]
    if "left$" in state:
        assert any(event.keys() >= {"done", "total", "rate", "seconds_left"} for event in running)
    assert running
    if told_on_stdout:
        assert other == ""
    else:
        json.loads(other)  # the result


def test_training_tells_step_epoch_loss_and_speed(here: Path, call: Call, often: None) -> None:
    _, out, _ = call(*COMMANDS["train"][2])
    speed = r"epoch 1, loss [\d.e-]+, [\d,.e+]+ images/s, [\d.,e+]+ steps/s, .+ left$"
    assert re.search(r"(?m)^training: 1 of \d+ steps \(\d+ %\), " + speed, out)
    assert re.search(r"(?m)^epoch 1: loss ", out)


def test_a_library_call_in_a_script_prints_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shortlist.data import check, open_catalog
    from shortlist.gallery import Gallery
    from shortlist.training import evaluate_run

    capsys.readouterr()
    evaluate_run("run")
    check(open_catalog("images"))
    gallery = Gallery.open("there")
    gallery.remove(["images/class 00"])
    gallery.add(open_catalog("images"))
    gallery.close()
    assert capsys.readouterr() == ("", "")


def test_dry_run_as_json(here: Path, call: Call) -> None:
    code, out, _ = call("train", "tiny.yaml", "data.source=images", *FAST, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["plan"]["steps"] > 0
