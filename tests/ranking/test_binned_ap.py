"""Binned AP, compared with the literal formula and with exact AP, for any tile size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import BinnedAPLoss, binned_ap_loss, query_scores
from tests import reference
from tests.ranking.losses import assert_same, unit, value_and_gradient

some_labels = st.lists(st.integers(-3, 3), min_size=1, max_size=7)  # classes of any size, singletons too


@settings(max_examples=20, deadline=None)
@given(
    labels=some_labels,
    seed=st.integers(0, 10**6),
    bins=st.sampled_from([2, 3, 7, 12]),
    tile_size=st.integers(1, 9),
    length=st.sampled_from([0.5, 1.0, 1.2]),  # longer vectors have similarities beyond the bins
)
def test_the_literal_formula(labels: list[int], seed: int, bins: int, tile_size: int, length: float) -> None:
    vectors, labels = length * unit(len(labels), 3, seed=seed), torch.tensor(labels)
    want = value_and_gradient(reference.binned_ap_loss, vectors, labels, bins)
    assert_same(value_and_gradient(binned_ap_loss, vectors, labels, bins, tile_size=tile_size), want)


def test_the_number_of_bins_matters() -> None:
    vectors, labels = unit(12, 3), torch.arange(12) // 3
    want = value_and_gradient(reference.binned_ap_loss, vectors, labels, 7)
    value, gradient = value_and_gradient(binned_ap_loss, vectors, labels, 8)
    assert abs(value - want[0]) > 1e-3
    assert (gradient - want[1]).abs().max() > 1e-3


def test_items_at_centres_of_their_own_have_exact_average_precision() -> None:
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    items = torch.linspace(-1, 1, 21, dtype=torch.float64)[order[:12], None]
    query, relevant = torch.ones(1, 1, dtype=torch.float64), torch.tensor([1] * 4 + [0] * 8)
    exact = query_scores(query, torch.tensor([1]), gallery=items, gallery_labels=relevant).average_precision
    found = BinnedAPLoss(21)(query, torch.tensor([1]), ref_emb=items, ref_labels=relevant)
    assert found.item() == pytest.approx(1 - exact.item())
    assert 0.1 < found < 0.9
    between = BinnedAPLoss(20)(query, torch.tensor([1]), ref_emb=items, ref_labels=relevant)
    assert abs(between - found) > 1e-3  # elsewhere it is an approximation


def test_an_example_by_hand() -> None:
    """Three bins at 1, 0, -1. A positive at 1, one at -0.5 (half in each of the last two), a negative at 0."""
    query, items = torch.tensor([[1.0]]), torch.tensor([[1.0], [-0.5], [0.0]])
    loss = BinnedAPLoss(bins=3)(query, torch.tensor([1]), ref_emb=items, ref_labels=torch.tensor([1, 1, 0]))
    # positives by bin: 1, 0.5, 0.5; all by bin: 1, 1.5, 0.5; precision: 1/1, 1.5/2.5, 2/3
    assert loss == pytest.approx(1 - (1 * 1 + 1.5 / 2.5 * 0.5 + 2 / 3 * 0.5) / 2)


@pytest.mark.parametrize("bins", [2, 20])
def test_gradcheck(bins: int) -> None:
    labels = torch.arange(9) // 3
    assert torch.autograd.gradcheck(lambda vectors: binned_ap_loss(vectors, labels, bins), unit(9, 4).requires_grad_())


def test_rounding_beyond_the_ends_stays_in_the_outer_bins() -> None:
    vectors = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]) * (1 + 1e-6)
    assert binned_ap_loss(vectors, torch.tensor([0, 0, 1, 1])) == 0
    assert binned_ap_loss(vectors, torch.tensor([0, 1, 0, 1])) == pytest.approx(1 - 1 / 3)  # 2 ahead, 1 of 3 seen


def test_the_ends_belong_to_the_bins() -> None:
    """A similarity of exactly 1 or -1 has the slope of those between them, and those outside have none."""

    def slopes(end: float) -> Tensor:
        items = torch.tensor([[end], [0.3], [-end], [0.1]], dtype=torch.float64, requires_grad=True)
        query, relevant = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
        BinnedAPLoss(7)(query, torch.tensor([1]), ref_emb=items, ref_labels=relevant).backward()
        assert items.grad is not None
        return items.grad[:, 0]

    torch.testing.assert_close(slopes(1.0), slopes(1 - 1e-9))
    assert slopes(1.0)[2] > 1e-3
    assert slopes(1 + 1e-9)[[0, 2]].tolist() == [0, 0]


def test_no_positive_pair() -> None:
    value, gradient = value_and_gradient(binned_ap_loss, unit(4, 3), torch.arange(4))
    assert value == 0
    assert not gradient.any()
    assert binned_ap_loss(torch.empty(0, 3), torch.empty(0, dtype=torch.long)) == 0


def test_a_database_of_its_own() -> None:
    loss, vectors, labels = BinnedAPLoss(7), unit(12, 3), torch.arange(12) // 3
    database = unit(9, 3, seed=1).requires_grad_()
    value = loss(vectors, labels, ref_emb=database, ref_labels=torch.arange(9) % 4)
    value.backward()
    assert database.grad is not None
    assert database.grad.abs().max() > 1e-3


def test_half_precision_in_float32() -> None:
    vectors, labels = unit(40, 8, dtype=torch.float32).bfloat16(), torch.arange(40) // 4
    value, gradient = value_and_gradient(binned_ap_loss, vectors, labels)
    assert value == binned_ap_loss(vectors.float(), labels)
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("bins", [1, 0, 2.5, True, "many"])
def test_invalid_bins(bins: object) -> None:
    with pytest.raises(ValueError, match="bins must be an integer of at least 2"):
        BinnedAPLoss(bins)  # type: ignore[arg-type]


def test_what_every_loss_refuses() -> None:
    with pytest.raises(ValueError, match="nan or inf in 1 of 4 rows, first in row 2"):
        binned_ap_loss(torch.tensor([[1.0], [1.0], [torch.nan], [0.0]]), torch.arange(4))
    with pytest.raises(ValueError, match="tile_size must be at least 1"):
        BinnedAPLoss(tile_size=0)

    def squared(vectors: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(binned_ap_loss(vectors, torch.tensor([0, 0, 1])), vectors, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(RuntimeError, match="differentiated only once"):
        squared(unit(3, 2).requires_grad_()).backward()


def test_repr() -> None:
    assert "bins=7" in repr(BinnedAPLoss(7))
