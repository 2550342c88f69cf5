"""What need not be computed because a sigmoid is flat there. These are bounds only: no sigmoid is taken here.

A sigmoid log(n / eps) temperatures below its middle is less than eps / n, so that n items cut there change a sum by
less than one rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SPARSE = 1 / 16  # share of a row in the band up to which picking entries was measured to be faster than taking all
_SAMPLE = 128  # items of a row that tell how crowded it is


def flat_from(terms: int, dtype: torch.dtype) -> float:
    """How many temperatures below its middle a sigmoid is flat, where so many of them are added up."""
    return math.log(max(terms, 1) / torch.finfo(dtype).eps)


def half_range(dtype: torch.dtype) -> float:
    """The exponent x for which exp(-x) times exp(-x) is the smallest normal number."""
    return -math.log(torch.finfo(dtype).tiny) / 2


def similarity_out_of_reach(competitors: Tensor, reach: float) -> Tensor | None:
    """A similarity for each row, (T, 1), at or below which a rank is certainly past `reach`; None if no bound helps.

    A positive with c competitors at or above it has a smooth rank of at least 1 + c / 2. The c-th largest maximum of
    disjoint groups of competitors is attained by at least c of them, and is nearly the largest similarity that is.
    """
    size = competitors.shape[1]
    if 16 * (reach - 1) > size or size < 2:
        return None
    certain = int(2 * (reach - 1)) + 1
    groups = 2 * certain
    maxima = competitors[:, : size - size % groups].view(len(competitors), -1, groups).amax(1)
    return maxima.topk(certain, dim=1, sorted=False).values.amin(1, keepdim=True)


def sparse_threshold(competitors: Tensor) -> Tensor:
    """A similarity for each row, (T, 1), above which there are few enough competitors to pick them one by one.

    It is estimated from a sample: it decides how long an answer takes, not what it is.
    """
    size = competitors.shape[1]
    sample = competitors[:, :: max(size // _SAMPLE, 1)]
    return sample.topk(max(int(_SPARSE * sample.shape[1]), 1), dim=1, sorted=False).values.amin(1, keepdim=True)
