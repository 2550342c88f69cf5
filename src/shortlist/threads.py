"""The number of CPU threads of torch, changed temporarily."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Set the number of CPU threads of torch inside a `with` block, but not to more than the number of cores.

    Args:
        number: Number of threads; None leaves it unchanged.
    """
    before, cores = torch.get_num_threads(), os.cpu_count() or 1
    if number is not None and number > cores:
        warnings.warn(f"This machine has {cores} cores, so {cores} threads are used instead of {number}.", stacklevel=3)
    if number is not None:
        torch.set_num_threads(min(number, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)
