"""Settings of a process that library calls must not change."""

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
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from shortlist.batches import memory


def state() -> dict[str, Any]:
    """Return settings of the process that a library could change unexpectedly."""
    import faiss
    import matplotlib as mpl

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


@contextmanager
def another_state() -> Iterator[None]:
    """Use values that differ from those that the library would set."""
    multiprocessing.get_start_method()  # the first call sets it
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(random.randrange(2**32))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "ctypes", SimpleNamespace(CDLL=WithoutMallopt))
            yield
    finally:
        torch.set_num_threads(before)
