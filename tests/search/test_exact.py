"""Exact search: the neighbours that FAISS's flat index finds, in any kind of array, in blocks of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.errors import ConfigError, DataError
from shortlist.search import among_themselves, exact, nearest, open_vectors


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


@pytest.fixture(params=["one block", "blocks", "single numbers"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "one block":
        monkeypatch.setattr(exact, "NUMBERS", 64 if request.param == "blocks" else 1)
        monkeypatch.setattr(exact, "QUERIES", 7)
        monkeypatch.setattr(among_themselves, "SIDE", 7)
        for module in (exact, among_themselves):
            monkeypatch.setattr(module, "SAMPLE", 10 if request.param == "blocks" else 2)


@pytest.mark.usefixtures("small_blocks")
class TestAnswers:
    @pytest.mark.parametrize("k", [1, 5, 40])
    def test_as_faiss(self, k: int) -> None:
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

    def test_fewer_than_k(self) -> None:
        scores, rows = nearest(unit(3, seed=1), unit(5), 100)
        assert scores.shape == rows.shape == (3, 5)
        assert rows.sort().values.tolist() == [list(range(5))] * 3
        assert nearest(unit(3), unit(0), 4)[1].shape == (3, 0)
        assert nearest(unit(0), unit(3), 4)[1].shape == (0, 3)

    def test_ties_in_the_order_of_rows(self) -> None:
        few_digits = (unit(6) * 64).round() / 64  # so that products are exact, in blocks of any size
        gallery = few_digits.repeat(5, 1)  # each five times
        for some in (gallery, gallery.clone()):
            _, rows = nearest(some, gallery, 30)
            for query, found in enumerate(rows.tolist()):
                assert found[:5] == list(range(query % 6, 30, 6))

    def test_among_those_that_compete(self) -> None:
        queries, gallery = unit(9, seed=1), unit(30)
        competes = np.arange(30) % 3 == 1
        scores, rows = nearest(queries, gallery, 4, competes=competes)
        expected, within = literal(queries, gallery[torch.from_numpy(competes)], 4)
        torch.testing.assert_close(scores, expected)
        assert torch.equal(rows, torch.from_numpy(np.flatnonzero(competes))[within])
        assert nearest(gallery, gallery, 100, competes=competes)[1].shape == (30, 10)

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

    def test_progress(self) -> None:
        for queries, gallery in ((unit(9), unit(12)), 2 * (unit(20),)):
            told: list[tuple[int, int]] = []
            nearest(queries, gallery, 3, progress=lambda done, of, told=told: told.append((done, of)))
            assert told[-1] == (len(queries) * len(gallery),) * 2
            assert told == sorted(told)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 35), st.integers(0, 99), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_any_sizes(queries: int, gallery: int, k: int, seed: int, numbers: int) -> None:
    """Vectors of few different numbers: many ties, duplicates and zeros."""
    random = torch.Generator().manual_seed(seed)
    asked, there = (torch.randint(-1, 2, (n, 3), generator=random).float() for n in (queries, gallery))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "NUMBERS", numbers)
        patch.setattr(exact, "QUERIES", numbers % 11 + 1)
        patch.setattr(exact, "AT_ONCE", numbers % 5 + 1)
        patch.setattr(exact, "SAMPLE", numbers % 7 + 1)
        patch.setattr(among_themselves, "SIDE", numbers % 9 + 1)
        patch.setattr(among_themselves, "SAMPLE", numbers % 7 + 1)
        patch.setattr(among_themselves, "ROOM", 1)
        for each in (asked, there):
            scores, rows = nearest(each, there, k)
            expected, _ = literal(each, there, k)
            assert torch.equal(scores, expected)
            assert torch.equal((each @ there.T).gather(1, rows), scores)  # the rows are those of the scores
            assert all(len(set(found)) == len(found) for found in rows.tolist())
            for one, other in zip(scores.tolist(), rows.tolist(), strict=True):
                found = [(-score, row) for score, row in zip(one, other, strict=True)]
                assert found == sorted(found)


@pytest.mark.parametrize("sampled", [True, False])
def test_where_a_sample_promises_too_much(monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    """What is near to a query is all in the sample, or none of it."""
    monkeypatch.setattr(exact, "SAMPLE", 32)
    monkeypatch.setattr(exact, "NUMBERS", 50)
    chosen = np.linspace(0, 299, 32).astype(int)
    near = chosen[:12] if sampled else np.setdiff1d(np.arange(300), chosen)[:150]
    gallery = unit(300)
    gallery[near] = gallery[0] + 0.01 * unit(len(near), seed=2)
    queries = torch.cat((gallery[:1], unit(4, seed=3)))
    scores, rows = nearest(queries, gallery, 20)
    torch.testing.assert_close(scores, literal(queries, gallery, 20)[0])
    torch.testing.assert_close((queries @ gallery.T).gather(1, rows), scores)


def test_where_the_sample_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster is all in the sample, which promises too much to it; another is not, and finds no room."""
    monkeypatch.setattr(among_themselves, "SAMPLE", 64)
    monkeypatch.setattr(among_themselves, "SIDE", 50)
    sampled = np.unique(np.linspace(0, 299, 64).astype(int))
    others = np.setdiff1d(np.arange(300), sampled)[:150]
    vectors = unit(300)
    vectors[sampled[:12]] = vectors[0] + 0.01 * unit(12, seed=2)
    vectors[others] = vectors[5] + 0.01 * unit(150, seed=3)
    found = among_themselves.candidates(vectors, 20)
    assert set(sampled[:12]) <= set(found.few)
    assert len(found.few) < 100
    assert (found.bars > among_themselves._bars(vectors, 20))[others].all()  # they were raised when there was no room
    scores, rows = nearest(vectors, vectors, 20)
    expected, _ = literal(vectors, vectors, 20)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close((vectors @ vectors.T).gather(1, rows), scores)


@pytest.mark.parametrize("k", [999, 1000])
def test_among_themselves_takes_the_memory_of_the_answer(k: int) -> None:
    vectors = unit(1200)
    values, rows = nearest(vectors, vectors, k)
    answer = values.nbytes + rows.nbytes
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in (values, rows)}
    assert sum(held.values()) < 1.05 * answer


class TestMistakes:
    def test_shapes(self) -> None:
        with pytest.raises(DataError, match=r"queries are \(2, 3\), but the gallery is \(2, 4\)"):
            nearest(unit(2, 3), unit(2, 4), 1)
        with pytest.raises(ConfigError, match="`k` is how many"):
            nearest(unit(2), unit(2), 0)

    def test_not_finite(self) -> None:
        bad = unit(5)
        bad[3, 2] = torch.nan
        with pytest.raises(DataError, match="row 3 of the gallery"):
            nearest(unit(2), bad, 1)
        with pytest.raises(DataError, match="row 3 of the queries"):
            nearest(bad, unit(2), 1)
        with pytest.raises(DataError, match="row 3 of the queries"):
            nearest(bad, bad, 1)
        with pytest.raises(DataError, match="row 3 of the gallery"):
            nearest(torch.zeros(1, 16), bad, 1)
