"""Properties of every loss that does not use the engine: order, mined pairs, memory, and learning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import BinnedAPLoss, BlackboxAPLoss, ListwiseLoss, binned_ap_loss, blackbox_ap_loss, listwise
from tests.ranking.losses import LargestTensor, assert_same, learned, unit, value_and_gradient

every_loss = pytest.mark.parametrize("kind", [BinnedAPLoss, BlackboxAPLoss])


@every_loss
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_order_of_the_batch_and_names_of_labels_do_not_matter(kind: type[ListwiseLoss], data: st.DataObject) -> None:
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=20)))
    order = torch.tensor(data.draw(st.permutations(range(len(labels)))))
    names = torch.tensor(data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=5, max_size=5, unique=True)))
    vectors = unit(len(labels), 6, seed=3)
    value, gradient = value_and_gradient(kind(), vectors, labels)
    assert 0 <= value <= 1
    assert_same(value_and_gradient(kind(), vectors[order], names[labels][order]), (value, gradient[order]))


@every_loss
def test_mined_pairs(kind: type[ListwiseLoss]) -> None:
    loss, vectors, labels = kind(), unit(12, 3), torch.arange(12) // 3
    same = (labels[:, None] == labels) & ~torch.eye(12, dtype=torch.bool)
    every = (*same.nonzero().T, *(labels[:, None] != labels).nonzero().T)
    assert_same(value_and_gradient(loss, vectors, labels, every), value_and_gradient(loss, vectors, labels))
    fewer = (*every[:2], every[2][:-30], every[3][:-30])
    assert abs(loss(vectors, labels, fewer) - loss(vectors, labels)) > 1e-3


@every_loss
def test_memory_stays_a_tile(kind: type[ListwiseLoss], monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has the size of all similarities of a batch."""
    monkeypatch.setattr(listwise, "_TILE", 64 * 512)
    vectors, labels = unit(512, 8, dtype=torch.float32).requires_grad_(), torch.arange(512) // 4
    with LargestTensor() as largest:
        value = kind()(vectors, labels)
    assert largest.elements <= 64 * 512 < vectors.shape[0] ** 2 / 4
    value.backward()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()
    assert vectors.grad.any()
    with LargestTensor() as smaller, torch.no_grad():
        kind(tile_size=4)(vectors[:400], labels[:400])
    assert smaller.elements <= 400 * 8  # the embeddings themselves


@pytest.mark.parametrize("loss", [binned_ap_loss, blackbox_ap_loss])
def test_the_functions_compute_tiles_as_well(loss: Callable[..., Tensor]) -> None:
    with LargestTensor() as largest:
        loss(unit(60, 2), torch.arange(60) // 2, tile_size=4)
    assert largest.elements <= 60 * 4
    with pytest.raises(ValueError, match="tile_size must be at least 1"):
        loss(unit(4, 2), torch.arange(4) // 2, tile_size=0)


@every_loss
def test_it_learns(kind: type[ListwiseLoss]) -> None:
    before, after = learned(kind())
    assert before < 0.4
    assert after > 0.8
