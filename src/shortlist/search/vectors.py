"""Vectors in tensors, arrays and memory-mapped files, read block by block."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import DataError


class StackedVectors:
    """Several arrays of vectors that are read as one, without copying them. A slice is a view; chosen rows are copied.

    Args:
        parts: Arrays of float32, (n, d) each. They may be memory-mapped.
        dim: The dimension d.
    """

    ndim = 2

    def __init__(self, parts: Sequence[NDArray[np.float32]], dim: int) -> None:
        self.parts = [part for part in parts if len(part)]
        self.shape = (sum(map(len, self.parts)), dim)

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def __getitem__(self, rows: slice) -> StackedVectors: ...

    @overload
    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.float32]: ...

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> StackedVectors | NDArray[np.float32]:
        if not isinstance(rows, slice):
            if not len(rows):
                return np.empty((0, self.shape[1]), dtype=np.float32)
            return take(self.parts, rows, torch.empty(0), release=False).numpy()
        first, stop, _ = rows.indices(len(self))
        ends = np.cumsum([len(part) for part in self.parts]).tolist()
        starts = [end - len(part) for end, part in zip(ends, self.parts, strict=True)]
        views = [part[max(first - at, 0) : max(stop - at, 0)] for at, part in zip(starts, self.parts, strict=True)]
        return StackedVectors(views, self.shape[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if len(self.parts) == 1 and not copy:
            return np.asarray(self.parts[0], dtype=dtype)
        return np.concatenate([np.empty((0, self.shape[1]), dtype=np.float32), *self.parts], dtype=dtype)


Vectors = Tensor | NDArray[Any] | StackedVectors  # (n, d); arrays may be memory-mapped, and in half precision


def open_vectors(path: Path | str) -> NDArray[Any]:
    """Open the (n, d) vectors of a .npy file as a memory map. Nothing is read yet.

    Raises:
        DataError: The file does not exist, is truncated, or does not hold vectors.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"there is no {path}") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not a complete .npy file: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind != "f":
        raise DataError(f"{path} does not hold vectors: expected a floating-point array of shape (vectors, dimensions)")
    return found


def blocks(parts: Sequence[Vectors], rows: int, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Iterate over the concatenation of several arrays of vectors in blocks.

    Args:
        parts: Arrays (n, d) each.
        rows: Maximum number of vectors per block.
        like: Tensor with the dtype and device of the blocks.

    Yields:
        The row number of the first vector of the block, and the block (m, d). A block does not span two parts.
    """
    first = 0
    for part in parts:
        for start in range(0, len(part), rows):
            yield first + start, _tensor(part[start : start + rows], like)
        first += len(part)


def take(parts: Sequence[Vectors], rows: NDArray[np.int64], like: Tensor, *, release: bool = True) -> Tensor:
    """Return rows of the concatenation of several arrays of vectors.

    Args:
        parts: Arrays (n, d) each.
        rows: Row numbers, (m,).
        like: Tensor with the dtype and device of the result.
        release: Remove the pages of memory maps from this process's memory.

    Returns:
        Vectors, (m, d).
    """
    ends = np.cumsum([len(part) for part in parts])
    part_of_row = np.searchsorted(ends, rows, side="right")
    taken = torch.empty(len(rows), parts[0].shape[1], dtype=like.dtype, device=like.device)
    for number in np.unique(part_of_row).tolist():
        positions = np.flatnonzero(part_of_row == number)
        part, first = parts[number], ends[number] - len(parts[number])
        chosen = rows[positions] - first
        found = part[torch.from_numpy(chosen)] if isinstance(part, Tensor) else part[chosen]
        taken[torch.from_numpy(positions).to(like.device)] = _tensor(found, like)
        if release:
            _release_pages(part)
    return taken


def _tensor(vectors: Vectors, like: Tensor) -> Tensor:
    if isinstance(vectors, Tensor):
        return vectors.detach().to(like.device, like.dtype)
    copied = torch.from_numpy(np.array(vectors))  # reads a memory map
    _release_pages(vectors)
    return copied.to(like.device, like.dtype)


def _release_pages(array: Vectors) -> None:
    """Remove the pages of a read-only memory map from this process's memory. The system may keep them in its cache."""
    if isinstance(array, StackedVectors):
        for part in array.parts:
            _release_pages(part)
    if not isinstance(array, np.memmap) or array.mode != "r" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
