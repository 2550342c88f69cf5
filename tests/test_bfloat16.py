"""bfloat16 on processors that cannot execute it, simulated by a child process that kills itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shortlist import bfloat16
from shortlist.batches import LargeBatchStep
from shortlist.bfloat16 import CAP, VARIABLE
from shortlist.errors import ConfigError
from shortlist.training import train_run as train
from tests.training.runs import class_folders, config

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_WITHOUT_CAP = f"import os, signal; os.environ.get({VARIABLE!r}) == {CAP!r} or os.kill(os.getpid(), signal.SIGILL)"
WORKS = "pass"
Children = Callable[[str], list[str | None]]


def die() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def die_without_cap() -> None:
    if os.environ.get(VARIABLE) != CAP:
        die()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without an answer, with a cache and an environment of its own."""
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # so that it is as before in the end, whatever the test sets
    monkeypatch.delenv(VARIABLE)
    bfloat16.require_bfloat16.cache_clear()
    yield
    bfloat16.require_bfloat16.cache_clear()


@pytest.fixture
def children(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Children:
    """Set the program of child processes; returns the list of the caps that they are started with."""
    started: list[str | None] = []
    start = bfloat16._try_in_child

    def counted(isa: str | None) -> bool | None:
        started.append(isa)
        return start(isa)

    def use(program: str) -> list[str | None]:
        monkeypatch.setattr(bfloat16, "PROGRAM", program)
        started.clear()
        bfloat16.require_bfloat16.cache_clear()
        return started

    monkeypatch.setattr(bfloat16, "_try_in_child", counted)
    return use


def answers(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "processor").iterdir())


def test_the_real_products() -> None:
    """bfloat16 products work on this processor; conftest.py sets the environment that they may need."""
    assert bfloat16._try_in_child(os.environ.get(VARIABLE)) is True
    matrix = torch.eye(64).bfloat16()
    assert (matrix @ matrix).equal(matrix)


def test_where_bfloat16_works_nothing_is_set(children: Children) -> None:
    started = children(WORKS)
    bfloat16.require_bfloat16()
    assert started == [None]
    assert VARIABLE not in os.environ


def test_the_answer_is_found_once(children: Children, tmp_path: Path) -> None:
    children(WORKS)
    bfloat16.require_bfloat16()
    started = children(DIES)
    bfloat16.require_bfloat16()
    assert started == []
    (file,) = answers(tmp_path)
    assert json.loads(file.read_text())["survives"] is True


def test_where_the_cap_helps_it_is_set(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "_multiply", die_without_cap)
    started = children(DIES_WITHOUT_CAP)
    bfloat16.require_bfloat16()
    assert started == [None, CAP]
    assert os.environ[VARIABLE] == CAP
    started = children(DIES_WITHOUT_CAP)
    bfloat16.require_bfloat16()  # both answers are in the cache, and the variable is there
    assert started == []


def test_where_the_cap_does_not_help_it_is_refused(children: Children) -> None:
    started = children(DIES)
    with pytest.raises(ConfigError, match=r"does not execute the bfloat16 .*\. Use float32\.$"):
        bfloat16.require_bfloat16()
    assert started == [None, CAP]
    assert VARIABLE not in os.environ


def test_where_it_is_too_late_for_the_cap_it_is_refused(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    children(DIES_WITHOUT_CAP)
    monkeypatch.setattr(bfloat16, "_multiply", die)  # oneDNN has read the variable already
    with pytest.raises(ConfigError, match=f"Set {VARIABLE}={CAP} in the environment before starting"):
        bfloat16.require_bfloat16()
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, CAP)  # as a notebook may: later than it is read
    with pytest.raises(ConfigError, match="already initialised"):
        bfloat16.require_bfloat16()


