"""Search without an index, approximate indexes of the first vectors, and their files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortlist.search import faiss_index
from shortlist.search.vectors import StackedVectors

DIM, NUMBER = 8, 700


def unit(number: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(number, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


VECTORS = unit(NUMBER, 0)
STACKED = StackedVectors([VECTORS[:300], VECTORS[300:300], VECTORS[300:301], VECTORS[301:]], DIM)
SEARCHABLE = np.random.default_rng(1).random(NUMBER) < 0.8
SEARCHABLE[300] = False  # a whole part


def expected(queries: np.ndarray, k: int, searchable: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    scores = queries @ VECTORS.T
    if searchable is not None:
        scores[:, ~searchable] = -2
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, 1), rows


@pytest.mark.parametrize("queries", [1, 25, 50])
@pytest.mark.parametrize("searchable", [None, SEARCHABLE], ids=["all", "some"])
@pytest.mark.parametrize("vectors", [VECTORS, STACKED], ids=["array", "parts"])
@pytest.mark.parametrize("k", [1, 10, int(SEARCHABLE.sum())])
def test_exact(vectors: faiss_index.Rows, queries: int, searchable: np.ndarray | None, k: int) -> None:
    asked = unit(queries, 2)
    scores, rows = faiss_index.search(None, vectors, asked, k, searchable)
    right_scores, right_rows = expected(asked, k, searchable)
    assert np.array_equal(rows, right_rows)
    assert np.allclose(scores, right_scores, atol=1e-6)


def test_nothing_to_find() -> None:
    empty = StackedVectors([], DIM)
    scores, rows = faiss_index.search(None, empty, unit(2, 2), 5, np.ones(0, dtype=np.bool_))
    assert scores.shape == rows.shape == (2, 0)


@functools.cache
def index_of_the_first(kind: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faiss_index, "BYTES_PER_VECTOR", 2)  # the time to train IVF-PQ is proportional to this
        index = faiss_index.build(kind, STACKED[:500])
    faiss_index.set_effort(index, 1_000)  # practically exact
    return index


@pytest.mark.parametrize("kind", ["hnsw", "ivfpq"])
@pytest.mark.parametrize("searchable", [None, SEARCHABLE], ids=["all", "some"])
class TestIndexOfTheFirst:
    @pytest.fixture
    def index(self, kind: str) -> Any:
        return index_of_the_first(kind)

    @pytest.mark.parametrize("k", [1, 10, int(SEARCHABLE.sum())])
    def test_vectors_outside_the_index_are_found(
        self, index: Any, kind: str, searchable: np.ndarray | None, k: int
    ) -> None:
        asked = np.concatenate([unit(5, 2), VECTORS[598:602]])
        scores, rows = faiss_index.search(index, STACKED, asked, k, searchable)
        _, right_rows = expected(asked, k, searchable)
        assert np.mean([len(np.intersect1d(*each)) / k for each in zip(rows, right_rows, strict=True)]) > 0.97
        assert np.allclose(scores, np.take_along_axis(asked @ VECTORS.T, rows, 1), atol=1e-6)
        assert (np.diff(scores, axis=1) <= 0).all()
        assert (rows >= 500).any()

    def test_extended_and_written(self, index: Any, kind: str, searchable: np.ndarray | None, tmp_path: Path) -> None:
        longer = faiss_index.extend_copy(index, STACKED)
        assert (index.ntotal, longer.ntotal) == (500, NUMBER)
        faiss_index.write(longer, tmp_path / "index")
        again = faiss_index.read(tmp_path / "index", STACKED)
        for asked in (unit(3, 2), VECTORS[600:]):
            before = faiss_index.search_indexed(longer, STACKED, asked, 5, searchable)
            after = faiss_index.search_indexed(again, STACKED, asked, 5, searchable)
            assert np.array_equal(before, after)
        if kind == "hnsw":  # the links, and not the vectors again
            assert (tmp_path / "index").stat().st_size < NUMBER * 2.2 * 4 * faiss_index.HNSW_LINKS


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = faiss_index.build("hnsw", VECTORS)
    (tmp_path / ".index.1").symlink_to("/dev/full")
    monkeypatch.setattr("shortlist.files.temporary_path", lambda path: path.with_name(f".{path.name}.1"))
    with pytest.raises(OSError, match="No space left") as raised:
        faiss_index.write(index, tmp_path / "index")
    assert raised.value.filename == str(tmp_path / "index")
    assert not list(tmp_path.iterdir())
