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
            return VectorReader(self.parts, torch.empty(0)).take(rows, release=False).numpy()
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
        DataError: The file does not exist, is truncated, or does not contain vectors.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"The file {path} does not exist.") from None
    except Exception as error:  # the parser of a damaged header raises many kinds
        raise DataError(f"{path} is not a complete .npy file: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind != "f":
        raise DataError(f"{path} does not contain vectors: expected floating-point values (vectors, dimensions)")
    return found


class VectorReader:
    """The concatenation of several arrays of vectors, as a `VectorSource` of the ranker.

    Args:
        parts: Arrays (n, d) each.
        like: Tensor with the dtype and device of the vectors that are read.
    """

    def __init__(self, parts: Sequence[Vectors], like: Tensor) -> None:
        self.parts, self.device, self.dtype = parts, like.device, like.dtype
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def blocks(self, size: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield the vectors from row `first` on in blocks (m, d) of at most `size` rows, each with its first row.

        A block does not span two parts.
        """
        for part, end in zip(self.parts, self._ends.tolist(), strict=True):
            begin = end - len(part)
            for start in range(max(first - begin, 0), len(part), size):
                yield begin + start, self._tensor(part[start : start + size])

    def take(self, rows: Tensor | NDArray[np.int64], *, release: bool = True) -> Tensor:
        """Return the vectors of these rows, (m, d).

        Args:
            rows: Row numbers, (m,).
            release: Remove the pages of memory maps from this process's memory.
        """
        rows = torch.as_tensor(rows).cpu().numpy()
        part_of_row = np.searchsorted(self._ends, rows, side="right")
        taken = torch.empty(len(rows), self.parts[0].shape[1], dtype=self.dtype, device=self.device)
        for number in np.unique(part_of_row).tolist():
            positions = np.flatnonzero(part_of_row == number)
            part = self.parts[number]
            chosen = rows[positions] - (self._ends[number] - len(part))
            found = part[torch.from_numpy(chosen)] if isinstance(part, Tensor) else part[chosen]
            taken[torch.from_numpy(positions).to(self.device)] = self._tensor(found)
            if release:
                _release_pages(part)
        return taken

    def _tensor(self, vectors: Vectors) -> Tensor:
        if isinstance(vectors, Tensor):
            return vectors.detach().to(self.device, self.dtype)
        copied = torch.from_numpy(np.array(vectors))  # reads a memory map
        _release_pages(vectors)
        return copied.to(self.device, self.dtype)


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
