"""Approximate search with FAISS indexes.

An index may cover only the first vectors; the others are then searched exactly. This module also chooses the kind of
index by the number of vectors, builds it, and measures its recall.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from shortlist.errors import DataError, check_known
from shortlist.extras import extra
from shortlist.files import atomic_replace
from shortlist.progress import Progress
from shortlist.search.exact import nearest
from shortlist.search.vectors import StackedVectors

KINDS = ("flat", "hnsw", "ivfpq")  # flat is exact search, without an index
MAX_FLAT_VECTORS = 200_000  # with 512 dimensions, an exact search takes about 40 ms, less than embedding the image
HNSW_LINKS = 32  # per vector: 256 bytes, in addition to the 2,048 bytes of the vector itself
HNSW_CONSTRUCTION_CANDIDATES = 100  # efConstruction
BYTES_PER_VECTOR = 64  # size of IVF-PQ codes: 1/32 of 512 dimensions in float32
VECTORS_PER_CENTROID = 39  # training vectors per centroid of IVF-PQ, as FAISS recommends
MIN_IVFPQ_VECTORS = 256 * VECTORS_PER_CENTROID  # PQ codes have 256 centroids; fewer vectors are searched exactly
MAX_LISTS = 65_536  # maximum number of IVF lists
MIN_TRAINING_VECTORS = 65_536  # minimum number of training vectors of IVF-PQ, if there are enough
RERANK_FACTOR, MIN_RERANKED = 4, 100  # IVF-PQ candidates to rerank: a multiple of the results, and at least this many
MIN_EFFORT = 16  # number of lists (IVF-PQ) or candidates (HNSW) that a search visits
MAX_HNSW_CANDIDATES = 1_024
TARGET_RECALL, RECALL_AT, RECALL_QUERIES = 0.95, 10, 1_000
_VECTORS_PER_ADD = 16_384

Rows = NDArray[Any] | StackedVectors  # (n, d), may be memory-mapped
Found = tuple[NDArray[np.float32], NDArray[np.int64]]  # similarities and rows, (q, k) each


def choose_kind(requested: str, number: int, dim: int) -> str:
    """Return the kind of index to build.

    `auto` is exact search for up to 200,000 vectors, then HNSW, and IVF-PQ if HNSW would fill more than half of the
    memory. With too few vectors to train IVF-PQ, search is exact.

    Args:
        requested: One of `KINDS`, or auto.
        number: Number of vectors.
        dim: Dimension of the vectors.
    """
    if requested == "ivfpq" and number < MIN_IVFPQ_VECTORS:
        return "flat"
    if requested != "auto":
        return requested
    if number <= MAX_FLAT_VECTORS:
        return "flat"
    hnsw_bytes = number * (4 * dim + 8 * HNSW_LINKS)
    return "hnsw" if hnsw_bytes <= psutil.virtual_memory().total / 2 else "ivfpq"


def check_kind(kind: str) -> None:
    """Raise a ConfigError if the kind of index is unknown."""
    check_known("kind of index", kind, ("auto", *KINDS))


def check_installed(kind: str) -> None:
    """Raise a MissingExtraError if this kind of index requires FAISS, and it is not installed."""
    if kind in ("hnsw", "ivfpq"):
        _faiss()


def build(kind: str, vectors: Rows, progress: Progress | None = None) -> Any:
    """Build an approximate FAISS index, in which row i has the id i. It should be tuned next; see `tune`.

    Args:
        kind: hnsw or ivfpq.
        vectors: (n, d).
        progress: Called with the number of vectors added and the total number.
    """
    faiss = _faiss()
    number, dim = vectors.shape
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_CONSTRUCTION_CANDIDATES
    else:
        index = _ivfpq(number, dim)
        lists = faiss.extract_index_ivf(index).nlist
        sample_size = max(VECTORS_PER_CENTROID * lists, MIN_TRAINING_VECTORS)
        sample = np.random.default_rng(0).permutation(number)[:sample_size]
        if progress is not None:
            progress(0, number)
        index.train(_float32(vectors[np.sort(sample)]))
    _add(index, vectors, progress)
    return index


def _ivfpq(number: int, dim: int) -> Any:
    faiss = _faiss()
    lists = max(1, min(MAX_LISTS, number // VECTORS_PER_CENTROID, int(4 * number**0.5)))
    codes = next(size for size in range(min(BYTES_PER_VECTOR, dim), 0, -1) if dim % size == 0)
    # "np" omits the training for polysemous codes, which takes 3 s per byte and is not used here.
    return faiss.index_factory(dim, f"OPQ{codes},IVF{lists},PQ{codes}x8np", faiss.METRIC_INNER_PRODUCT)


def extend_copy(index: Any, vectors: Rows, progress: Progress | None = None) -> Any:
    """Return a copy of an index with more vectors. Other threads may search the original.

    Args:
        index: An index from `build` of the first vectors.
        vectors: All vectors, (n, d).
        progress: Called with the number of vectors in the index and the total number.
    """
    copy = _faiss().clone_index(index)
    _add(copy, vectors[index.ntotal :], progress)
    return copy


def _add(index: Any, vectors: Rows, progress: Progress | None = None) -> None:
    total = index.ntotal + len(vectors)
    for start in range(0, len(vectors), _VECTORS_PER_ADD):
        index.add(_float32(vectors[start : start + _VECTORS_PER_ADD]))
        if progress is not None:
            progress(index.ntotal, total)


def search(
    index: Any | None, vectors: Rows, queries: NDArray[np.float32], k: int, searchable: NDArray[np.bool_] | None
) -> Found:
    """Find the nearest neighbours of queries, by an index of the first vectors and exactly among the others.

    Args:
        index: An index from `build`. None: all vectors are searched exactly.
        vectors: All vectors, (n, d).
        queries: (q, d).
        k: Number of results per query, at most the number of vectors that can be found.
        searchable: Mask of the rows that can be found, (n,). None: all.

    Returns:
        Cosine similarities in descending order and rows, (q, k) each.
    """
    indexed = 0 if index is None else int(index.ntotal)
    if not indexed:
        return _search_exactly(vectors, queries, k, searchable)
    among = None if searchable is None else searchable[:indexed]
    findable = indexed if among is None else int(np.count_nonzero(among))
    by_index = search_indexed(index, vectors, queries, min(k, findable), among)
    if (by_index[1] < 0).any():  # for a large k, an approximate index may find fewer
        return _search_exactly(vectors, queries, k, searchable)
    if indexed == len(vectors):
        return by_index
    scores, rows = _search_exactly(vectors[indexed:], queries, k, None if searchable is None else searchable[indexed:])
    return merge_results([by_index, (scores, rows + indexed)], k)


def _search_exactly(vectors: Rows, queries: NDArray[np.float32], k: int, searchable: NDArray[np.bool_] | None) -> Found:
    scores, rows = nearest(queries, vectors, k, searchable=searchable)
    return scores.numpy(), rows.numpy()


def merge_results(found: Sequence[Found], k: int) -> Found:
    """Return the best k of several results, in descending order; equal scores keep their order."""
    scores, rows = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def search_indexed(
    index: Any, vectors: Rows, queries: NDArray[np.float32], k: int, searchable: NDArray[np.bool_] | None
) -> Found:
    """Search an index. The row is -1 where fewer than k were found; see `search`.

    The results of IVF-PQ are reranked by the vectors themselves, since its codes give approximate scores.
    """
    if not isinstance(index, _faiss().IndexPreTransform):
        return _search_index(index, queries, k, searchable)
    _, found = _search_index(index, queries, min(max(RERANK_FACTOR * k, MIN_RERANKED), index.ntotal), searchable)
    found = np.sort(found)  # ties are sorted by id, and a file is read in order
    candidates = np.maximum(found, 0)
    exact = np.stack([_float32(vectors[rows]) @ query for query, rows in zip(queries, candidates, strict=True)])
    return merge_results([(np.where(found < 0, np.float32(-np.inf), exact), found)], k)


def _search_index(index: Any, queries: NDArray[np.float32], k: int, searchable: NDArray[np.bool_] | None) -> Found:
    function = getattr(index, "search_numpy", index.search)  # the original, if faiss.contrib.torch_utils replaced it
    if searchable is None:
        return function(queries, k)  # type: ignore[no-any-return]
    bitmap = np.packbits(searchable, bitorder="little")  # the selector refers to it without owning it
    selector = _faiss().IDSelectorBitmap(bitmap)
    return function(queries, k, params=_parameters(index, selector))  # type: ignore[no-any-return]


def _parameters(index: Any, selector: Any) -> Any:
    faiss = _faiss()
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=effort(index))
    inner = faiss.SearchParametersIVF(sel=selector, nprobe=effort(index))
    return faiss.SearchParametersPreTransform(index_params=inner)


def tune(index: Any, vectors: Rows, searchable: NDArray[np.bool_] | None = None) -> dict[str, Any] | None:
    """Set the lowest search effort at which an approximate index finds 95 % of the exact 10 nearest neighbours.

    The recall is measured with vectors of the index as queries, and a query does not count as its own neighbour. The
    effort is doubled until the recall is reached, or until it is at its maximum.

    Args:
        index: An approximate index from `build`.
        vectors: The vectors of the index, (n, d).
        searchable: Mask of the rows that can be found, (n,). None: all.

    Returns:
        The measured recall, the number of neighbours ("at") and the number of queries; None for fewer than two vectors.
    """
    rows = np.arange(len(vectors)) if searchable is None else np.flatnonzero(searchable)
    if len(rows) < 2:
        return None
    chosen = np.sort(np.random.default_rng(0).permutation(rows)[:RECALL_QUERIES])
    queries, k = _float32(vectors[chosen]), min(RECALL_AT, len(rows) - 1)
    _, exact = nearest(queries, vectors, k + 1, searchable=searchable)
    expected = [set(each) - {own} for each, own in zip(exact.tolist(), chosen.tolist(), strict=True)]

    def found(effort: int) -> list[list[int]]:
        set_effort(index, effort)
        rows: list[list[int]] = search_indexed(index, vectors, queries, k + 1, searchable)[1].tolist()
        return rows

    _, recall = lowest_effort(found, expected, _max_effort(index))
    return {"recall": recall, "at": k, "queries": len(queries)}


def lowest_effort(
    search: Callable[[int], Sequence[Sequence[int]]], expected: Sequence[set[int]], maximum: int
) -> tuple[int, float]:
    """Double the effort of an approximate search until its recall is 95 %, or until it is at its maximum.

    Args:
        search: Function that returns the results of each query for an effort. It is called last with the returned one.
        expected: The exact nearest neighbours of each query.
        maximum: Maximum effort.

    Returns:
        The effort and its recall.
    """
    effort = min(MIN_EFFORT, maximum)
    while True:
        hits = sum(len(right & set(each)) for right, each in zip(expected, search(effort), strict=True))
        recall = hits / sum(map(len, expected))
        if recall >= TARGET_RECALL or effort == maximum:
            return effort, recall
        effort = min(2 * effort, maximum)


def _max_effort(index: Any) -> int:
    faiss = _faiss()
    return MAX_HNSW_CANDIDATES if isinstance(index, faiss.IndexHNSW) else int(faiss.extract_index_ivf(index).nlist)


def effort(index: Any) -> int:
    """Return the number of lists (IVF-PQ) or candidates (HNSW) that a search visits."""
    faiss = _faiss()
    return int(index.hnsw.efSearch if isinstance(index, faiss.IndexHNSW) else faiss.extract_index_ivf(index).nprobe)


def set_effort(index: Any, number: int) -> None:
    """Set the number of lists or candidates that a search visits; it is saved with the index."""
    faiss = _faiss()
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = number
    else:
        faiss.extract_index_ivf(index).nprobe = number


def write(index: Any, path: Path) -> None:
    """Write an index to a file, without the vectors that HNSW holds in memory.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    faiss = _faiss()
    with atomic_replace(path) as temporary:
        try:
            faiss.write_index(index, str(temporary), faiss.IO_FLAG_SKIP_STORAGE)
        except RuntimeError as error:
            reason = str(error).rpartition("failed: ")[2]  # after the source line of FAISS
            raise OSError(errno.EIO, f"The index cannot be written: {reason}") from error


