"""How many values of a row reach each of its bars: what every exact rank is made of."""

from __future__ import annotations

import torch
from torch import Tensor

_FEW = 24  # bars up to which comparing all values with each is faster than searching


def count_reaching(values: Tensor, bars: Tensor) -> Tensor:
    """How many of the (T, N) values of a row are at least each of its (T, P) bars: (T, P) int64."""
    return _compared(values, bars) if bars.shape[1] <= _FEW else _searched(values, bars)


def _compared(values: Tensor, bars: Tensor) -> Tensor:
    reached = torch.empty(bars.shape, dtype=torch.int64, device=bars.device)
    for column in range(bars.shape[1]):
        reached[:, column] = (values >= bars[:, column : column + 1]).sum(1, dtype=torch.int32)
    return reached


def _searched(values: Tensor, bars: Tensor) -> Tensor:
    rows, width = bars.shape
    rising, order = bars.sort(dim=1)
    below = torch.searchsorted(rising, values.contiguous(), right=True)  # (T, N) bars that a value reaches
    below += torch.arange(rows, device=bars.device)[:, None] * (width + 1)
    histogram = torch.bincount(below.view(-1), minlength=rows * (width + 1)).view(rows, width + 1)
    reached = histogram.flip(1).cumsum(1).flip(1)[:, 1:]
    return torch.empty_like(reached).scatter_(1, order, reached)
