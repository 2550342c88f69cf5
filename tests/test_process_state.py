"""Library calls leave the process as they found it: its settings belong to whoever started it."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader

from shortlist.batches import memory
from shortlist.data import open_collection
from shortlist.encoding.parquet import embed_to_table
from shortlist.export import export
from shortlist.gallery import index
from shortlist.process import threads
from shortlist.report.run_report import write_report
from shortlist.training import RunFolder, evaluate_run, open_encoder, resume, train
from tests.training.runs import class_folders, config

SHORT = ("training.steps=1", "training.epochs=null", "data.validation=none", "training.threads=1")


def state() -> dict[str, Any]:
    """All of the process that a library could change and nobody would expect it to."""
    root = logging.getLogger()
    return {
        "random numbers of torch": torch.get_rng_state().numpy().tobytes(),
        "random numbers of numpy": [str(part) for part in np.random.get_state()],  # noqa: NPY002
        "random numbers of Python": random.getstate(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), faiss.omp_get_max_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "defaults of torch": (torch.get_default_dtype(), torch.get_default_device()),
        "precision": (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "working directory": Path.cwd(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (list(root.handlers), root.level, root.manager.disable),
        "matplotlib": dict(mpl.rcParams),
        "Pillow": (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES),
        "numpy": np.geterr(),
        "processes": multiprocessing.get_start_method(allow_none=True),
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.excepthook),
    }


class WithoutMallopt(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        assert name != "mallopt", "the allocator belongs to the command line"
        return super().__getattr__(name)


def changes(call: Callable[[], object]) -> list[str]:
    before = state()
    call()
    after = state()
    return [name for name in before if after[name] != before[name]]


@pytest.fixture(autouse=True)
def other_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Values that none of ours would happen to be."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(random.randrange(2**32))
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=WithoutMallopt))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def torch_has_loaded_data() -> None:
    """The first DataLoader with workers sets a SIGCHLD handler and the start method, once per process, whoever asks."""
    list(DataLoader(torch.arange(2), num_workers=1, multiprocessing_context="spawn"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`images`, and `run`: a finished run on them."""
    root = tmp_path_factory.mktemp("state")
    train(config(class_folders(root / "images"), *SHORT), root / "run")
    return root


def stopped(run: RunFolder) -> RunFolder:
    run.evaluation_file.unlink()
    return run


STAGES: dict[str, Callable[[Path, Path], object]] = {
    "train": lambda home, out: train(config(home / "images", *SHORT, "data.workers=1"), out / "run"),
    "resume": lambda home, out: resume(stopped(train(config(home / "images", *SHORT), out / "run")).path),
    "evaluate": lambda home, out: evaluate_run(home / "run", str(home / "images")),
    "embed": lambda home, out: embed_to_table(
        open_encoder(home / "run"), open_collection(home / "images"), out / "vectors.parquet"
    ),
    "index": lambda home, out: index(
        open_encoder(home / "run"), open_collection(home / "images"), out / "gallery", kind="hnsw"
    ),
    "report": lambda home, out: write_report(home / "run", out / "report.html"),
    "export": lambda home, out: export(
        home / "run",
        torchscript=out / "model.pt",
        torch_export=out / "model.pt2",
        onnx=out / "model.onnx",
        package=out / "package",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_leaves_the_process_as_it_was(stage: str, home: Path, tmp_path: Path) -> None:
    if stage == "export":
        pytest.importorskip("onnxscript")
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
def test_a_change_would_be_noticed(change: Callable[[], object], name: str) -> None:
    assert changes(change) == [name]


def test_the_allocator_is_left_alone() -> None:
    with pytest.raises(AssertionError, match="belongs to the command line"):
        memory.reuse_freed_memory()  # which none of the stages above calls


def test_threads_are_given_back_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), threads(1):
        torch.get_num_threads() // 0
    assert torch.get_num_threads() == 2
    for number, expected in ((1, 1), (None, 2)):
        with threads(number):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2


def test_a_server_leaves_the_process_as_it_was(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
