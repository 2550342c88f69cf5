"""The upper bound with a linear tail, compared with the literal formula, for every method of computing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import (
    Engine,
    LinearTail,
    Ranks,
    RecallAtKLoss,
    SmoothAPLoss,
    ranking_loss,
    recall_at_k_loss,
    smooth_ap_loss,
    tiles,
)
from shortlist.ranking.counting import PositiveCounts
from shortlist.ranking.pruning import similarity_out_of_reach
from shortlist.ranking.scratch import Scratch
from tests import reference
from tests.ranking.losses import assert_same, clusters, unit, value_and_gradient
from tests.ranking.test_counting import counts

TAIL = LinearTail(slope=30.0, start=0.1)


def with_ties(number: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Vectors whose dot products are exact in any precision, and often equal."""
    return torch.randint(-2, 3, (number, 3), generator=torch.Generator().manual_seed(seed)).to(dtype) / 4


def both(embeddings: Tensor, labels: Tensor, engine: Engine, temperature: float, rank_temperature: float) -> list[Any]:
    """Value and gradient of RS@k and of Smooth-AP, which with this tail is SupAP: found, and expected in float64."""
    step = reference.linear_tail(temperature, TAIL.slope, TAIL.start)
    recall = {"k": (1, 3), "rank_temperature": rank_temperature, "similarity_temperature": temperature}
    average = {"similarity_temperature": temperature}
    pairs = (
        (recall_at_k_loss, reference.recall_at_k_loss, recall),
        (smooth_ap_loss, reference.smooth_ap_loss, average),
    )
    return [
        (
            value_and_gradient(loss, embeddings, labels, tail=TAIL, engine=engine, **options),
            value_and_gradient(literal, embeddings.double(), labels, tail=step, **options),
        )
        for loss, literal, options in pairs
    ]


labels_of_any_sizes = st.lists(st.integers(-3, 3), min_size=1, max_size=9).map(torch.tensor)


@settings(max_examples=20, deadline=None)
@given(
    labels=labels_of_any_sizes,
    seed=st.integers(0, 10**6),
    temperatures=st.sampled_from([(0.01, 1.0), (0.2, 0.3), (0.05, 20.0)]),
    tile_size=st.integers(1, 10),
    prune=st.booleans(),
    ties=st.booleans(),
)
def test_it_is_the_literal_formula(
    labels: Tensor, seed: int, temperatures: tuple[float, float], tile_size: int, prune: bool, ties: bool
) -> None:
    embeddings = with_ties(len(labels), seed) if ties else unit(len(labels), 3, seed=seed)
    for got, want in both(embeddings, labels, Engine(tile_size=tile_size, prune=prune), *temperatures):
        assert_same(got, want)


@pytest.mark.parametrize("prune", [True, False])
def test_in_float32(prune: bool) -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4, 4])
    for seed in range(2):
        for got, want in both(with_ties(12, seed, torch.float32), labels, Engine(prune=prune), 0.05, 4.0):
            assert got[0].dtype == torch.float32
            assert_same((got[0].double(), got[1].double()), want, 1e-5)


def test_gradcheck() -> None:
    embeddings, labels = unit(9, 4, seed=5).requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
    options = {"similarity_temperature": 0.3, "tail": TAIL}
    assert torch.autograd.gradcheck(lambda x: recall_at_k_loss(x, labels, (1, 2), 50.0, **options), embeddings)
    assert torch.autograd.gradcheck(lambda x: smooth_ap_loss(x, labels, **options), embeddings)


