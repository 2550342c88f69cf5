"""The space of a sweep: lists and ranges, and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shortlist.errors import ConfigError
from shortlist.training import search_space
from shortlist.training.search_space import Choices, Range, candidates, read_space, with_values
from tests.training.runs import config

BASE = config(Path("images"))


def test_lists_and_ranges_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(
        "optimizer.lr: {low: 1e-5, high: 1e-3, log: true}\n"
        "training.epochs: {low: 2, high: 5}\n"
        "schedule: [{name: cosine}, {name: multistep, milestones: [1, 2]}]\n"
        "loss.k: [null, [1, 2]]\n"
    )
    assert read_space(file) == {
        "optimizer.lr": Range(1e-5, 1e-3, True),
        "training.epochs": Range(2, 5, False),
        "schedule": Choices(('{"name": "cosine"}', '{"name": "multistep", "milestones": [1, 2]}')),
        "loss.k": Choices(("null", "[1, 2]")),
    }


def test_values_of_a_candidate() -> None:
    found = with_values(
        BASE, {"optimizer.lr": 0.5, "schedule": {"name": "multistep", "milestones": [2]}, "loss.k": None}
    )
    assert (found.optimizer.lr, found.schedule.milestones, found.loss.k) == (0.5, (2,), None)
    assert found.data == BASE.data


def test_all_combinations_and_ends_are_candidates() -> None:
    space = read_space({"optimizer.lr": {"low": 0.1, "high": 0.2}, "training.epochs": [1, 2, 3]})
    found = {(each.optimizer.lr, each.training.epochs) for each in candidates(BASE, space)}
    assert found == {(lr, epochs) for lr in (0.1, 0.2) for epochs in (1, 2, 3)}


def test_of_many_combinations_some_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_space, "MAX_CHECKED", 50)
    keys = ("optimizer.lr", "optimizer.weight_decay", "schedule.warmup")
    found = list(candidates(BASE, read_space({key: [1, 2, 3, 4] for key in keys})))
    assert len(found) == 50
    assert {each.optimizer.lr for each in found} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "The search space is empty"),
        ({"optimizer.lr": 1e-3}, r"optimizer.lr must be a list of values, such as \[1, 2\], or a range.*, not 0.001"),
        ({"optimizer.lr": []}, "must be a list of values"),
        ({"optimizer": {"lr": [1, 2]}}, "optimizer must be a list of values"),
        ({"optimizer.lr": {"low": 1}}, "must be a list of values"),
        ({"optimizer.lr": {"low": 1, "high": 2, "step": 1}}, "must be a list of values"),
        ({"optimizer.lr": {"low": 2, "high": 1}}, "a range needs numbers low < high"),
        ({"optimizer.lr": {"low": "1e", "high": 1}}, "a range needs numbers low < high"),
        ({"optimizer.lr": {"low": True, "high": 2}}, "a range needs numbers low < high"),
        ({"optimizer.lr": {"low": 0, "high": 2, "log": "yes"}}, "log as true or false"),
        ({"optimizer.lr": {"low": 0, "high": 2, "log": True}}, "must be positive, but low is 0"),
        ({"optimizer.lr": [1, 1]}, "lists a value twice: 1, 1"),
        ({"data.source": ["a", "b"]}, "data.source cannot be searched: all trials have the same data"),
        ({"evaluation.k": [[1], [2]]}, "evaluation.k cannot be searched"),
        ({"name": ["a", "b"]}, "name cannot be searched"),
    ],
)
def test_mistakes(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_space(space)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"optimizer.lrr": [1]}, r"optimizer.lrr=1: optimizer.lrr: unknown key; did you mean 'lr'\?"),
        ({"optimizer.lr": [1, "fast"]}, 'optimizer.lr="fast": optimizer.lr: should be a valid number.*fast'),
        ({"training.epochs": {"low": 0, "high": 3}}, "training.epochs=0: training.epochs: should be greater"),
        (
            {"schedule.name": ["constant", "multistep"], "training.epochs": [1]},
            'schedule.name="multistep", training.epochs=1: schedule: multistep requires milestones',
        ),
    ],
)
def test_invalid_candidates(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        list(candidates(BASE, read_space(space)))
    assert "\n" not in str(error.value)


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"File not found: .*nothing.yaml"):
        read_space(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must be a mapping"):
        read_space(tmp_path / "list.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_bytes(b"optimizer.lr: [1e-3\xac 2e-3]\n")
    with pytest.raises(ConfigError, match=r"space\.yaml is not a text file"):
        read_space(file)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # reading its first byte is an I/O error
    with pytest.raises(OSError, match=r"Input/output error: '.*space\.yaml'"):
        read_space(file)
