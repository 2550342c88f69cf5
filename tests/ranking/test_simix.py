"""Virtual examples: which pairs are mixed, and that mixing similarities equals mixing embeddings."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shortlist.ranking import (
    Engine,
    SiMix,
    SmoothAPLoss,
    VirtualBatch,
    VirtualBatchWithNegatives,
    recall_at_k_loss,
    smooth_ap_loss,
)
from tests import reference
from tests.ranking.losses import assert_same, clusters, unit, value_and_gradient

labels_of_any_sizes = st.lists(st.integers(-2, 2), min_size=1, max_size=8).map(torch.tensor)
few_labels = st.lists(st.integers(-1, 1), min_size=1, max_size=5).map(torch.tensor)  # for the literal formula


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


@settings(max_examples=30)
@given(labels=labels_of_any_sizes, alphas=st.integers(1, 3))
def test_several_alphas_per_pair(labels: torch.Tensor, alphas: int) -> None:
    pairs, weights = SiMix(alphas=alphas)(labels)
    found = Counter(tuple(sorted(pair)) for pair in pairs.tolist())
    assert found == dict.fromkeys(reference.all_pairs_of_positives(labels), alphas)
    assert len(set(weights.tolist())) == len(pairs)


def test_the_default_draws_the_alphas_of_earlier_versions() -> None:
    labels = torch.arange(12) // 4
    expected = torch.rand(18, generator=torch.Generator().manual_seed(0))
    assert torch.equal(SiMix(torch.Generator().manual_seed(0))(labels).alphas, expected)


@settings(max_examples=40)
@given(labels=labels_of_any_sizes, negatives=st.integers(1, 3))
def test_virtual_negatives_mix_every_item_with_items_of_other_classes(labels: torch.Tensor, negatives: int) -> None:
    virtual = SiMix(negatives=negatives)(labels)
    left, right = virtual.pairs.unbind(1)
    mixed = labels[left] != labels[right]
    assert int((~mixed).sum()) == len(reference.all_pairs_of_positives(labels))
    expected = dict.fromkeys(range(len(labels)), negatives) if len(set(labels.tolist())) > 1 else {}
    assert Counter(left[mixed].tolist()) == expected


def test_partners_of_virtual_negatives_are_uniform() -> None:
    labels = torch.tensor([0, 1, 0, 2, 2])
    left, right = SiMix(torch.Generator().manual_seed(0), negatives=3000)(labels).pairs.unbind(1)
    for item in range(5):
        others = (labels != labels[item]).nonzero().flatten().tolist()
        found = Counter(right[(left == item) & (labels[left] != labels[right])].tolist())
        assert sorted(found) == others
        assert max(found.values()) - min(found.values()) < 300


@settings(max_examples=15, deadline=None)
@given(labels=few_labels, seed=st.integers(0, 10**6), tile_size=st.integers(1, 20), prune=st.booleans())
@example(labels=torch.tensor([0, 0, 0, 1, 1, 2, 2]), seed=0, tile_size=7, prune=True)
@example(labels=torch.tensor([0, 0, 0, 1, 1, 2, 2]), seed=0, tile_size=40, prune=False)
def test_virtual_negatives_are_the_literal_formula(
    labels: torch.Tensor, seed: int, tile_size: int, prune: bool
) -> None:
    """An example with two labels counts for the queries of the other labels, and is not a query."""
    embeddings = unit(len(labels), 4, seed=seed)
    virtual = SiMix(torch.Generator().manual_seed(seed), alphas=2, negatives=1)(labels)
    virtual = virtual._replace(alphas=virtual.alphas.double())
    sets = reference.labels_with_virtual(labels, virtual.pairs)

    def literal(x: torch.Tensor) -> torch.Tensor:
        return reference.recall_at_k_loss(reference.with_virtual(x, labels, *virtual)[0], sets, k=(1, 4))

    want = value_and_gradient(literal, embeddings)
    engine = Engine(tile_size=tile_size, prune=prune)
    assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, (1, 4), virtual=virtual, engine=engine), want)


def test_gradcheck_of_virtual_negatives() -> None:
    embeddings, labels = unit(6, 4, seed=5).requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 2])
    virtual = SiMix(alphas=2, negatives=2)(labels)
    assert torch.autograd.gradcheck(
        lambda x: recall_at_k_loss(x, labels, (1, 4), similarity_temperature=0.3, virtual=virtual), embeddings
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.35, 0.9, 4.0])
def test_virtual_negatives_pruned_equal_unpruned(spread: float, dtype: torch.dtype) -> None:
    embeddings, labels = clusters(50, 4, spread, dtype=dtype), torch.arange(200) // 4
    virtual = SiMix(torch.Generator().manual_seed(0), negatives=1)(labels)
    runs = [
        value_and_gradient(recall_at_k_loss, embeddings, labels, virtual=virtual, engine=Engine(prune=prune))
        for prune in (True, False)
    ]
    assert_same(runs[0], runs[1], 1e-5 if dtype == torch.float32 else 1e-13)


def test_virtual_negatives_make_a_batch_harder() -> None:
    """Two classes and a mixture of other classes that is nearer to the query than its positive."""
    embeddings, labels = unit(8, 4), torch.arange(8) // 2
    mixture = VirtualBatchWithNegatives(torch.tensor([[2, 4]]), torch.tensor([0.5], dtype=torch.float64))
    values = [recall_at_k_loss(embeddings, labels, (1,), virtual=virtual) for virtual in (None, mixture)]
    assert values[1] > values[0]
    with pytest.raises(ValueError, match="Virtual pair 0 mixes two labels: use VirtualBatchWithNegatives"):
        recall_at_k_loss(embeddings, labels, virtual=VirtualBatch(*mixture))


def test_bad_numbers_of_virtual_examples() -> None:
    with pytest.raises(ValueError, match="alphas must be at least 1, got 0"):
        SiMix(alphas=0)
    with pytest.raises(ValueError, match="negatives must be at least 0, got -1"):
        SiMix(negatives=-1)
    assert repr(SiMix(alphas=2, negatives=1)) == "SiMix(alphas=2, negatives=1)"
