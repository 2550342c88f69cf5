"""Virtual examples: which pairs are mixed, and that mixing similarities equals mixing embeddings."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shortlist.ranking import Engine, SiMix, SmoothAPLoss, VirtualBatch, recall_at_k_loss, smooth_ap_loss
from tests import reference
from tests.ranking.losses import assert_same, unit, value_and_gradient

labels_of_any_sizes = st.lists(st.integers(-2, 2), min_size=1, max_size=8).map(torch.tensor)


@settings(max_examples=40)
@given(labels=labels_of_any_sizes)
def test_every_pair_of_positives_once(labels: torch.Tensor) -> None:
    pairs, alphas = SiMix()(labels)
    found = [tuple(sorted(pair)) for pair in pairs.tolist()]
    assert len(found) == len(set(found)) == len(alphas)
    assert set(found) == reference.all_pairs_of_positives(labels)


def test_alphas_are_uniform_and_come_from_the_generator() -> None:
    labels = torch.zeros(150, dtype=torch.long)
    one, same = (SiMix(torch.Generator().manual_seed(7))(labels).alphas for _ in range(2))
    other = SiMix(torch.Generator().manual_seed(8))(labels).alphas
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    quarters = torch.histc(one, 4, 0, 1) / len(one)  # 11,175 alphas: a quarter each, within five deviations
    assert (quarters - 0.25).abs().max() < 5 * (0.25 * 0.75 / len(one)) ** 0.5


@settings(max_examples=20, deadline=None)
@given(labels=labels_of_any_sizes, seed=st.integers(0, 10**6), tile_size=st.integers(1, 40), prune=st.booleans())
def test_mixing_similarities_is_building_virtual_examples(
    labels: torch.Tensor, seed: int, tile_size: int, prune: bool
) -> None:
    embeddings = unit(len(labels), 4, seed=seed)
    virtual = SiMix(torch.Generator().manual_seed(seed))(labels)
    virtual = VirtualBatch(virtual.pairs, virtual.alphas.double())
    engine = Engine(tile_size=tile_size, prune=prune)

    def built(loss):  # type: ignore[no-untyped-def]
        return lambda x: loss(*reference.with_virtual(x, labels, *virtual))

    want = value_and_gradient(built(lambda x, y: recall_at_k_loss(x, y, (1, 4, 8))), embeddings)
    got = value_and_gradient(recall_at_k_loss, embeddings, labels, (1, 4, 8), virtual=virtual, engine=engine)
    assert_same(got, want)
    for count_query in (False, True):
        options = {"similarity_temperature": 0.05, "count_query": count_query}
        want = value_and_gradient(built(partial(smooth_ap_loss, **options)), embeddings)
        got = value_and_gradient(smooth_ap_loss, embeddings, labels, virtual=virtual, engine=engine, **options)
        assert_same(got, want)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_virtual_examples_are_the_literal_formula(dimensions: int) -> None:
    labels = torch.tensor([4, 4, 4, 9, 9, 1])
    embeddings, virtual = unit(6, 3)[:, :dimensions], SiMix()(labels)
    virtual = VirtualBatch(virtual.pairs, virtual.alphas.double())
    want = value_and_gradient(
        lambda x: reference.recall_at_k_loss(*reference.with_virtual(x, labels, *virtual), k=(1, 2)), embeddings
    )
    assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, (1, 2), virtual=virtual), want)
    other = VirtualBatch(virtual.pairs, 1 - virtual.alphas)  # the control: alphas belong to their pairs
    assert (recall_at_k_loss(embeddings, labels, (1, 2), virtual=other) - want[0]).abs() > 1e-4


def test_a_virtual_batch_of_the_user() -> None:
    """Some of the pairs, in any order, one of them twice, and an item paired with itself."""
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    virtual = VirtualBatch(
        torch.tensor([[4, 0], [1, 3], [1, 3], [5, 5]]), torch.tensor([0.0, 0.3, 0.9, 0.5], dtype=torch.float64)
    )
    embeddings = unit(6, 3)
    want = value_and_gradient(
        lambda x: reference.recall_at_k_loss(*reference.with_virtual(x, labels, *virtual), k=(1, 2)), embeddings
    )
    assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, (1, 2), virtual=virtual), want)


def test_a_module_draws_new_examples_for_every_batch() -> None:
    loss = SmoothAPLoss(similarity_temperature=0.1, simix=SiMix(torch.Generator().manual_seed(0)))
    embeddings, labels = unit(12, 4), torch.arange(12) // 4
    assert loss(embeddings, labels) != loss(embeddings, labels)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_virtual_example_may_be_an_item(alpha: float) -> None:
    """An item is mixed with itself, and alpha is 0 or 1."""
    labels, embeddings = torch.tensor([0, 0, 1, 1]), unit(4, 3)
    virtual = VirtualBatch(torch.tensor([[3, 3]]), torch.tensor([alpha], dtype=torch.float64))
    built = reference.recall_at_k_loss(*reference.with_virtual(embeddings, labels, *virtual), k=(1,))
    torch.testing.assert_close(recall_at_k_loss(embeddings, labels, (1,), virtual=virtual), built)


def test_alphas_do_not_depend_on_the_default_dtype() -> None:
    labels = torch.arange(12) // 4
    expected = SiMix(torch.Generator().manual_seed(0))(labels).alphas
    torch.set_default_dtype(torch.float64)
    try:
        found = SiMix(torch.Generator().manual_seed(0))(labels).alphas
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_alphas_are_those_of_earlier_versions() -> None:
    labels = torch.arange(12) // 4
    expected = torch.rand(18, generator=torch.Generator().manual_seed(0))
    assert torch.equal(SiMix(torch.Generator().manual_seed(0))(labels).alphas, expected)
