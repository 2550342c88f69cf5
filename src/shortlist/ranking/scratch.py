"""Large scratch tensors, allocated once and used again: fresh pages cost a CPU more than the arithmetic on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGE = 2**20


class Scratch:
    """Named buffers on one device. What was taken under a name is overwritten when the name is taken again."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor of this shape."""
        size = math.prod(shape)
        if name not in self._buffers or len(self._buffers[name]) < size:
            room = size if size < _LARGE else 1 << (size - 1).bit_length()  # what is a little larger later fits as well
            self._buffers[name] = torch.empty(room, device=self._device, dtype=dtype or self._dtype)
        return self._buffers[name][:size].view(shape)
