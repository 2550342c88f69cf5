"""Exact search gives the same results as FAISS's flat index, for any kind of array and any block size."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.errors import ConfigError, DataError
from shortlist.ranking import top_k
from shortlist.ranking.ranker import Ranker
from shortlist.search import nearest, open_vectors, vectors
from shortlist.search.vectors import StackedVectors


@pytest.fixture(autouse=True, scope="module")
def samples_of_small_galleries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "ITEMS_PER_SAMPLE", 1)
        yield


def unit(number: int, dim: int = 16, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(number, dim, generator=torch.Generator().manual_seed(seed)))


def flat(queries: Tensor, gallery: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    import faiss

    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery.numpy())
    return index.search(queries.numpy(), k)


def literal(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = (queries @ gallery.T).sort(dim=1, descending=True, stable=True)
    return found.values[:, :k], found.indices[:, :k]


@pytest.fixture(params=["one block", "blocks", "single products"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "one block":
        monkeypatch.setattr(top_k, "PRODUCTS_PER_TILE", 64 if request.param == "blocks" else 1)
        monkeypatch.setattr(top_k, "BLOCK_SIZE", 7)
        monkeypatch.setattr(top_k, "MAX_SAMPLE", 10 if request.param == "blocks" else 2)
        monkeypatch.setattr(top_k, "FEW_QUERIES", 0)


@pytest.mark.usefixtures("small_blocks")
class TestResults:
    @pytest.mark.parametrize("k", [1, 5, 40])
    def test_equals_faiss(self, k: int) -> None:
        queries, gallery = unit(23, seed=1), unit(40)
        scores, rows = nearest(queries, gallery, k)
        expected = flat(queries, gallery, k)
        np.testing.assert_allclose(scores, expected[0], atol=1e-6)
        np.testing.assert_array_equal(rows, expected[1])

    @pytest.mark.parametrize("k", [1, 5, 40])
    def test_a_gallery_against_itself(self, k: int) -> None:
        gallery = unit(40)
        scores, rows = nearest(gallery, gallery, k)
        expected = flat(gallery, gallery, k)
        np.testing.assert_allclose(scores, expected[0], atol=1e-6)
        np.testing.assert_array_equal(rows, expected[1])

    def test_fewer_vectors_than_k(self) -> None:
        scores, rows = nearest(unit(3, seed=1), unit(5), 100)
        assert scores.shape == rows.shape == (3, 5)
        assert rows.sort().values.tolist() == [list(range(5))] * 3
        assert nearest(unit(3), unit(0), 4)[1].shape == (3, 0)
        assert nearest(unit(0), unit(3), 4)[1].shape == (0, 3)

    def test_ties_are_sorted_by_row(self) -> None:
        few_digits = (unit(6) * 64).round() / 64  # products are exact for any size of blocks
        gallery = few_digits.repeat(5, 1)  # each vector five times
        for queries in (gallery, gallery.clone()):
            _, rows = nearest(queries, gallery, 30)
            for query, found in enumerate(rows.tolist()):
                assert found[:5] == list(range(query % 6, 30, 6))

    def test_only_searchable_rows_are_found(self) -> None:
        queries, gallery = unit(9, seed=1), unit(30)
        searchable = np.arange(30) % 3 == 1
        scores, rows = nearest(queries, gallery, 4, searchable=searchable)
        expected, within = literal(queries, gallery[torch.from_numpy(searchable)], 4)
        torch.testing.assert_close(scores, expected)
        assert torch.equal(rows, torch.from_numpy(np.flatnonzero(searchable))[within])
        assert nearest(gallery, gallery, 100, searchable=searchable)[1].shape == (30, 10)

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_memory_maps(self, tmp_path: Path, dtype: type) -> None:
        gallery = unit(30).numpy().astype(dtype)
        np.save(tmp_path / "vectors.npy", gallery)
        mapped = open_vectors(tmp_path / "vectors.npy")
        expected, expected_rows = literal(*2 * [torch.from_numpy(gallery).float()], 5)
        for queries in (mapped, gallery):
            scores, rows = nearest(queries, mapped, 5)
            torch.testing.assert_close(scores, expected)
            assert torch.equal(rows, expected_rows)

    def test_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vectors, "SMALL_PART", 0)
        gallery, queries = unit(40), unit(9, seed=1)
        np.save(tmp_path / "vectors.npy", gallery[8:].numpy())
        mapped = open_vectors(tmp_path / "vectors.npy")
        parts = StackedVectors([gallery[:1].numpy(), gallery[1:8].numpy(), mapped[:20], mapped[20:]], 16)
        for k in (1, 10, 40):
            scores, rows = nearest(queries, parts, k)
            expected, expected_rows = literal(queries, gallery, k)
            torch.testing.assert_close(scores, expected)
            assert torch.equal(rows, expected_rows)

    def test_several_threads(self) -> None:
        queries, gallery = unit(40, seed=1), unit(1000)
        _, expected = literal(queries, gallery, 10)
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(lambda _: nearest(queries, gallery, 10)[1], range(20)):
                assert torch.equal(found, expected)
            for row, found in enumerate(pool.map(lambda row: nearest(queries[row, None], gallery, 10)[1], range(40))):
                assert torch.equal(found[0], expected[row])

    def test_progress(self) -> None:
        for queries, gallery in ((unit(9), unit(12)), 2 * (unit(20),)):
            calls: list[tuple[int, int]] = []
            nearest(queries, gallery, 3, progress=lambda done, of, calls=calls: calls.append((done, of)))
            assert calls[-1] == (len(queries) * len(gallery),) * 2
            assert calls == sorted(calls)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 15), st.integers(0, 99), st.integers(1, 150))
@settings(max_examples=30, deadline=None)
def test_any_sizes(queries: int, gallery: int, k: int, seed: int, numbers: int) -> None:
    """Vectors of few different values, with many ties, duplicates and zeros."""
    random = torch.Generator().manual_seed(seed)
    query_vectors, gallery_vectors = (
        torch.randint(-1, 2, (n, 3), generator=random).float() for n in (queries, gallery)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "PRODUCTS_PER_TILE", numbers)
        patch.setattr(top_k, "BLOCK_SIZE", numbers % 11 + 1)
        patch.setattr(top_k, "QUERIES_PER_SORT", numbers % 5 + 1)
        patch.setattr(top_k, "MAX_SAMPLE", numbers % 7 + 1)
        patch.setattr(top_k, "FEW_QUERIES", numbers % 13)
        for each in (query_vectors, gallery_vectors):
            scores, rows = nearest(each, gallery_vectors, k)
            expected, expected_rows = literal(each, gallery_vectors, k)
            assert torch.equal(scores, expected)
            assert torch.equal(rows, expected_rows)


@pytest.mark.parametrize("sampled", [True, False])
def test_thresholds_from_an_unrepresentative_sample(monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    """The vectors near a query are all in the sample, or none of them is."""
    monkeypatch.setattr(top_k, "MAX_SAMPLE", 32)
    monkeypatch.setattr(top_k, "PRODUCTS_PER_TILE", 50)
    monkeypatch.setattr(top_k, "FEW_QUERIES", 0)
    chosen = np.arange(32) * 300 // 32
    near = chosen[:12] if sampled else np.setdiff1d(np.arange(300), chosen)[:150]
    gallery = unit(300)
    gallery[near] = gallery[0] + 0.01 * unit(len(near), seed=2)
    queries = torch.cat((gallery[:1], unit(4, seed=3)))
    scores, rows = nearest(queries, gallery, 20)
    torch.testing.assert_close(scores, literal(queries, gallery, 20)[0])
    torch.testing.assert_close((queries @ gallery.T).gather(1, rows), scores)


def test_all_pairs_with_an_unrepresentative_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thresholds of a cluster in the sample are too high; a cluster outside of it exceeds the capacity."""
    monkeypatch.setattr(top_k, "MAX_SAMPLE", 64)
    monkeypatch.setattr(top_k, "BLOCK_SIZE", 50)
    sampled = np.arange(64) * 300 // 64
    others = np.setdiff1d(np.arange(300), sampled)[:150]
    vectors = unit(300)
    vectors[sampled[:12]] = vectors[0] + 0.01 * unit(12, seed=2)
    vectors[others] = vectors[5] + 0.01 * unit(150, seed=3)
    searched, kept = [], []
    select, keep = Ranker.select, top_k._Candidates._keep_best
    monkeypatch.setattr(Ranker, "select", lambda self, rows: searched.extend(rows.tolist()) or select(self, rows))
    monkeypatch.setattr(
        top_k._Candidates, "_keep_best", lambda self, rows, *each: kept.extend(rows.tolist()) or keep(self, rows, *each)
    )
    scores, rows = nearest(vectors, vectors, 20)
    assert set(sampled[:12]) <= set(searched)  # again
    assert len(searched) < 200
    assert set(others) <= set(kept)
    expected, _ = literal(vectors, vectors, 20)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close((vectors @ vectors.T).gather(1, rows), scores)