def read(path: Path, vectors: Rows) -> Any:
    """Read an index from a file.

    Args:
        path: The file.
        vectors: The vectors of the index, (n, d).

    Raises:
        DataError: The file is not an index of this number of vectors of this dimension.
    """
    faiss = _faiss()
    try:
        index = faiss.read_index(str(path))
    except RuntimeError as error:
        raise DataError(f"{path.name} is not a FAISS index: {str(error).rpartition('failed: ')[2]}") from error
    if not isinstance(index, faiss.IndexHNSW | faiss.IndexPreTransform):
        raise DataError(f"{path.name} is an index of another kind: {type(index).__name__}")
    if (index.ntotal, index.d) != vectors.shape:
        raise DataError(
            f"{path.name} is an index of {index.ntotal:,} vectors of dimension {index.d}, not of {len(vectors):,} of "
            f"dimension {vectors.shape[1]}"
        )
    if isinstance(index, faiss.IndexHNSW):
        storage = faiss.IndexFlatIP(vectors.shape[1])
        _add(storage, vectors)
        storage.this.disown()
        index.storage, index.own_fields = storage, True
    return index


def _faiss() -> Any:
    with extra("search", "An approximate index"):
        import faiss  # slow to import; generated by SWIG, without types
    return faiss


def _float32(vectors: Rows) -> NDArray[np.float32]:
    return np.ascontiguousarray(vectors, dtype=np.float32)
