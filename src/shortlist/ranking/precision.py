"""Full precision for rankings: at a temperature of 0.01, a rounding error in a similarity changes the rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor


def computed_dtype(*vectors: Tensor | None) -> torch.dtype:
    """Return the widest dtype among the given tensors, and at least float32."""
    dtype = torch.float32
    for each in vectors:
        dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
    return dtype


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast on a device within the context."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast and reduced-precision float32 matrix products within the context."""
    with no_autocast(device), _highest_in_process:
        yield


class _HighestInProcess:
    """Full precision of products, a setting that all threads share: the last thread that needed it restores it."""

    def __init__(self) -> None:
        self._lock, self._threads, self._setting = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._setting.enter_context(_highest())
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._setting.close()


_highest_in_process = _HighestInProcess()


@contextmanager
def _highest() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # raised if torch's newer per-backend settings were used, which do not mix with this one
        with _highest_per_backend():
            yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _highest_per_backend() -> Iterator[None]:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
