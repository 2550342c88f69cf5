"""What need not be computed because a sigmoid is flat there. These are bounds only: no sigmoid is taken here.

A sigmoid log(n / eps) temperatures below its middle is less than eps / n, so that n items cut there change a sum by
less than one rounding.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_SPARSE = 1 / 16  # share of a row in the band up to which picking entries was measured to be faster than taking all
_SERIES = 1 / 4  # the same for the items that are not summed up in a series
_SAMPLE = 64  # items of a row that tell how crowded it is


def flat_from(terms: int, dtype: torch.dtype) -> float:
    """How many temperatures below its middle a sigmoid is flat, where so many of them are added up."""
    return math.log(max(terms, 1) / torch.finfo(dtype).eps)


def exponent_range(dtype: torch.dtype) -> float:
    """The exponent x up to which neither exp(x) nor a product of exp(-x) with a few small numbers leaves the range."""
    return -math.log(torch.finfo(dtype).tiny) - 2


@lru_cache
def series(items: int, dtype: torch.dtype) -> tuple[float, list[float]]:
    """How far below 0 an x must be for sigmoid(x) to be a short polynomial in y = e^x, and its coefficients.

    They are those of y, y^2, ...: sigmoid(x) = y / (1 + y), and 1 / (1 + y) is interpolated at the Chebyshev nodes of
    0 < y < e^-depth. With n terms the error is less than 2 (e^-depth / 4)^n e^-depth, and the depth is such that this
    is flat. The n-th power of what is not flat must be in the range of exponents.
    """
    width = flat_from(items, dtype)
    terms = next(n for n in (4, 3, 2, 1) if n * n * width / (n + 1) < exponent_range(dtype))
    depth = (width - (2 * terms - 1) * math.log(2)) / (terms + 1)
    powers = torch.arange(terms, dtype=torch.float64, device="cpu")
    nodes = (1 + torch.cos(math.pi * (powers + 0.5) / terms)) / 2  # in units of e^-depth
    values = 1 / (1 + math.exp(-depth) * nodes)
    coefficients = torch.linalg.solve(nodes.unsqueeze(1) ** powers, values) * torch.exp(depth * powers)
    return depth, coefficients.tolist()


def similarity_out_of_reach(competitors: Tensor, reach: float) -> Tensor:
    """A similarity for each row, (T, 1), at or below which a rank is certainly past `reach`; -inf if no bound helps.

    A positive with c competitors at or above it has a smooth rank of at least 1 + c / 2. The c-th largest maximum of
    disjoint groups of competitors is attained by at least c of them, and is nearly the largest similarity that is.
    """
    size = competitors.shape[1]
    if 4 * (reach - 1) > size or size < 2:
        return competitors.new_full((len(competitors), 1), -torch.inf)
    certain = int(2 * (reach - 1)) + 1
    groups = 2 * certain
    maxima = competitors[:, : size - size % groups].view(len(competitors), -1, groups).amax(1)
    return maxima.topk(certain, dim=1, sorted=False).values.amin(1, keepdim=True)


def sparse_thresholds(competitors: Tensor) -> tuple[Tensor, Tensor]:
    """Two similarities for each row, (T, 1): down to which few enough competitors are found to pick them one by one.

    The first is for rows in which the others count nothing, the second for those in which they are summed up in a
    series. Both are estimated from a sample: they decide how long an answer takes, not what it is.
    """
    size = competitors.shape[1]
    sample = competitors[:, :: max(size // _SAMPLE, 1)]
    few, more = (max(int(share * sample.shape[1]), 1) for share in (_SPARSE, _SERIES))
    highest = sample.topk(more, dim=1).values
    return highest[:, few - 1 : few], highest[:, -1:]
