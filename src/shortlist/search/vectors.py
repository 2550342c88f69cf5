"""Embeddings that need not be in memory: tensors, arrays and memory-mapped files, a block at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import DataError

Vectors = Tensor | NDArray[Any]  # (n, d); an array may be a memory map, and of half precision
Progress = Callable[[int, int], None]  # how many are done, and of how many


def open_vectors(path: Path | str) -> NDArray[Any]:
    """The (n, d) vectors of a .npy file, memory-mapped: nothing is read yet.

    Raises:
        DataError: it is not there, cut off, or does not hold vectors.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"there is no {path}") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not a whole .npy file: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind != "f":
        raise DataError(f"{path} holds no vectors, which would be a matrix (vectors, dimensions) of floating point")
    return found


def blocks(parts: Sequence[Vectors], rows: int, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """All vectors of the parts, one part after another: the number of the first of a block, and the block.

    Args:
        parts: (n, d) each.
        rows: most vectors of a block.
        like: a tensor of the dtype and device that the blocks shall have.
    """
    first = 0
    for part in parts:
        for start in range(0, len(part), rows):
            yield first + start, _tensor(part[start : start + rows], like)
        first += len(part)


def take(parts: Sequence[Vectors], rows: NDArray[np.int64], like: Tensor) -> Tensor:
    """Some of the vectors, (len(rows), d), by their numbers when the parts are counted one after another."""
    ends = np.cumsum([len(part) for part in parts])
    where = np.searchsorted(ends, rows, side="right")
    taken = torch.empty(len(rows), parts[0].shape[1], dtype=like.dtype, device=like.device)
    for number in np.unique(where).tolist():
        mine = np.flatnonzero(where == number)
        part, first = parts[number], ends[number] - len(parts[number])
        chosen = rows[mine] - first
        found = part[torch.from_numpy(chosen)] if isinstance(part, Tensor) else part[chosen]
        taken[torch.from_numpy(mine).to(like.device)] = _tensor(found, like)
        _let_go(part)
    return taken


def _tensor(vectors: Vectors, like: Tensor) -> Tensor:
    if isinstance(vectors, Tensor):
        return vectors.detach().to(like.device, like.dtype)
    copied = torch.from_numpy(np.array(vectors))  # a copy: what is mapped is read now
    _let_go(vectors)
    return copied.to(like.device, like.dtype)


def _let_go(array: Vectors) -> None:
    """Take the pages of a file that is only read out of this process's memory; the system may keep them, or not."""
    if not isinstance(array, np.memmap) or array.mode != "r" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
