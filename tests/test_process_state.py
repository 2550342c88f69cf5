"""Library calls do not change settings of the process, such as its random state, threads and signal handlers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data._utils import signal_handling

from shortlist.batches import memory
from shortlist.data import open_collection
from shortlist.encoding.parquet import embed_to_table
from shortlist.gallery import index
from shortlist.report.run_report import write_report
from shortlist.threads import threads
from shortlist.training import EvalImages, RunFolder, evaluate_run, open_encoder, sweep
from shortlist.training import resume_run as resume
from shortlist.training import train_run as train
from tests.processes import Commands
from tests.state import another_state, changes
from tests.training.runs import class_folders, config

SHORT = (
    *("training.steps=1", "training.epochs=null", "data.validation=none", "training.threads=1"),
    "tracking=[tensorboard]",
)


@pytest.fixture(autouse=True)
def other_state() -> Iterator[None]:
    with another_state():
        yield


@pytest.fixture(scope="module", autouse=True)
def settings_of_other_packages() -> None:
    """Apply the changes that other packages make once per process, when they are first used."""
    signal_handling._set_SIGCHLD_handler()  # by the first DataLoader with workers
    import_module("shortlist.training.sweep_study")  # optuna imports sklearn, which sets environment variables


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`images`, and `run`: a finished run on them."""
    root = tmp_path_factory.mktemp("state")
    train(config(class_folders(root / "images"), *SHORT), root / "run")
    return root


def stopped(run: RunFolder) -> RunFolder:
    run.evaluation_file.unlink()
    return run


STAGES: dict[str, Callable[[Path, Path], object]] = {  # that of an export is compared where its files are: export/
    "train": lambda home, out: train(config(home / "images", *SHORT, "data.workers=1"), out / "run"),
    "resume": lambda home, out: resume(stopped(train(config(home / "images", *SHORT), out / "run")).path),
    "evaluate": lambda home, out: evaluate_run(home / "run", EvalImages(str(home / "images"))),
    "embed": lambda home, out: embed_to_table(
        open_encoder(home / "run"), open_collection(home / "images"), out / "vectors.parquet"
    ),
    "index": lambda home, out: index(
        open_encoder(home / "run"), open_collection(home / "images"), out / "gallery", kind="hnsw"
    ),
    "sweep": lambda home, out: sweep(config(home / "images", *SHORT), {"optimizer.lr": [1e-3]}, out / "study"),
    "report": lambda home, out: write_report(home / "run", out / "report.html"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_does_not_change_the_process(stage: str, home: Path, tmp_path: Path) -> None:
    assert changes(lambda: STAGES[stage](home, tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: torch.manual_seed(0), "random numbers of torch"),
        (lambda: torch.set_num_threads(1), "threads"),
        (lambda: np.random.seed(0), "random numbers of numpy"),  # noqa: NPY002
        (lambda: random.seed(0), "random numbers of Python"),
    ],
)
def test_changes_are_detected(change: Callable[[], object], name: str) -> None:
    assert changes(change) == [name]


RANDOM_STATE = """
import random, sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("shortlist", "rich", "accelerate", "typer")]:
    del sys.modules[name]  # they import rich
before = random.getstate()
{first}
from shortlist.progress import Terminal, default_display
default_display(), Terminal(sys.stderr)
assert "rich.style" in sys.modules
assert random.getstate() == before
del sys.modules["rich.style"]
import rich.style
assert random.getstate() != before  # the control: it draws a number when it is imported
"""


@pytest.mark.parametrize("first", ["", "import shortlist.report, shortlist.training"])
def test_the_first_progress_bar_draws_no_random_number(first: str, commands: Commands) -> None:
    """rich may be imported first by a progress bar, or by another package that training imports."""
    commands.python(RANDOM_STATE.format(first=first))


def test_only_the_command_line_sets_the_allocator() -> None:
    with pytest.raises(AssertionError, match="belongs to the command line"):
        memory.reuse_freed_memory()  # which none of the stages above calls


def test_the_number_of_threads_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), threads(1):
        torch.get_num_threads() // 0
    assert torch.get_num_threads() == 2
    for number, expected in ((1, 1), (None, 2)):
        with threads(number):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2


def test_a_server_does_not_change_the_process(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    import uvicorn

    from shortlist.serve import serve

    gallery, _ = index(open_encoder(home / "run"), open_collection(home / "images"), tmp_path / "gallery")
    inside: list[int] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: inside.append(torch.get_num_threads()))
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")]
    before = [(each.level, list(each.handlers), each.propagate) for each in loggers]
    assert changes(lambda: serve(gallery, port=0)) == []
    assert inside == [1]
    assert [(each.level, list(each.handlers), each.propagate) for each in loggers] == before
