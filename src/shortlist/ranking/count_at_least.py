"""Counting the values of a row that are at least as large as a threshold: the basis of every exact rank.

There are three exact methods, each the fastest for some sizes. With few thresholds, every value is compared with every
threshold. With many thresholds, the thresholds are sorted and every value is searched among them. In long rows, the
values are first distributed over buckets of equal width, so that only those in the same bucket as a threshold need a
search.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BUCKETS = 2048
_LONG_ROW = 4 * _BUCKETS  # number of values per row from which buckets are faster than a search for every value
_FEW_THRESHOLDS = 24  # up to this number per row, comparing is the fastest method
_FEW_THRESHOLDS_IN_LONG_ROW = 8


def count_at_least(values: Tensor, thresholds: Tensor) -> Tensor:
    """Count the values of each row that are greater than or equal to each threshold of that row.

    Args:
        values: Values of shape (T, N). They may be infinite, but not nan.
        thresholds: Thresholds of shape (T, P). They may be infinite, but not nan.

    Returns:
        Counts of shape (T, P) and dtype int64.
    """
    long_row = values.shape[1] >= _LONG_ROW
    if thresholds.shape[1] <= (_FEW_THRESHOLDS_IN_LONG_ROW if long_row else _FEW_THRESHOLDS):
        return _count_by_comparison(values, thresholds)
    ascending, order = thresholds.sort(dim=1)
    histogram = (_histogram_by_buckets if long_row else _histogram_by_search)(values, ascending)
    counts = histogram.flip(1).cumsum(1).flip(1)[:, 1:]
    return torch.empty_like(counts).scatter_(1, order, counts)


def _count_by_comparison(values: Tensor, thresholds: Tensor) -> Tensor:
    counts = torch.empty(thresholds.shape, dtype=torch.int64, device=thresholds.device)
    for column in range(thresholds.shape[1]):
        counts[:, column] = (values >= thresholds[:, column : column + 1]).sum(1, dtype=torch.int32)
    return counts


def _histogram_by_search(values: Tensor, ascending: Tensor) -> Tensor:
    """Count the values that reach exactly 0, 1, ..., P of the ascending thresholds of their row, (T, P + 1)."""
    rows, width = ascending.shape
    reached = torch.searchsorted(ascending, values.contiguous(), right=True)
    reached += torch.arange(rows, device=ascending.device)[:, None] * (width + 1)
    return torch.bincount(reached.view(-1), minlength=rows * (width + 1)).view(rows, width + 1)


def _histogram_by_buckets(values: Tensor, ascending: Tensor) -> Tensor:
    """Compute the same as `_histogram_by_search`.

    The bucket's number increases with the value, so thresholds in other buckets need no comparison.
    """
    rows, width = ascending.shape
    offset = torch.arange(rows, dtype=torch.int32, device=ascending.device)[:, None] * (_BUCKETS + 1)
    value_bucket, threshold_bucket = ((_bucket(x, ascending) + offset).view(-1) for x in (values, ascending))
    thresholds = torch.bincount(threshold_bucket, minlength=rows * (_BUCKETS + 1))  # number in each bucket
    first = thresholds.cumsum(0) - thresholds  # number of thresholds before each bucket, over all rows
    size = torch.bincount(value_bucket, minlength=len(thresholds))
    row = torch.arange(rows, device=ascending.device).repeat_interleave(_BUCKETS + 1)
    histogram = torch.zeros(rows * (width + 1), dtype=torch.int64, device=ascending.device)
    histogram.index_add_(0, first + row, size.masked_fill(thresholds > 0, 0))
    shared = (thresholds > 0).index_select(0, value_bucket).nonzero().view(-1)  # values in a bucket with a threshold
    bucket = value_bucket[shared]
    last = (first + thresholds)[bucket]
    reached = _search_between(values.reshape(-1)[shared], ascending.view(-1), first[bucket], last)
    histogram += torch.bincount(reached + row[bucket], minlength=len(histogram))
    return histogram.view(rows, width + 1)


def _bucket(x: Tensor, ascending: Tensor) -> Tensor:
    """Return 0 for an x clearly below all thresholds, else 1 to _BUCKETS; the number never decreases as x increases."""
    limits = torch.finfo(x.dtype)
    low = ascending[:, :1].clamp(max=limits.max)
    high = ascending.masked_fill(ascending.isinf(), -torch.inf).amax(1, keepdim=True)  # padding is infinite
    scale = ((_BUCKETS - 1) / (high - low).clamp(min=0)).clamp(limits.tiny, limits.max)
    return (x - low).mul_(scale).clamp_(-1, _BUCKETS - 1).to(torch.int32).add_(1)


def _search_between(values: Tensor, ascending: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Find each value's position among the thresholds from `first` to `last`: after all those that it reaches."""
    if not len(values):
        return first
    for _ in range(int((last - first).max()).bit_length()):
        middle = (first + last) // 2
        searching = first < last
        reaches = ascending[middle.clamp(max=len(ascending) - 1)] <= values
        first = torch.where(searching & reaches, middle + 1, first)
        last = torch.where(searching & ~reaches, middle, last)
    return first
