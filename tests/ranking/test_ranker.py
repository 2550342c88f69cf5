"""The streaming ranker: its tiles are the similarity matrix, without the items that are not ranked."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import ranker as module
from shortlist.ranking.ranker import Ranker, TensorSource, Tile, products


def whole_numbers(number: int, seed: int = 0, dimensions: int = 3) -> Tensor:
    """Vectors whose products are exact, with many ties and copies."""
    return torch.randint(-2, 3, (number, dimensions), generator=torch.Generator().manual_seed(seed)).float()


def assembled(tiles: list[Tile], shape: tuple[int, int]) -> Tensor:
    """The similarity matrix, nan where there was no tile. No two tiles overlap."""
    whole = torch.full(shape, torch.nan)
    for tile in tiles:
        assert whole[tile.queries, tile.items].isnan().all()
        whole[tile.queries, tile.items] = tile.similarities
    return whole


def copies(ranker: Ranker, *shape: int, **options: bool) -> list[Tile]:
    return [tile._replace(similarities=tile.similarities.clone()) for tile in ranker.tiles(*shape, **options)]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 10), st.integers(1, 10), st.integers(0, 99))
def test_tiles_of_every_shape_are_the_similarity_matrix(number, size, rows, columns, seed):
    queries, gallery = whole_numbers(number, seed), whole_numbers(size, seed + 1)
    chosen = torch.arange(number).flip(0)
    tiles = copies(Ranker(TensorSource(queries, chosen), TensorSource(gallery)), rows, columns)
    assert torch.equal(assembled(tiles, (number, size)), queries[chosen] @ gallery.T)
    assert len(tiles) == -(-number // rows) * -(-size // columns)
    for tile in tiles:
        assert tile.similarities.shape[0] <= rows
        assert tile.similarities.shape[1] <= columns
        assert torch.equal(tile.vectors, queries[chosen][tile.queries])


@pytest.mark.parametrize("number", [0, 1, 2, module.FEW_QUERIES, module.FEW_QUERIES + 1])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 700])
def test_products_of_few_and_many_queries(number, size):
    left, right = whole_numbers(number), whole_numbers(2 * size, seed=1)[::2]
    expected = torch.tensor(
        [
            [sum(x * y for x, y in zip(*pair, strict=True)) for pair in product([row], right.tolist())]
            for row in left.tolist()
        ]
    ).view(number, size)
    out = torch.empty(number, size)
    assert torch.equal(products(left, right), expected)
    assert products(left, right, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    assert torch.equal(products(left.double(), right.double()), expected.double())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, 13), st.integers(0, 99))
def test_symmetric_tiles_are_the_upper_half(number, size, seed):
    vectors = TensorSource(whole_numbers(number, seed))
    tiles = copies(Ranker(vectors, vectors), size, size, symmetric=True)
    whole = assembled(tiles, (number, number))
    block = torch.arange(number) // size
    assert torch.equal(whole.isnan(), block[:, None] > block)
    upper = torch.where(whole.isnan(), whole.T, whole)
    assert torch.equal(upper, upper.T)
    assert torch.equal(upper, copies_of_all(vectors))


def copies_of_all(vectors: TensorSource) -> Tensor:
    return assembled(copies(Ranker(vectors, vectors)), 2 * (len(vectors),))


class TestHidden:
    @pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 2), (5, 7), ()])
    def test_a_query_is_hidden_by_its_index_and_its_copies_are_not(self, shape):
        vectors = torch.tensor([[4.0, 3.0], [4.0, 3.0], [3.0, 4.0], [3.0, 4.0], [0.0, 1.0]])
        rows = torch.tensor([3, 0, 4])
        found = assembled(copies(Ranker.leave_one_out(vectors, rows), *shape), (3, 5))
        expected = vectors[rows] @ vectors.T
        expected[[0, 1, 2], rows] = -torch.inf
        assert torch.equal(found, expected)
        assert found[0].argmax() == 2  # the copy of row 3
        assert found[1].argmax() == 1  # the copy of row 0

    @pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 5), ()])
    def test_pairs_and_items(self, shape):
        queries, gallery = whole_numbers(4), whole_numbers(6, seed=1)
        hidden = torch.tensor([0, 0, 2, 2, 2, 3]), torch.tensor([5, 0, 1, 3, 4, -1])  # the last is not in the gallery
        excluded = torch.tensor([False, False, True, False, False, True])
        ranker = Ranker(TensorSource(queries), TensorSource(gallery), hidden, excluded)
        expected = queries @ gallery.T
        expected[hidden[0][:-1], hidden[1][:-1]] = -torch.inf
        expected[:, excluded] = -torch.inf
        assert torch.equal(assembled(copies(ranker, *shape), (4, 6)), expected)
        chosen = torch.tensor([1, 2])
        assert torch.equal(assembled(copies(ranker.select(chosen), *shape), (2, 6)), expected[chosen])

    def test_check_is_called_before_items_are_hidden(self):
        vectors, seen = torch.eye(3), []
        ranker = Ranker(
            TensorSource(vectors),
            TensorSource(vectors),
            hidden=(torch.arange(3), torch.arange(3)),
            check=lambda similarities, first: seen.append((first, similarities.clone())),
        )
        found = assembled(copies(ranker, 3, 2), (3, 3))
        assert [first for first, _ in seen] == [0, 2]
        assert torch.equal(torch.cat([each for _, each in seen], dim=1), torch.eye(3))
        assert (found.diagonal() == -torch.inf).all()


class TestMemory:
    def test_a_tile_holds_as_many_rankings_as_fit(self, monkeypatch):
        monkeypatch.setattr(module, "TILE", 35)
        ranker = Ranker.leave_one_out(whole_numbers(10), torch.arange(10))
        assert [tuple(tile.similarities.shape) for tile in ranker.rankings()] == [(3, 10)] * 3 + [(1, 10)]
        assert [tuple(tile.similarities.shape) for tile in ranker.rankings(6)] == [(6, 10), (4, 10)]
        monkeypatch.setattr(module, "TILE", 5)
        assert [tuple(tile.similarities.shape) for tile in ranker.rankings()] == [(1, 10)] * 10

    @pytest.mark.parametrize(("dimensions", "columns"), [(3, 5), (10, 2), (99, 1)])
    def test_neither_similarities_nor_items_exceed_a_tile(self, monkeypatch, dimensions, columns):
        monkeypatch.setattr(module, "TILE", 20)
        queries, gallery = (TensorSource(whole_numbers(n, dimensions=dimensions)) for n in (4, 11))
        shapes = [tuple(tile.similarities.shape) for tile in Ranker(queries, gallery).tiles()]
        assert shapes[0] == (4, columns)
        assert sum(width for _, width in shapes) == 11

    def test_tiles_share_their_memory(self):
        ranker = Ranker.leave_one_out(whole_numbers(10), torch.arange(10))
        assert len({tile.similarities.data_ptr() for tile in ranker.tiles(2, 5)}) == 1


class TestPrecision:
    def test_autocast_does_not_change_similarities(self):
        vectors = TensorSource(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)))
        expected = copies_of_all(vectors)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(copies_of_all(vectors), expected)

    def test_settings_of_the_process_are_restored_between_tiles(self):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            for _ in Ranker.leave_one_out(whole_numbers(4), torch.arange(4)).tiles(2, 2):
                assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)

    def test_dtype_is_that_of_the_vectors(self):
        vectors = whole_numbers(4).double()
        (tile,) = Ranker.leave_one_out(vectors, torch.arange(4)).rankings()
        assert tile.similarities.dtype == torch.float64

    def test_no_graph(self):
        vectors = whole_numbers(4).requires_grad_()
        (tile,) = Ranker.leave_one_out(vectors, torch.arange(4)).rankings()
        assert not tile.similarities.requires_grad
