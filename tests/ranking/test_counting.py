"""The ways to count against the sigmoid itself, each on its own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking.counting import BandCounts, DenseCounts, FactoredCounts, RankCounts, SeriesCounts, soft_steps
from shortlist.ranking.pruning import exponent_range, flat_from, series
from shortlist.ranking.scratch import Scratch


def counts(way: str, items: Tensor, thresholds: Tensor, members: Tensor, scale: float) -> RankCounts:
    scratch = Scratch(items.device, items.dtype)
    if way == "dense":
        return DenseCounts(items, thresholds, scale, soft_steps, scratch)
    if way == "factored":
        return FactoredCounts(items, thresholds, members, scale, scratch)
    if way == "series":
        return SeriesCounts(items, thresholds, members, scale, scratch)
    lowest = thresholds.masked_fill(~members, torch.inf).amin(1, keepdim=True)
    floor = lowest - flat_from(items.shape[1], items.dtype) / scale
    return BandCounts(items, thresholds, members, scale, scratch, floor)


@settings(max_examples=60, deadline=None)
@given(
    way=st.sampled_from(["dense", "factored", "band", "series"]),
    rows=st.integers(1, 4),
    size=st.integers(3, 40),
    width=st.integers(1, 3),
    spread=st.sampled_from([0.0, 0.01, 0.1, 1.0, 30.0]),  # 30 / 0.01 is far outside of the range of exponents
    seed=st.integers(0, 1000),
)
def test_each_way_is_the_sum_of_sigmoids(way: str, rows: int, size: int, width: int, spread: float, seed: int) -> None:
    random, scale = torch.Generator().manual_seed(seed), 100.0
    items = (spread * torch.randn(rows, size, generator=random, dtype=torch.float64)).requires_grad_()
    places = torch.stack([torch.randperm(size, generator=random)[:width] for _ in range(rows)])
    members = torch.rand(rows, width, generator=random) < 0.7
    weights = torch.rand(rows, width, generator=random, dtype=torch.float64) * members
    values = torch.rand(rows, width, generator=random, dtype=torch.float64)

    thresholds = items.gather(1, places)
    hidden = items.scatter(1, places, -torch.inf)  # thresholds do not compete
    want = (torch.sigmoid((hidden.unsqueeze(1) - thresholds.unsqueeze(2)) * scale)).sum(2)
    (gradient,) = torch.autograd.grad((weights * want).sum(), items)
    found = counts(way, hidden.detach(), thresholds.detach(), members, scale)
    torch.testing.assert_close(found.counts * members, want.detach() * members, rtol=1e-13, atol=1e-13)
    got = found.gradient(weights, places, values, torch.full_like(hidden, torch.nan))
    expected = (gradient / scale).scatter_add(1, places, values)
    torch.testing.assert_close(got.to_dense(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", ["factored", "band", "series"])
def test_thresholds_that_are_no_members_count_nothing(way: str) -> None:
    items, thresholds = torch.zeros(2, 5), torch.zeros(2, 3)
    members = torch.tensor([[True, False, True], [False, False, False]])
    found = counts(way, items, thresholds, members, 100.0)
    torch.testing.assert_close(found.counts, torch.tensor([[2.5, 0, 2.5], [0, 0, 0]]))


@pytest.mark.parametrize("items", [1, 100, 4000, 10**5, 10**7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_series_is_the_sigmoid(items: int, dtype: torch.dtype) -> None:
    """All items at the worst place change a count by less than a rounding, and powers stay in range."""
    depth, coefficients = series(items, dtype)
    y = math.exp(-depth) * torch.linspace(0, 1, 10_001, dtype=torch.float64)
    polynomial = sum(c * y**n for n, c in enumerate(coefficients, start=1))
    rounding = y * torch.finfo(torch.float64).eps  # of this very comparison
    error = (polynomial - y / (1 + y)).abs()
    assert (error <= torch.finfo(dtype).eps / items + 4 * rounding).all()
    assert len(coefficients) * (flat_from(items, dtype) - depth) < exponent_range(dtype) + 2
    assert 1 <= depth <= flat_from(items, dtype)
