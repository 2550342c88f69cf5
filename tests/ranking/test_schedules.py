"""A rank temperature that changes during training, and one that follows the median rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import (
    Engine,
    LinearTail,
    MedianRank,
    RecallAtKLoss,
    Schedule,
    SiMix,
    median_rank,
    recall_at_k_loss,
)
from tests import reference
from tests.ranking.losses import assert_same, clusters, unit, value_and_gradient

values = st.floats(1e-3, 1e3)


@given(start=values, end=values, until=st.floats(0.01, 1), progress=st.floats(0, 1))
def test_a_schedule_is_geometric(start: float, end: float, until: float, progress: float) -> None:
    schedule = Schedule(start, end, until)
    assert schedule(progress) == pytest.approx(reference.schedule(start, end, until, progress), rel=1e-9)
    assert schedule(0) == start
    assert schedule(until) == schedule(1) == end  # to the last bit


def test_bad_schedules() -> None:
    for name, value in (("start", 0), ("end", -1.0), ("until", math.inf), ("start", True), ("end", "1")):
        with pytest.raises(ValueError, match=f"{name} of a schedule must be a finite number above 0"):
            Schedule(**{"start": 1.0, "end": 1.0, name: value})
    with pytest.raises(ValueError, match=r"must be at most 1, got 1.5"):
        Schedule(2.0, 1.0, until=1.5)
    for name in ("share", "end"):
        with pytest.raises(ValueError, match=f"{name} of MedianRank must be a finite number above 0, got 0"):
            MedianRank(**{name: 0})


EMBEDDINGS, LABELS = unit(12, 4), torch.arange(12) // 4


def at(loss: RecallAtKLoss, progress: float) -> tuple[Tensor, Tensor]:
    loss.progress = progress
    return value_and_gradient(loss, EMBEDDINGS, LABELS)


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_a_scheduled_rank_temperature(progress: float) -> None:
    temperature = reference.schedule(50, 2, 0.8, progress)
    want = value_and_gradient(reference.recall_at_k_loss, EMBEDDINGS, LABELS, (1, 2), temperature)
    assert_same(at(RecallAtKLoss((1, 2), Schedule(50, 2, until=0.8)), progress), want)


def test_the_loss_at_the_end_is_that_of_the_paper() -> None:
    loss = RecallAtKLoss(rank_temperature=Schedule(50, 1))
    want = value_and_gradient(recall_at_k_loss, EMBEDDINGS, LABELS)
    assert_same(at(loss, 0.5), want, 0)
    assert (at(loss, 0.3)[1] - want[1]).abs().max() > 1e-6  # the control


def test_the_progress_must_be_set() -> None:
    with pytest.raises(ValueError, match=r"set its attribute `progress` to the share of training"):
        RecallAtKLoss(1, Schedule(2, 1))(EMBEDDINGS, LABELS)
    RecallAtKLoss()(EMBEDDINGS, LABELS)


@settings(max_examples=15, deadline=None)
@given(
    labels=st.lists(st.integers(-2, 2), min_size=1, max_size=9).map(torch.tensor),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.1, 0.5, 3.0]),
    tail=st.booleans(),
    prune=st.booleans(),
)
def test_the_temperature_follows_the_median_rank(
    labels: Tensor, seed: int, share: float, tail: bool, prune: bool
) -> None:
    """The literal median, and a gradient that treats it as a constant."""
    embeddings, literal = unit(len(labels), 3, seed=seed), {"tail": reference.linear_tail(0.05) if tail else None}
    engine, options = Engine(prune=prune, tile_size=2), {"tail": LinearTail() if tail else None}
    median = reference.median_rank(embeddings, labels, similarity_temperature=0.05, **literal)
    assert median_rank(embeddings, labels, 0.05, engine=engine, **options) == pytest.approx(median, rel=1e-9)
    temperature = max(0.3, share * median)
    want = value_and_gradient(reference.recall_at_k_loss, embeddings, labels, (1, 2), temperature, 0.05, **literal)
    loss = RecallAtKLoss((1, 2), MedianRank(share, end=0.3), 0.05, engine=engine, **options)
    assert_same(value_and_gradient(loss, embeddings, labels), want)


def test_the_median_is_that_of_the_ranks_that_the_loss_uses() -> None:
    """With virtual examples, there are more ranks."""
    embeddings, labels = clusters(10, 4, 2.0), torch.arange(40) // 4
    plain = median_rank(embeddings, labels)
    virtual = SiMix(torch.Generator().manual_seed(0))(labels)
    assert median_rank(embeddings, labels, virtual=virtual) != plain


def test_positives_out_of_reach_have_a_gradient() -> None:
    """First noise, so that nearly all ranks are in the hundreds, then well separated classes."""
    embeddings, labels = unit(800, 64, dtype=torch.float32), torch.arange(800) // 2
    adaptive, paper = RecallAtKLoss(k=1, rank_temperature=MedianRank()), RecallAtKLoss(k=1)
    gradients = [value_and_gradient(loss, embeddings, labels)[1] for loss in (adaptive, paper)]
    without = [(gradient.abs().amax(1) < 1e-9).float().mean() for gradient in gradients]
    assert without[0] == 0
    assert without[1] > 0.1  # the control
    trained = clusters(100, 4, 0.2), torch.arange(400) // 4
    assert median_rank(*trained) < 3
    found = [value_and_gradient(RecallAtKLoss(rank_temperature=each), *trained) for each in (MedianRank(0.3), 1.0)]
    assert_same(found[0], found[1], 0)


def test_without_positives() -> None:
    assert median_rank(EMBEDDINGS, torch.arange(12)) == 0
    assert RecallAtKLoss(rank_temperature=MedianRank())(EMBEDDINGS, torch.arange(12)) == 0


def test_repr() -> None:
    loss = RecallAtKLoss(1, MedianRank(), tail=LinearTail())
    for part in (", rank_temperature=MedianRank(share=0.5, end=1.0)", "tail=LinearTail(slope="):
        assert part in repr(loss)
    assert ", rank_temperature=Schedule(start=9.0, end=1.0, until=0.5)" in repr(RecallAtKLoss(1, Schedule(9, 1)))
    assert ", rank_temperature=" not in repr(RecallAtKLoss(1)).replace("RecallHead(k=(1,), rank_temperature=1.0)", "")
