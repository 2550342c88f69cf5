"""Full precision for rankings: at a temperature of 0.01, a rounding error in a similarity changes the rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


def computed_dtype(*vectors: Tensor | None) -> torch.dtype:
    """Return the widest dtype among the given tensors, and at least float32."""
    dtype = torch.float32
    for each in vectors:
        dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
    return dtype


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast and reduced-precision float32 matrix products within the context."""
    has_autocast = torch.amp.is_autocast_available(device.type)
    with torch.autocast(device.type, enabled=False) if has_autocast else nullcontext():
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # raised if torch's newer per-backend settings were used, which do not mix with this one
            with _full_precision_per_backend():
                yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@contextmanager
def _full_precision_per_backend() -> Iterator[None]:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
