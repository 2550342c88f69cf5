"""The k most similar items, compared with a full sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import top_k as module
from shortlist.ranking.ranker import Ranker, TensorSource
from shortlist.ranking.top_k import _keys, _positions, _similarities, top_k
from tests.ranking.test_ranker import whole_numbers


@pytest.fixture(autouse=True, scope="module")
def samples_of_small_galleries():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ITEMS_PER_SAMPLE", 1)
        yield


def sorted_in_full(ranker: Ranker, k: int) -> tuple[Tensor, Tensor]:
    """One stable sort of every ranking: among equal similarities, the lowest items come first."""
    rows = [
        tile.similarities.sort(dim=1, descending=True, stable=True) for tile in ranker.tiles(1, len(ranker.gallery))
    ]
    return torch.cat([row.values[:, :k] for row in rows]), torch.cat([row.indices[:, :k] for row in rows])


def assert_sorted_in_full(ranker: Ranker, k: int, **options: bool) -> None:
    similarities, items = top_k(ranker, k, **options)
    expected, expected_items = sorted_in_full(ranker, k)
    assert torch.equal(similarities, expected)
    assert torch.equal(items, expected_items)
    assert (similarities.dtype, items.dtype) == (torch.float32, torch.int64)


SIZES = ("BLOCK_SIZE", "PRODUCTS_PER_TILE", "MAX_SAMPLE", "QUERIES_PER_SORT")
sizes = st.fixed_dictionaries({"FEW_QUERIES": st.integers(0, 8), **{name: st.integers(1, 16) for name in SIZES}})


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 8), st.integers(2, 16), st.integers(1, 16), st.integers(0, 99), st.data())
def test_every_size_of_tiles_and_many_ties(chosen, number, size, k, seed, data):
    queries, gallery = whole_numbers(number, seed), whole_numbers(size, seed + 1)
    masks = st.lists(st.booleans(), min_size=size, max_size=size).filter(lambda mask: not all(mask))
    excluded = torch.tensor(data.draw(masks))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in chosen.items():
            patch.setattr(module, name, value)
        source = TensorSource(gallery)
        assert_sorted_in_full(Ranker(TensorSource(queries), source), min(k, size))
        assert_sorted_in_full(Ranker(source, source), min(k, size), symmetric=True)
        some = Ranker(TensorSource(queries), source, excluded=excluded)
        assert_sorted_in_full(some, min(k, int((~excluded).sum())))
        assert_sorted_in_full(Ranker.leave_one_out(gallery, torch.randperm(size)), min(k, size - 1))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("k", [1, 30, 300])
def test_collapsed_embeddings(monkeypatch, symmetric, k):
    """All similarities are equal, so that every item reaches every threshold, and the buffer is always full."""
    monkeypatch.setattr(module, "BLOCK_SIZE", 64)
    monkeypatch.setattr(module, "PRODUCTS_PER_TILE", 64 * 100)
    monkeypatch.setattr(module, "MAX_SAMPLE", 50)
    vectors = TensorSource(torch.ones(400, 2))
    similarities, items = top_k(Ranker(vectors, vectors), k, symmetric=symmetric)
    assert (similarities == 2).all()
    assert torch.equal(items, torch.arange(k).expand(400, k))


def test_equal_items_are_skipped_once_there_are_enough(monkeypatch):
    """The number of candidates does not grow with the number of equal items."""
    monkeypatch.setattr(module, "PRODUCTS_PER_TILE", 64 * 100)
    added, append = [], module._Candidates._append
    monkeypatch.setattr(
        module._Candidates, "_append", lambda self, *args: (added.append(len(args[1])), append(self, *args))
    )
    queries, vectors = TensorSource(torch.ones(64, 2)), TensorSource(torch.ones(2000, 2))
    top_k(Ranker(queries, vectors), 5)
    assert sum(added) < 64 * 2000 / 5


def test_the_query_is_excluded_and_its_copies_are_found():
    vectors = whole_numbers(8).repeat(3, 1)
    _, items = top_k(Ranker.leave_one_out(vectors, torch.arange(24)), 23)
    for query, found in enumerate(items.tolist()):
        assert sorted([*found, query]) == list(range(24))


@pytest.mark.parametrize("symmetric", [True, False])
def test_progress_counts_products(monkeypatch, symmetric):
    for name, value in {"BLOCK_SIZE": 4, "FEW_QUERIES": 0, "MAX_SAMPLE": 8}.items():
        monkeypatch.setattr(module, name, value)
    vectors, seen = TensorSource(whole_numbers(10)), []
    top_k(Ranker(vectors, vectors), 2, symmetric=symmetric, progress=lambda *each: seen.append(each))
    if symmetric:
        assert [done for done, _ in seen] == [16, 48, 64, 80, 96, 100]
    else:
        assert [done for done, _ in seen] == [40, 80, 100]
    assert {total for _, total in seen} == {100}


@pytest.mark.parametrize("symmetric", [True, False])
def test_nothing_to_find(symmetric):
    queries, nothing = TensorSource(whole_numbers(3)), TensorSource(whole_numbers(0))
    assert [each.shape for each in top_k(Ranker(queries, nothing), 0)] == [(3, 0)] * 2
    assert [each.shape for each in top_k(Ranker(nothing, nothing), 0, symmetric=symmetric)] == [(0, 0)] * 2
    assert [each.shape for each in top_k(Ranker(nothing, queries), 2)] == [(0, 2)] * 2


@pytest.mark.parametrize("size", [0, 1, 8, 23, 24, 800])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
def test_positions_of_true_values(size, share):
    mask = torch.rand(size) < share
    assert _positions(mask).tolist() == [position for position, value in enumerate(mask.tolist()) if value]


finite = st.floats(width=32, allow_nan=False)


@settings(max_examples=50)
@given(st.lists(st.tuples(finite, st.integers(0, 2**32 - 1)), min_size=1, max_size=20))
def test_keys_are_in_the_order_of_similarities_and_items(pairs):
    similarities, items = torch.tensor([one for one, _ in pairs]), torch.tensor([other for _, other in pairs])
    keys = _keys(similarities, items)
    assert torch.equal(_similarities(keys), similarities)
    in_order = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
    assert [pairs[index] for index in keys.argsort(descending=True).tolist()] == in_order
    assert (keys >= module._NO_KEY).all()
    assert _similarities(torch.tensor([module._NO_KEY])).item() == -torch.inf
