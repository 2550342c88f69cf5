"""What need not be computed, because a sigmoid is flat there. Bounds only: no sigmoid is taken here.

A sigmoid `width` temperatures from its middle is as good as 0 or 1: log(N / eps) of the dtype, so that N items cut
there err by less than one rounding together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BAND = (
    1 / 16
)  # share of a row in the band up to which picking entries was measured to be cheaper than taking every sigmoid
_SAMPLE = 128  # items of a row that tell how crowded it is


def flat_from(items: int, dtype: torch.dtype) -> float:
    """How many temperatures from its middle a sigmoid counts as flat."""
    return math.log(max(items, 1) / torch.finfo(dtype).eps)


def similarity_out_of_reach(competitors: Tensor, reach: float) -> Tensor | None:
    """A similarity for each row, (T, 1), at or below which a rank is certainly past `reach`; None if that is in vain.

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


def similarity_of_the_crowd(competitors: Tensor) -> Tensor:
    """A similarity for each row, (T, 1), above which there are few enough competitors to pick them one by one.

    It is estimated from a sample: it decides what an answer costs, not what it is.
    """
    size = competitors.shape[1]
    sample = competitors[:, :: max(size // _SAMPLE, 1)]
    return sample.topk(max(int(_BAND * sample.shape[1]), 1), dim=1, sorted=False).values.amin(1, keepdim=True)
