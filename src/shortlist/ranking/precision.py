"""Ranking is computed in full precision: at temperature 0.01 a rounded similarity is another rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


def computed_dtype(*vectors: Tensor | None) -> torch.dtype:
    """The widest dtype among the vectors, and at least float32."""
    dtype = torch.float32
    for each in vectors:
        dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
    return dtype


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor a fast float32 mode of matrix products."""
    has_autocast = torch.amp.is_autocast_available(device.type)
    with torch.autocast(device.type, enabled=False) if has_autocast else nullcontext():
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # it was set by torch's newer switches, which do not mix with this one
            with _each_backend():
                yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@contextmanager
def _each_backend() -> Iterator[None]:
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