def test_a_lower_cap_of_the_user_stays(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    children(DIES_WITHOUT_CAP)
    monkeypatch.setenv(VARIABLE, "AVX2")
    monkeypatch.setattr(bfloat16, "_multiply", lambda: os.environ[VARIABLE] == "AVX2" or die())
    bfloat16.require_bfloat16()
    assert os.environ[VARIABLE] == "AVX2"


def test_a_child_that_hangs_is_ended_and_bfloat16_refused(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "_multiply", die_without_cap)
    children(DIES_WITHOUT_CAP)
    bfloat16.require_bfloat16()  # the children's answers are in the cache from now on
    monkeypatch.setattr(bfloat16, "_multiply", signal.pause)
    monkeypatch.setattr(bfloat16, "TIMEOUT", 0.01)
    children(DIES)
    with pytest.raises(ConfigError, match="already initialised"):
        bfloat16.require_bfloat16()


@pytest.mark.parametrize("change", ["torch", "processor", "kernel"])
def test_the_answer_of_another_machine_is_not_used(
    change: str, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children(DIES)
    with pytest.raises(ConfigError):
        bfloat16.require_bfloat16()
    if change == "torch":
        monkeypatch.setattr(bfloat16.torch, "__version__", "99.0")
    elif change == "processor":
        monkeypatch.setattr(bfloat16, "_processor", lambda: "another")
    else:
        monkeypatch.setattr(bfloat16.platform, "release", lambda: "99.0")
    started = children(WORKS)
    bfloat16.require_bfloat16()
    assert started == [None]
    assert len(answers(tmp_path)) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"survives": "yes"}', "{}"])
def test_a_damaged_answer_is_found_again(text: str, children: Children, tmp_path: Path) -> None:
    children(WORKS)
    bfloat16.require_bfloat16()
    (file,) = answers(tmp_path)
    whole = file.read_text()
    file.write_text(text)
    started = children(WORKS)
    bfloat16.require_bfloat16()
    assert started == [None]
    assert file.read_text() == whole


def test_without_a_cache_it_is_found_every_time(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "file" / "in a file"))
    for _ in range(2):
        started = children(WORKS)
        bfloat16.require_bfloat16()
        assert started == [None]

    def homeless(name: str) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(bfloat16, "cache_folder", homeless)
    started = children(DIES)
    with pytest.raises(ConfigError):
        bfloat16.require_bfloat16()
    assert started == [None, CAP]


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import time; time.sleep(60)", "timed out"),
        ("raise ImportError('no torch here')", "no torch here"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "ended with exit code -9",
        ),  # not by the processor
    ],
)
def test_no_answer_is_a_warning_and_not_kept(
    program: str, problem: str, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children(program)
    if "sleep" in program:
        monkeypatch.setattr(bfloat16, "TIMEOUT", 0.2)
    with pytest.warns(RuntimeWarning, match=f"Could not check .*{problem}"):
        bfloat16.require_bfloat16()
    assert not (tmp_path / "cache").exists()


def test_no_python_to_start(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16.sys, "executable", "/nowhere/python")
    with pytest.warns(RuntimeWarning, match="Could not check"):
        bfloat16.require_bfloat16()


def test_the_processor_is_known_by_name_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    def announcing(flags: str) -> str:
        text = f"processor\t: 0\nmodel name\t: A\nflags\t\t: {flags}\n\n"
        monkeypatch.setattr(bfloat16.Path, "read_text", lambda *_, **__: text)
        return bfloat16._processor()

    assert announcing("fpu amx_tile").startswith("A, ")
    assert announcing("fpu amx_tile") != announcing("fpu")


@contextlib.contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(ConfigError, match="Use float32"):
        yield


class TestCallers:
    @pytest.fixture(autouse=True)
    def deadly(self, children: Children) -> None:
        children(DIES)

    def test_a_run_before_it_opens_its_images(self, tmp_path: Path) -> None:
        images = class_folders(tmp_path / "images")
        with refused():
            train(config(images, "training.precision=bfloat16"), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        train(config(images, "training.steps=1", "training.epochs=null"), tmp_path / "run")

    def test_a_large_batch_step(self) -> None:
        model = nn.Linear(3, 2)
        with refused():
            LargeBatchStep(model, lambda vectors, labels: vectors.sum(), autocast=torch.bfloat16)
        LargeBatchStep(model, lambda vectors, labels: vectors.sum())(torch.ones(4, 3), torch.arange(4))

    def test_a_large_batch_step_whose_model_has_come_to_the_cpu(self) -> None:
        model = nn.Linear(3, 2, device="meta")
        step = LargeBatchStep(model, lambda vectors, labels: vectors.sum(), autocast=torch.bfloat16)
        model.to_empty(device="cpu")
        with refused():
            step(torch.ones(4, 3), torch.arange(4))
