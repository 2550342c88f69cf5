"""Reusable buffers for large temporary tensors: on a CPU, new memory pages cost more than the arithmetic on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGE = 2**20  # elements from which a buffer is rounded up to a power of two


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
