"""Vectors in tensors, arrays and memory-mapped files, read block by block."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import DataError

SMALL_PART = 1_024  # arrays of fewer vectors are copied into one, so that a search does not read them one by one
MAX_COPIED = 16_384  # number of vectors that are converted to another type or moved to another device at a time


class StackedVectors:
    """Several arrays of vectors that are read as one. Only small ones are copied. A slice is a view.

    Args:
        parts: Arrays of float32, (n, d) each. They may be memory-mapped.
        dim: The dimension d.
    """

    ndim = 2

    def __init__(self, parts: Sequence[NDArray[np.float32]], dim: int) -> None:
        self.parts: list[NDArray[np.float32]] = []
        for is_small, group in groupby(filter(len, parts), key=lambda part: len(part) < SMALL_PART):
            some = list(group)
            self.parts += [np.concatenate(some)] if is_small and len(some) > 1 else some
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
            return VectorReader(self.parts, torch.empty(0, dtype=torch.float32, device="cpu")).take(rows).numpy()
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
        release: Remove the pages of memory maps from this process's memory after reading them. The system may keep them
            in its cache. Vectors that are searched again soon should stay.
    """

    def __init__(self, parts: Sequence[Vectors], like: Tensor, *, release: bool = False) -> None:
        self.device, self.dtype, self._release = like.device, like.dtype, release
        self._arrays = [each for part in parts for each in (part.parts if isinstance(part, StackedVectors) else [part])]
        self._tensors = [_as_tensor(each) for each in self._arrays]
        self._ends = torch.tensor([len(each) for each in self._tensors], dtype=torch.int64, device="cpu").cumsum(0)

    def __len__(self) -> int:
        return sum(map(len, self._tensors))

    def blocks(self, size: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield the vectors from row `first` on in blocks (m, d) of at most `size` rows, each with its first row.

        A block does not span two parts. It may share the memory of a part, and must not be changed.
        """
        for array, part, end in zip(self._arrays, self._tensors, self._ends.tolist(), strict=True):
            is_copied = (part.device, part.dtype) != (self.device, self.dtype)
            rows, begin = min(size, MAX_COPIED) if is_copied else size, end - len(part)
            for start in range(max(first - begin, 0), len(part), rows):
                yield begin + start, part[start : start + rows].to(self.device, self.dtype)
                self._release_pages(array)

    def take(self, rows: Tensor | NDArray[np.int64]) -> Tensor:
        """Return a copy of the vectors of these rows, (m, d)."""
        rows = torch.as_tensor(rows).cpu()
        part_of_row = torch.searchsorted(self._ends, rows, right=True)
        taken = torch.empty(len(rows), self._tensors[0].shape[1], dtype=self.dtype, device=self.device)
        for number, (array, part) in enumerate(zip(self._arrays, self._tensors, strict=True)):
            positions = (part_of_row == number).nonzero().view(-1)
            chosen = rows[positions] - (self._ends[number] - len(part))
            found = part.index_select(0, chosen.to(part.device))
            taken[positions.to(self.device)] = found.to(self.device, self.dtype)
            self._release_pages(array)
        return taken

    def _release_pages(self, array: Tensor | NDArray[Any]) -> None:
        if not self._release or not isinstance(array, np.memmap) or array.mode != "r":
            return
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            base.madvise(mmap.MADV_DONTNEED)


def _as_tensor(vectors: Tensor | NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of an array, and must not be changed."""
    if isinstance(vectors, Tensor):
        return vectors.detach()
    return torch.from_numpy(np.asarray(_Writeable(vectors)) if min(vectors.strides) >= 0 else vectors.copy())


class _Writeable:
    """The memory of an array, declared as writeable: torch warns about arrays that are read-only."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps its memory
        facts = array.__array_interface__
        self.__array_interface__ = {**facts, "data": (facts["data"][0], False)}
