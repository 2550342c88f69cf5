"""Blackbox AP, compared with a reference that ranks one list at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import BlackboxAPLoss, blackbox_ap_loss, query_scores
from tests import reference
from tests.ranking.losses import assert_same, unit, value_and_gradient

some_labels = st.lists(st.integers(-3, 3), min_size=1, max_size=12)
options = st.tuples(st.sampled_from([0.1, 1.0, 4.0, 50.0]), st.sampled_from([0.0, 0.02, 0.3]))


@settings(max_examples=30, deadline=None)
@given(labels=some_labels, seed=st.integers(0, 10**6), option=options, tile_size=st.integers(1, 13))
def test_the_literal_formula(labels: list[int], seed: int, option: tuple[float, float], tile_size: int) -> None:
    vectors, labels = unit(len(labels), 3, seed=seed), torch.tensor(labels)
    want = reference.blackbox_ap_loss(vectors, labels, *option)
    assert_same(value_and_gradient(blackbox_ap_loss, vectors, labels, *option, tile_size=tile_size), want)


@settings(max_examples=20, deadline=None)
@given(labels=some_labels, option=options, data=st.data())
def test_ties(labels: list[int], option: tuple[float, float], data: st.DataObject) -> None:
    """Integers: items with equal similarities count against each other, in any order."""
    number, labels = len(labels), torch.tensor(labels)
    vectors = torch.tensor(
        [data.draw(st.tuples(st.integers(-1, 1), st.integers(-1, 1))) for _ in range(number)], dtype=torch.float64
    )
    want = reference.blackbox_ap_loss(vectors, labels, option[0], 0.0)
    assert_same(value_and_gradient(blackbox_ap_loss, vectors, labels, option[0], 0.0), want)


def test_lambda_and_margin_matter() -> None:
    vectors, labels = unit(30, 3), torch.arange(30) // 3
    want = reference.blackbox_ap_loss(vectors, labels, 4.0, 0.02)
    value, gradient = value_and_gradient(blackbox_ap_loss, vectors, labels, 1.0, 0.02)
    assert value == pytest.approx(want[0].item())  # lambda is of the gradient alone
    assert (gradient - want[1]).abs().max() > 1e-3
    value, gradient = value_and_gradient(blackbox_ap_loss, vectors, labels, 4.0, 0.2)
    assert abs(value - want[0]) > 1e-2
    assert (gradient - want[1]).abs().max() > 1e-3


def test_without_margin_it_is_exact_average_precision() -> None:
    vectors, labels = unit(60, 4), torch.arange(60) // 5
    exact = 1 - query_scores(vectors, labels).average_precision.mean()
    assert blackbox_ap_loss(vectors, labels, margin=0.0).item() == pytest.approx(exact.item())
    assert blackbox_ap_loss(vectors, labels, margin=0.1).item() > exact + 1e-2  # a margin makes it harder


def one_list(scores: list[float], positive: list[int], **settings: float) -> tuple[float, Tensor]:
    items = torch.tensor(scores, dtype=torch.float64)[:, None].requires_grad_()
    query = torch.ones(1, 1, dtype=torch.float64)
    loss = BlackboxAPLoss(**settings)(query, torch.tensor([1]), ref_emb=items, ref_labels=torch.tensor(positive))
    loss.backward()
    assert items.grad is not None
    return loss.item(), items.grad[:, 0]


def test_an_example_by_hand() -> None:
    """The positive at rank 3 is pushed by lambda / 9 (rank among positives 1, rank 3, one positive)."""
    scores, positive = [0.9, 0.8, 0.6, 0.1], [0, 0, 1, 0]
    loss, gradient = one_list(scores, positive, blackbox_lambda=9 * 0.25, margin=0.0)  # to 0.85: past one rival
    assert loss == pytest.approx(1 - 1 / 3)
    assert gradient.tolist() == pytest.approx([0, 1 / 2.25, -1 / 2.25, 0])
    _, gradient = one_list(scores, positive, blackbox_lambda=9 * 0.15, margin=0.0)  # to 0.75: past none
    assert not gradient.any()
    _, gradient = one_list(scores, positive, blackbox_lambda=9 * 0.15, margin=0.04)  # no nearer with a margin
    assert not gradient.any()
    _, gradient = one_list(scores, positive, blackbox_lambda=9 * 0.4, margin=0.0)  # to 1.0: past both
    assert gradient.tolist() == pytest.approx([1 / 3.6, 1 / 3.6, -2 / 3.6, 0])


def test_a_margin_has_a_gradient_where_the_ranking_is_perfect() -> None:
    scores, positive = [0.6, 0.55], [1, 0]
    assert one_list(scores, positive, blackbox_lambda=4.0, margin=0.0)[0] == 0
    loss, gradient = one_list(scores, positive, blackbox_lambda=4.0, margin=0.06)
    assert loss == pytest.approx(0.5)
    assert gradient.tolist() == pytest.approx([-0.25, 0.25])


def test_the_size_of_the_batch_does_not_change_lambda() -> None:
    """The gradient of several queries is the mean of their individual gradients."""
    database, labels = unit(20, 3), torch.arange(20) % 4
    queries, query_labels = unit(5, 3, seed=1), torch.arange(5) % 4
    loss = BlackboxAPLoss(2.0)
    together = value_and_gradient(loss, queries, query_labels, ref_emb=database, ref_labels=labels)
    alone = [
        value_and_gradient(loss, queries[i : i + 1], query_labels[i : i + 1], ref_emb=database, ref_labels=labels)
        for i in range(5)
    ]
    want = torch.stack([value for value, _ in alone]).mean(), torch.cat([gradient for _, gradient in alone]) / 5
    assert want[1].abs().max() > 1e-3
    assert_same(together, want)


def test_no_positive_pair() -> None:
    value, gradient = value_and_gradient(blackbox_ap_loss, unit(4, 3), torch.arange(4))
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blackbox_lambda": 0}, "blackbox_lambda must be a finite number above 0"),
        ({"blackbox_lambda": float("inf")}, "blackbox_lambda must be a finite number above 0"),
        ({"margin": -0.1}, "margin must be a finite number of at least 0"),
        ({"margin": float("inf")}, "margin must be a finite number of at least 0"),
        ({"margin": True}, "margin must be a finite number of at least 0"),
    ],
)
def test_invalid_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlackboxAPLoss(**settings)


def test_repr() -> None:
    assert "margin=0.5" in repr(BlackboxAPLoss(margin=0.5))
