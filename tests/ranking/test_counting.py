"""Each method of counting, compared with a sum of sigmoids."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking.counting import (
    BandCounts,
    Comparison,
    DenseCounts,
    FactoredCounts,
    RankCounts,
    SeriesCounts,
    soft_steps,
)
from shortlist.ranking.pruning import exponent_range, flat_from, series, similarity_out_of_reach
from shortlist.ranking.scratch import Scratch
from shortlist.ranking.tail import LinearTail


def counts(
    way: str, items: Tensor, thresholds: Tensor, members: Tensor, scale: float, tail: LinearTail | None = None
) -> RankCounts:
    compared = Comparison(items, thresholds, members, scale, Scratch(items.device, items.dtype), tail)
    if way == "dense":
        return DenseCounts(compared, soft_steps)
    if way == "factored":
        return FactoredCounts(compared)
    if way == "series":
        return SeriesCounts(compared)
    lowest = thresholds.masked_fill(~members, torch.inf).amin(1, keepdim=True)
    floor = lowest - flat_from(items.shape[1], items.dtype) / scale
    return BandCounts(compared, floor)


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
    assert (got.layout is torch.sparse_csr) == (way == "band" and torch.backends.mkl.is_available())
    expected = (gradient / scale).scatter_add(1, places, values)
    torch.testing.assert_close(got.to_dense(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", ["factored", "band", "series"])
def test_counts_of_inactive_thresholds_are_0(way: str) -> None:
    items, thresholds = torch.zeros(2, 5), torch.zeros(2, 3)
    members = torch.tensor([[True, False, True], [False, False, False]])
    found = counts(way, items, thresholds, members, 100.0)
    torch.testing.assert_close(found.counts, torch.tensor([[2.5, 0, 2.5], [0, 0, 0]]))
    found = counts(way, items, thresholds, members.flip(0) & torch.tensor([True, False, False]), 100.0)  # one of all
    torch.testing.assert_close(found.counts, torch.tensor([[0, 0, 0], [2.5, 0, 0]]))


@pytest.mark.parametrize("way", ["dense", "factored", "band", "series"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_negligible_sigmoids_are_exactly_0(way: str, dtype: torch.dtype) -> None:
    """All items have one similarity, a little above or below the one where their sigmoids are negligible."""
    scale, number = 100.0, 50
    thresholds, members = torch.tensor([[0.5, 0.5]], dtype=dtype), torch.tensor([[True, False]])
    for temperatures in (-0.4, 0.1, 0.9, 40.0):
        items = torch.full((1, number), 0.5 - (flat_from(number, dtype) + temperatures) / scale, dtype=dtype)
        found = counts(way, items, thresholds, members, scale)
        expected = 0 if temperatures > 0 else number * torch.sigmoid((items[0, 0] - 0.5).double() * scale).item()
        assert found.counts[0, 0].item() == pytest.approx(expected, rel=1e-4, abs=0)


@pytest.mark.parametrize("way", ["factored", "band", "series"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thresholds_as_far_apart_as_the_range_of_exponents(way: str, dtype: torch.dtype) -> None:
    """The thresholds are in one row, with items from far below the lowest to far above the highest."""
    width, scale, number = flat_from(400, dtype), 100.0, 400
    span = exponent_range(dtype) - width
    for share in (0.5, 0.9, 0.999, 1.001, 1.9, 3.0):
        thresholds = torch.tensor([[0.0, share / 3, share]], dtype=dtype) * (span / scale)
        items = torch.linspace(-2 * width, (share + 1) * span + 2 * width, number, dtype=dtype).unsqueeze(0) / scale
        found = counts(way, items, thresholds, torch.ones(1, 3, dtype=torch.bool), scale)
        expected = torch.sigmoid((items.double().unsqueeze(1) - thresholds.double().unsqueeze(2)) * scale).sum(2)
        torch.testing.assert_close(found.counts.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("items", [1, 100, 4000, 30_000, 10**5, 10**7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_series_is_the_sigmoid(items: int, dtype: torch.dtype) -> None:
    """The largest error of all items changes a count by less than its rounding error, and powers stay in range."""
    depth, coefficients = series(items, dtype)
    y = math.exp(-depth) * torch.linspace(0, 1, 10_001, dtype=torch.float64)
    polynomial = sum(c * y**n for n, c in enumerate(coefficients, start=1))
    rounding = y * torch.finfo(torch.float64).eps  # of this comparison
    error = (polynomial - y / (1 + y)).abs()
    assert (error <= torch.finfo(dtype).eps / items + 4 * rounding).all()
    assert len(coefficients) * (flat_from(items, dtype) - depth) < exponent_range(dtype) + 2
    assert 1 <= depth <= flat_from(items, dtype)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 3e-6), (torch.float64, 5e-13)])
def test_the_slope_of_the_series_is_that_of_the_sigmoid(dtype: torch.dtype, rounding: float) -> None:
    """The relative error is bounded from the start of the series down to where the sigmoid is almost flat."""
    depth, _ = series(100, dtype)
    items = torch.linspace(-2 * depth, -depth - 1e-3, 100, dtype=dtype).unsqueeze(0)
    one, place = torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=torch.long)
    found = counts("series", items, 0 * one, one > 0, 1.0).gradient(one, place, 0 * one, torch.empty_like(items))
    slope = torch.sigmoid(items.double()) * torch.sigmoid(-items.double())
    expected = slope.scatter_add(1, place, -slope.sum(1, keepdim=True))
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negligible_terms_change_a_sum_by_one_rounding_error(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    for terms in (1, 2, 100, 10**7):
        assert terms / (1 + math.exp(flat_from(terms, dtype))) == pytest.approx(limits.eps, rel=1e-5)
    assert flat_from(0, dtype) == flat_from(1, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_stay_in_range(dtype: torch.dtype) -> None:
    """They are neither infinite nor subnormal, with room for a few factors that are not much smaller than 1."""
    limits, exponent = torch.finfo(dtype), torch.tensor(exponent_range(dtype), dtype=dtype)
    assert 4 * exponent.exp() < limits.max
    assert limits.tiny < exponent.neg().exp() / 4 < 4 * limits.tiny


@pytest.mark.parametrize("reach", [1.4, 3.2, 4.0, 4.7])
@pytest.mark.parametrize("more", [0, 1, 17])
def test_out_of_reach_is_where_enough_competitors_are_ahead(reach: float, more: int) -> None:
    """With c competitors at or above a positive, its rank is at least 1 + c / 2, because all of them may be ties."""
    enough = next(c for c in range(20) if 1 + c / 2 > reach)
    for ahead in range(2 * enough + more + 1):
        row = torch.zeros(2, 2 * enough + more)
        row[:, :ahead] = 0.5
        bound = similarity_out_of_reach(row, reach)
        assert bound.flatten().tolist() == [0.5 if ahead >= enough else 0.0] * 2
    for size in (0, 1, int(4 * (reach - 1))):  # too few competitors for any bound
        assert (
            similarity_out_of_reach(torch.zeros(2, size), max(reach, 1 + (size + 1) / 4)).tolist() == [[-torch.inf]] * 2
        )
