"""How many values of a row reach each of its bars: what every exact rank is made of.

Three ways, all exact, and each the fastest somewhere: few bars are compared with all values; many are sorted, and each
value searched among them; and where values are many as well, they are first put into buckets of equal width, so that
only those that share a bucket with a bar must be searched.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BUCKETS = 2048
_MANY = 4 * _BUCKETS  # values of a row from which buckets pay
_FEW, _FEW_OF_MANY = 24, 8  # bars up to which comparing is faster than searching, and than buckets


def count_at_least(values: Tensor, bars: Tensor) -> Tensor:
    """How many of the (T, N) values of a row are at least each of its (T, P) bars: (T, P) int64.

    Values and bars may be infinite, but not nan.
    """
    many = values.shape[1] >= _MANY
    if bars.shape[1] <= (_FEW_OF_MANY if many else _FEW):
        return _compared(values, bars)
    rising, order = bars.sort(dim=1)
    places = (_bucketed if many else _searched)(values, rising)
    reached = places.flip(1).cumsum(1).flip(1)[:, 1:]
    return torch.empty_like(reached).scatter_(1, order, reached)


def _compared(values: Tensor, bars: Tensor) -> Tensor:
    reached = torch.empty(bars.shape, dtype=torch.int64, device=bars.device)
    for column in range(bars.shape[1]):
        reached[:, column] = (values >= bars[:, column : column + 1]).sum(1, dtype=torch.int32)
    return reached


def _searched(values: Tensor, rising: Tensor) -> Tensor:
    """How many values reach exactly 0, 1, ... P of the rising bars of their row: (T, P + 1)."""
    rows, width = rising.shape
    below = torch.searchsorted(rising, values.contiguous(), right=True)
    below += torch.arange(rows, device=rising.device)[:, None] * (width + 1)
    return torch.bincount(below.view(-1), minlength=rows * (width + 1)).view(rows, width + 1)


def _bucketed(values: Tensor, rising: Tensor) -> Tensor:
    """As `_searched`. A bucket's number rises with the value, so bars of other buckets need no comparison."""
    rows, width = rising.shape
    number = torch.arange(rows, dtype=torch.int32, device=rising.device)[:, None] * (_BUCKETS + 1)
    bucket, own = ((_bucket(x, rising) + number).view(-1) for x in (values, rising))
    bars = torch.bincount(own, minlength=rows * (_BUCKETS + 1))  # in each bucket
    first = bars.cumsum(0) - bars  # bars before each bucket, over all rows
    inside = torch.bincount(bucket, minlength=len(bars))
    row = torch.arange(rows, device=rising.device).repeat_interleave(_BUCKETS + 1)
    alone = inside.masked_fill(bars > 0, 0)
    places = torch.zeros(rows * (width + 1), dtype=torch.int64, device=rising.device).index_add_(0, first + row, alone)
    shared = (bars > 0).index_select(0, bucket).nonzero().view(-1)  # values beside a bar
    where = bucket[shared]
    reached = _search_between(values.reshape(-1)[shared], rising.view(-1), first[where], (first + bars)[where])
    places += torch.bincount(reached + row[where], minlength=len(places))
    return places.view(rows, width + 1)


def _bucket(x: Tensor, rising: Tensor) -> Tensor:
    """0 for what is well below all bars, else from 1 up to _BUCKETS: never a smaller number for a larger x."""
    limits = torch.finfo(x.dtype)
    low = rising[:, :1].clamp(max=limits.max)
    high = rising.masked_fill(rising.isinf(), -torch.inf).amax(1, keepdim=True)  # bars may be padded
    by = ((_BUCKETS - 1) / (high - low).clamp(min=0)).clamp(limits.tiny, limits.max)
    return (x - low).mul_(by).clamp_(-1, _BUCKETS - 1).to(torch.int32).add_(1)


def _search_between(values: Tensor, rising: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Where each value belongs among the bars from its `first` up to its `last`: after those that it reaches."""
    if not len(values):
        return first
    for _ in range(int((last - first).max()).bit_length()):
        middle = (first + last) // 2
        searching = first < last
        reaches = rising[middle.clamp(max=len(rising) - 1)] <= values
        first = torch.where(searching & reaches, middle + 1, first)
        last = torch.where(searching & ~reaches, middle, last)
    return first
