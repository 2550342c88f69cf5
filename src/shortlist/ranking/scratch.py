"""Reusable buffers for large temporary tensors: on a CPU, new memory pages cost more than the arithmetic on them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_LARGE = 2**20  # number of elements from which the size of a buffer is rounded up to a power of two
_KEPT_BYTES = 64 * 2**20  # maximum size of the buffers that a thread keeps between calls; small batches need them most


class Scratch:
    """Named buffers on one device. Requesting a name again overwrites the tensor that was returned for it before."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor of this shape."""
        size = math.prod(shape)
        if name not in self._buffers or len(self._buffers[name]) < size:
            capacity = size if size < _LARGE else 1 << (size - 1).bit_length()  # also fits slightly larger requests
            self._buffers[name] = torch.empty(capacity, device=self._device, dtype=dtype or self._dtype)
        return self._buffers[name][:size].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class _Kept(threading.local):
    """The buffers that this thread keeps, by their usual dtype."""

    def __init__(self) -> None:
        self.scratch: dict[torch.dtype, Scratch] = {}


_kept = _Kept()


@contextmanager
def kept_scratch(device: torch.device, dtype: torch.dtype) -> Iterator[Scratch]:
    """Provide buffers that a thread keeps between calls, unless they are large.

    GPUs do not need this, because their allocator keeps memory itself. Tensors of inference mode and of fake modes
    cannot be used outside of these modes, so they are not kept.
    """
    plain = type(torch.empty(0, device=device)) is Tensor and not torch.is_inference_mode_enabled()
    kept = _kept.scratch if plain and device.type == "cpu" else {}
    scratch = kept.pop(dtype, None) or Scratch(device, dtype)  # nested calls have their own
    yield scratch
    if scratch.nbytes <= _KEPT_BYTES:
        kept[dtype] = scratch