@pytest.mark.parametrize("k", [999, 1000])
def test_all_pairs_needs_only_the_memory_of_the_result(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(top_k, "BLOCK_SIZE", 500)
    monkeypatch.setattr(top_k, "MAX_SAMPLE", 500)
    vectors = unit(2000)
    values, rows = nearest(vectors, vectors, k)
    result = values.nbytes + rows.nbytes
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in (values, rows)}
    assert len(held) == 1
    assert sum(held.values()) < 1.05 * result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("queries", [2, 40])
def test_another_default_type(dtype: torch.dtype, queries: int) -> None:
    asked, gallery = unit(queries, seed=1), unit(1000)
    expected, expected_rows = literal(asked, gallery, 5)
    torch.set_default_dtype(dtype)
    try:
        scores, rows = nearest(asked.numpy(), gallery.numpy(), 5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected)
    assert torch.equal(rows, expected_rows)


class TestErrors:
    def test_shapes(self) -> None:
        with pytest.raises(DataError, match=r"queries have shape \(2, 3\), but the gallery \(2, 4\)"):
            nearest(unit(2, 3), unit(2, 4), 1)
        with pytest.raises(ConfigError, match="`k`, the number of results, must be an integer of at least 1, not 0"):
            nearest(unit(2), unit(2), 0)
        with pytest.raises(ConfigError, match=r"must be an integer of at least 1, not 1\.5"):
            nearest(unit(2), unit(2), 1.5)  # type: ignore[arg-type]

    @pytest.mark.parametrize("mask", [np.ones(6, bool), np.ones((1, 5), bool), np.ones(5, np.uint8)])
    def test_masks(self, mask: np.ndarray) -> None:
        with pytest.raises(DataError, match="`searchable` must hold 5 booleans"):
            nearest(unit(2), unit(5), 1, searchable=mask)

    def test_not_finite(self) -> None:
        bad = unit(5)
        bad[3, 2] = torch.nan
        with pytest.raises(DataError, match="Row 3 of the gallery"):
            nearest(unit(2), bad, 1)
        with pytest.raises(DataError, match="Row 3 of the queries"):
            nearest(bad, unit(2), 1)
        with pytest.raises(DataError, match="Row 3 of the queries"):
            nearest(bad, bad, 1)
        with pytest.raises(DataError, match="Row 3 of the gallery"):
            nearest(torch.zeros(1, 16), bad, 1)