@settings(max_examples=20, deadline=None)
@given(
    way=st.sampled_from(["dense", "factored", "band", "series"]),
    size=st.integers(3, 40),
    width=st.integers(1, 3),
    spread=st.sampled_from([0.0, 0.01, 0.1, 1.0, 30.0]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_each_way_is_the_sum_of_the_steps(
    way: str, size: int, width: int, spread: float, seed: int, dtype: torch.dtype
) -> None:
    random, scale = torch.Generator().manual_seed(seed), 100.0
    items = (spread * torch.randn(2, size, generator=random, dtype=dtype)).requires_grad_()
    places = torch.stack([torch.randperm(size, generator=random)[:width] for _ in range(2)])
    members = torch.rand(2, width, generator=random) < 0.7
    weights = torch.rand(2, width, generator=random, dtype=dtype) * members
    step = reference.linear_tail(1 / scale, TAIL.slope, TAIL.start)
    thresholds, hidden = items.gather(1, places), items.scatter(1, places, -torch.inf)
    want = torch.stack(
        [
            torch.stack([sum(step(z - t) for z in row) for t in line])
            for row, line in zip(hidden, thresholds, strict=True)
        ]
    )
    (gradient,) = torch.autograd.grad((weights * want).sum(), items)
    found = counts(way, hidden.detach(), thresholds.detach(), members, scale, TAIL)
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.counts * members, want.detach() * members, rtol=rounding, atol=rounding)
    got = found.gradient(weights, places, torch.zeros_like(weights), torch.full_like(hidden, torch.nan)).to_dense()
    torch.testing.assert_close(got, gradient / scale, rtol=10 * rounding, atol=10 * rounding)


def test_positives_have_exact_ranks_among_each_other() -> None:
    positives = torch.tensor([[0.5, 0.5, 0.9, 0.1], [0.2, 0.3, 0.9, 0.9]])
    present = torch.tensor([[True, True, True, True], [True, True, False, False]])
    found = PositiveCounts(positives, present, 100.0, Scratch(positives.device, positives.dtype), exact=True)
    assert (found.counts * present).tolist() == [[2, 2, 0, 3], [1, 0, 0, 0]]
    assert not found.gradient(torch.ones_like(positives)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_are_never_better_than_the_exact_ones(dtype: torch.dtype) -> None:
    class WorstRank:
        def __call__(self, ranks: Ranks) -> Tensor:
            return ranks.overall.masked_fill(~ranks.present, 0).amax(1)

        def reach(self, width: float) -> float:
            return torch.inf

    labels = torch.arange(60) // 4
    for seed in range(3):
        embeddings = with_ties(60, seed, dtype)
        similarity, exact = embeddings @ embeddings.T, []
        for q, (database, positives) in enumerate(reference.databases(labels)):
            ranks = (similarity[q, database] >= similarity[q, positives, None]).sum(1)  # a positive counts itself
            exact.append(ranks.max().item())
        bounded, smooth = (
            ranking_loss(WorstRank(), embeddings, labels, similarity_temperature=0.01, tail=tail).item()
            for tail in (TAIL, None)
        )
        assert bounded >= sum(exact) / len(exact)
        assert smooth < sum(exact) / len(exact)  # the control: a sigmoid counts one half for a tie


@pytest.mark.parametrize(("sort_from", "dtype"), [(0, torch.float64), (0, torch.float32), (10**9, torch.float64)])
@pytest.mark.parametrize("loss", [RecallAtKLoss(tail=TAIL), RecallAtKLoss(rank_temperature=200.0, tail=TAIL)], ids=str)
@pytest.mark.parametrize("spread", [0.35, 0.9, 4.0])
def test_pruned_equals_unpruned(
    loss: RecallAtKLoss, spread: float, dtype: torch.dtype, sort_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_SORT_FROM", sort_from)
    embeddings, labels = clusters(150, 4, spread, dtype=dtype), torch.arange(600) // 4
    found = {}
    for prune in (True, False):
        loss.engine = Engine(prune=prune)
        found[prune] = value_and_gradient(loss, embeddings, labels)
    scale = found[False][1].abs().max().clamp(min=1e-30)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=tolerance)
    torch.testing.assert_close(found[True][1] / scale, found[False][1] / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("reach", [2.0, 3.2, 4.0])
def test_half_as_many_competitors_put_a_positive_out_of_reach(reach: float) -> None:
    """A competitor at or ahead of a positive counts at least 1, and not 1/2."""
    enough = int(reach - 1) + 1
    row = torch.zeros(1, 8 * enough)
    row[:, :enough] = 0.5
    assert similarity_out_of_reach(row, reach, least=1.0) == 0.5
    assert similarity_out_of_reach(row[:, 1:], reach, least=1.0) == 0.0
    assert similarity_out_of_reach(row, reach) == 0.0
    embeddings, labels = row.T.contiguous(), torch.arange(8 * enough) // 2  # the first query sees nothing but ties
    options = {"k": 1, "rank_temperature": 0.01, "tail": LinearTail()}
    values = [recall_at_k_loss(embeddings, labels, engine=Engine(prune=prune), **options) for prune in (True, False)]
    assert values[0] == values[1]


def test_competitors_far_ahead_keep_a_gradient() -> None:
    """The negative is ahead by 0.8, which is 80 temperatures."""
    query, labels = torch.tensor([[1.0]]), torch.tensor([1])
    items = torch.tensor([[0.9], [0.1]], requires_grad=True)
    gradients = []
    for tail in (None, LinearTail()):
        loss = SmoothAPLoss(tail=tail)(query, labels, ref_emb=items, ref_labels=torch.tensor([0, 1]))
        gradients.append(torch.autograd.grad(loss, items)[0].flatten())
    assert gradients[0].abs().max() < 1e-6
    assert gradients[1][0] > 0.01
    assert gradients[1][1] == -gradients[1][0]


@pytest.mark.parametrize("value", [0, -1.0, torch.inf, "1", None])
def test_bad_settings(value: Any) -> None:
    for name in ("slope", "start"):
        with pytest.raises(ValueError, match=f"{name} of a linear tail must be a finite number above 0"):
            LinearTail(**{name: value})
