"""Bounds on what need not be computed because a sigmoid is flat there. No sigmoid is evaluated in this module.

A sigmoid that is log(n / eps) temperatures below its midpoint is smaller than eps / n. Cutting off n such terms
therefore changes a sum by less than one rounding error.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

# Largest share of a row's competitors for which selecting them one by one was measured to be faster than taking all.
_SPARSE_SHARE = 1 / 16  # if the remaining competitors are dropped
_SERIES_SHARE = 1 / 4  # if the remaining competitors are summed by a series
_SAMPLE = 64  # competitors per row from which these shares are estimated


def flat_from(terms: int, dtype: torch.dtype) -> float:
    """Return how many temperatures below its midpoint a sigmoid is negligible in a sum of `terms` sigmoids."""
    return math.log(max(terms, 1) / torch.finfo(dtype).eps)


def exponent_range(dtype: torch.dtype) -> float:
    """Return the largest x for which exp(x), and exp(-x) times a few small factors, are neither inf nor subnormal."""
    return -math.log(torch.finfo(dtype).tiny) - 2


@lru_cache
def series(items: int, dtype: torch.dtype) -> tuple[float, list[float]]:
    """Approximate sigmoid(x) below x = -depth by a short polynomial in y = e^x.

    Since sigmoid(x) = y / (1 + y), the factor 1 / (1 + y) is interpolated at the Chebyshev nodes of 0 < y < e^-depth.
    With n terms the error is less than 2 (e^-depth / 4)^n e^-depth, and the depth is chosen so that this error is
    negligible in a sum over `items` terms (see `flat_from`). The number of terms is chosen so that the n-th power of
    every y that is not negligible stays within `exponent_range`.

    Returns:
        The depth, and the coefficients of y, y^2, ...
    """
    width = flat_from(items, dtype)
    for terms in (4, 3, 2, 1):
        depth = (width - (2 * terms - 1) * math.log(2)) / (terms + 1)
        if terms * (width - depth) < exponent_range(dtype):
            break
    powers = torch.arange(terms, dtype=torch.float64, device="cpu")
    nodes = (1 + torch.cos(math.pi * (powers + 0.5) / terms)) / 2  # in units of e^-depth
    values = 1 / (1 + math.exp(-depth) * nodes)
    coefficients = torch.linalg.solve(nodes.unsqueeze(1) ** powers, values) * torch.exp(depth * powers)
    return depth, coefficients.tolist()


def similarity_out_of_reach(competitors: Tensor, reach: float, least: float = 0.5) -> Tensor:
    """Bound the similarity at or below which the rank of a positive certainly exceeds `reach`.

    A positive with c competitors at or above it has a smooth rank of at least 1 + c * least. The competitors are
    divided into disjoint groups. At least c competitors reach the c-th largest of the groups' maxima, and it is close
    to the largest similarity for which that holds.

    Args:
        competitors: Similarities of shape (T, N).
        reach: Rank beyond which a positive does not contribute to the loss.
        least: Least contribution of a competitor at or above a positive to its rank: 1/2 for a sigmoid.

    Returns:
        Similarities of shape (T, 1); -inf where no bound can be given.
    """
    size = competitors.shape[1]
    certain = int((min(reach, size + 1) - 1) / least) + 1
    groups = 2 * certain
    if groups > size:
        return competitors.new_full((len(competitors), 1), -torch.inf)
    maxima = competitors[:, : size - size % groups].view(len(competitors), -1, groups).amax(1)
    return maxima.topk(certain, dim=1, sorted=False).values.amin(1, keepdim=True)


def sparse_thresholds(competitors: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the similarities above which few enough competitors lie to select them one by one.

    The estimates come from a sample of each row. They affect the running time only, not the result.

    Args:
        competitors: Similarities of shape (T, N).

    Returns:
        Two thresholds per row, each of shape (T, 1): one for dropping the competitors below it, and a lower one for
        summing the competitors below it by a series.
    """
    size = competitors.shape[1]
    sample = competitors[:, :: max(size // _SAMPLE, 1)]
    sparse_count, series_count = (max(int(share * sample.shape[1]), 1) for share in (_SPARSE_SHARE, _SERIES_SHARE))
    highest = sample.topk(series_count, dim=1).values
    return highest[:, sparse_count - 1 : sparse_count], highest[:, -1:]
