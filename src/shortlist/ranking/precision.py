"""Ranking is computed in full precision: at temperature 0.01 a rounded similarity is another rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def as_computed(vectors: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor a fast float32 mode of matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
