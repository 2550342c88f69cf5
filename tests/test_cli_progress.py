"""Every long-running command reports its start, its progress and its end in a pipe."""

# ruff: noqa: F811 - a fixture of test_cli

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from shortlist import progress
from tests.report.runs import trained
from tests.test_cli import FAST, Call, call  # noqa: F401

LEFT = r" of [\d,]+ {0} \(\d+ %\)(, .+)?, [\d,.e+-]+ {0}/s, .+ left$"
IMAGES, STEPS = LEFT.format("images"), LEFT.format("steps")
COMMANDS = {  # the task whose start and end are reported, a line in between, and the command
    "train": (
        "training",
        r"training: 1 of \d+ steps \(\d+ %\), epoch 1, loss [\d.e-]+, [\d,.e+]+ images/s, [\d.,e+]+ steps/s, .+ left$",
        ["train", "tiny.yaml", "data.source=images", *FAST],
    ),
    "evaluate": ("embedding images", rf"embedding images: \d+{IMAGES}", ["evaluate", "run", "images"]),
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
def workshop(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, more images, and two runs."""
    root = tmp_path_factory.mktemp("workshop")
    (root / "images").symlink_to(folders / "images")
    shutil.copytree(folders / "images" / "class 01", root / "more")
    shutil.copytree(folders / "run", root / "run")
    trained(folders / "images", root / "other", "data.validation=none")
    return root


@pytest.fixture
def here(workshop: Path, tmp_path: Path, call: Call) -> Path:
    """The folder of the commands, with copies of the runs."""
    for name in ("images", "more"):
        (tmp_path / name).symlink_to(workshop / name)
    for name in ("run", "other"):
        shutil.copytree(workshop / name, tmp_path / name, ignore=shutil.ignore_patterns("vectors"))
    (tmp_path / "s.yaml").write_text("optimizer.lr: [1e-3]")
    return tmp_path


def index_one_class(call: Call) -> None:
    """Create the gallery `there`."""
    assert call("index", "run", "images/class 00", "-o", "there")[0] == 0


def run(command: str, call: Call, *options: str) -> tuple[int, str, str]:
    if command == "add":
        index_one_class(call)
    return call(*COMMANDS[command][2], *options)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is reported at every step."""
    monkeypatch.setattr(progress, "INTERVAL", 0.0)


@pytest.mark.parametrize("command", ["train", "index", "export", "sweep", "check"])  # all others: see test_json
def test_text(command: str, here: Path, call: Call, often: None) -> None:
    name, state, _ = COMMANDS[command]
    code, out, err = run(command, call)
    assert code == 0, err
    lines = (out + err).splitlines()
    assert lines.index(f"{name}: started") < first(lines, state) < first(lines, f"{re.escape(name)}: done")
    assert "{" not in out + err  # no JSON without --json


def first(lines: list[str], pattern: str) -> int:
    found = [number for number, line in enumerate(lines) if re.match(pattern, line)]
    assert found, "\n".join([f"nothing matches {pattern}", *lines])
    return found[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_json(command: str, here: Path, call: Call, often: None) -> None:
    name, state, _ = COMMANDS[command]
    code, out, err = run(command, call, "--json")
    assert code == 0, err
    on_stdout = command in ("train", "report", "ablate", "sweep")  # they print no other result
    reported, other = (out, err) if on_stdout else (err, out)
    events = [json.loads(line) for line in reported.splitlines()]
    assert all(("message" in event) != ("progress" in event) for event in events)
    inner = state.partition(":")[0].replace("\\", "")
    running = [event for event in events if event.get("progress") == inner and event["state"] == "running"]
    started, done = ({"progress": name, "state": each} for each in ("started", "done"))
    assert index(events, started) < events.index(running[0]) < index(events, done)
    if "left$" in state:
        assert any(event.keys() >= {"done", "total", "rate", "seconds_left"} for event in running)
    if on_stdout:
        assert other == ""
    else:
        json.loads(other)  # the result


def index(events: list[dict], part: dict) -> int:
    """Index of the first event that includes these values."""
    return next(number for number, event in enumerate(events) if event.items() >= part.items())


def test_library_calls_in_a_script_print_nothing(here: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    from shortlist.data import check, open_catalog
    from shortlist.gallery import Gallery
    from shortlist.training import evaluate_run

    index_one_class(call)
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
