"""Impossible settings and texts that cannot be parsed: one error, before anything is done."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.core import TyperGroup

from shortlist import cli
from shortlist.config import read_config
from shortlist.errors import ConfigError, ModelError
from shortlist.threads import threads
from shortlist.training.components import build_embedder
from tests.training.runs import RECIPE, config

BRACKETS = "[" * 2_000


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_is_a_folder_of_its_own(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name: must not be \. or \.\."):
        read_config(RECIPE, "tiny", [f"name='{name}'"])
    assert read_config(RECIPE, "tiny", ["name=..."]).name == "..."  # an ordinary name


def test_threads_are_bounded_by_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.warns(UserWarning, match="2 threads are used instead of 3"), threads(3):
        assert torch.get_num_threads() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with threads(2):
            assert torch.get_num_threads() == 2


def test_a_dimension_that_no_memory_holds() -> None:
    with pytest.raises(ConfigError, match=r"model\.dim: should be less than 2147483648"):
        read_config(RECIPE, "tiny", ["model.dim=100000000000"])
    with pytest.raises(ModelError, match=r"model\.dim must be at most 65,536, not 100,000"):
        build_embedder(config(Path(), "model.dim=100000"))


def test_nested_yaml() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not valid YAML: maximum recursion depth"):
        read_config("[\n" * 2_000, "recipe.yaml")  # in one line, YAML looks for a key at each of them
    with pytest.raises(ConfigError, match=r"training\.epochs: should be a valid integer.* \(given: '\[{99}\.\.\.\)$"):
        read_config(RECIPE, "tiny", [f"training.epochs={BRACKETS}"])
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not valid YAML: .* found unhashable key"):
        read_config("? {a: 1}\n: b\n", "recipe.yaml")
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not valid YAML: month must be"):
        read_config("name: 2020-13-01", "recipe.yaml")


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(TyperGroup, "__call__", lambda self: torch.empty(2**45))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() has its own
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert "Error: Not enough memory" in capsys.readouterr().err


def test_a_dry_run_checks_the_weights(tmp_path: Path) -> None:
    """Weights in files are loaded; those of timm are not downloaded."""
    with pytest.raises(ModelError, match=r"file .*nothing\.pth does not exist; model\.weights can be a file"):
        build_embedder(config(tmp_path, f"model.weights={tmp_path / 'nothing.pth'}"), weights="local")
    torch.save({"conv.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ModelError, match="are not those of 'test_resnet'"):
        build_embedder(config(tmp_path, f"model.weights={tmp_path / 'other.pth'}"), weights="local")
    with pytest.raises(ModelError, match="timm has no weights for 'darknet17'"):
        build_embedder(config(tmp_path, "model={backbone: darknet17, weights: timm}"), weights="local")
    published = "model={backbone: test_efficientnet.r160_in1k, weights: timm}"
    build_embedder(config(tmp_path, published), weights="local")
