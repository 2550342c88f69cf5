"""FAISS: which index serves how many vectors, how to build it, and how much of the exact answer it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from shortlist.errors import ConfigError, did_you_mean
from shortlist.extras import extra
from shortlist.files import atomic_replace
from shortlist.search.exact import nearest
from shortlist.search.vectors import Progress

KINDS = ("flat", "hnsw", "ivfpq")
FLAT_UP_TO = 200_000  # vectors: of 512 dimensions, an exact answer takes some 40 ms, less than its image's embedding
LINKS = 32  # of a vector in HNSW: 256 bytes, beside the vector's own 2,048
BUILD_EFFORT = 100  # HNSW's candidates while it is built
BYTES_PER_VECTOR = 64  # of IVF-PQ's codes: a 32nd of 512 dimensions in float32
VECTORS_PER_CENTROID = 39  # vectors for each centre that IVF-PQ learns: FAISS's own advice
FEWEST = 256 * VECTORS_PER_CENTROID  # vectors for IVF-PQ, whose codes have 256 centres; for fewer, exact search is fast
MOST_LISTS = 65_536  # of IVF
RANKED_AGAIN, FEWEST_RANKED = 4, 100  # candidates of IVF-PQ: so many times the results, and no fewer
LEAST_EFFORT, MOST_CANDIDATES = 16, 1_024  # of a search: IVF's lists, of which all may be needed, or HNSW's candidates
ENOUGH, RECALL_AT, RECALL_QUERIES = 0.95, 10, 1_000
LEARNED = 65_536  # vectors that IVF-PQ learns its codes from, or more
_BLOCK = 16_384  # vectors added at a time


def choose_kind(asked: str, number: int, dim: int) -> str:
    """The kind that was asked for, where there are vectors enough; by `auto`, what serves so many.

    Exact while that is fast, then HNSW, and IVF-PQ where HNSW with all its vectors would fill half the memory.
    """
    if asked == "ivfpq" and number < FEWEST:
        return "flat"
    if asked != "auto":
        return asked
    if number <= FLAT_UP_TO:
        return "flat"
    hnsw = number * (4 * dim + 8 * LINKS)
    return "hnsw" if hnsw <= psutil.virtual_memory().total / 2 else "ivfpq"


def check_kind(kind: str) -> None:
    if kind not in ("auto", *KINDS):
        raise ConfigError(f"there is no index of the kind {kind!r}, {did_you_mean(kind, ('auto', *KINDS))}")


def build(kind: str, vectors: NDArray[Any], progress: Progress | None = None) -> Any:
    """A FAISS index of all vectors, (n, d) and maybe memory-mapped; row i has the number i. Then `tune` it."""
    faiss = _faiss()
    number, dim = vectors.shape
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_EFFORT
    elif kind == "ivfpq":
        index = _inverted_lists(number, dim)
        lists = _faiss().extract_index_ivf(index).nlist
        sample = np.random.default_rng(0).permutation(number)[: max(VECTORS_PER_CENTROID * lists, LEARNED)]
        if progress is not None:
            progress(0, number)
        index.train(_float32(vectors[np.sort(sample)]))
    else:
        index = faiss.IndexFlatIP(dim)
    extend(index, vectors, progress)
    return index


def _inverted_lists(number: int, dim: int) -> Any:
    faiss = _faiss()
    lists = max(1, min(MOST_LISTS, number // VECTORS_PER_CENTROID, int(4 * number**0.5)))
    codes = next(size for size in range(min(BYTES_PER_VECTOR, dim), 0, -1) if dim % size == 0)
    # np: without training for polysemous codes, which nobody searches here, and which takes 3 s for each byte.
    return faiss.index_factory(dim, f"OPQ{codes},IVF{lists},PQ{codes}x8np", faiss.METRIC_INNER_PRODUCT)


def extend(index: Any, vectors: NDArray[Any], progress: Progress | None = None) -> None:
    total = index.ntotal + len(vectors)
    for start in range(0, len(vectors), _BLOCK):
        index.add(_float32(vectors[start : start + _BLOCK]))
        if progress is not None:
            progress(index.ntotal, total)


def search(
    index: Any, vectors: NDArray[Any], queries: NDArray[np.float32], k: int, alive: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Cosine similarities and numbers of the k nearest, (q, k) each; the number is -1 where there are no more.

    What IVF-PQ finds is ranked again by the vectors themselves: of its codes, neither order nor scores are exact.

    Args:
        index: from `build`.
        vectors: (n, d), of which it was built.
        queries: (q, d).
        k: how many.
        alive: (n,) which rows count; None for all.
    """
    if not isinstance(index, _faiss().IndexPreTransform):
        return found_by(index, queries, k, alive)
    _, found = found_by(index, queries, min(max(RANKED_AGAIN * k, FEWEST_RANKED), len(vectors)), alive)
    found = np.sort(found)  # ties by number, and a file is read in its order
    exact = np.stack([_float32(vectors[rows]) @ query for query, rows in zip(queries, found, strict=True)])
    scores = np.where(found < 0, np.float32(-np.inf), exact)
    best = np.argsort(-scores, kind="stable")[:, :k]
    return np.take_along_axis(scores, best, 1), np.take_along_axis(found, best, 1)


def found_by(
    index: Any, queries: NDArray[np.float32], k: int, alive: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """What the index alone finds, as of `search`."""
    faiss = _faiss()
    ask = getattr(index, "search_numpy", index.search)  # where faiss.contrib.torch_utils has put its own in its place
    if alive is None:
        return ask(queries, k)  # type: ignore[no-any-return]
    chosen = np.packbits(alive, bitorder="little")
    selector = faiss.IDSelectorBitmap(chosen)
    return ask(queries, k, params=_parameters(index, selector))  # type: ignore[no-any-return]


def _parameters(index: Any, selector: Any) -> Any:
    faiss = _faiss()
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=effort(index))
    if isinstance(index, faiss.IndexPreTransform):
        inner = faiss.SearchParametersIVF(sel=selector, nprobe=effort(index))
        return faiss.SearchParametersPreTransform(index_params=inner)
    return faiss.SearchParameters(sel=selector)


def tune(index: Any, vectors: NDArray[Any], alive: NDArray[np.bool_] | None = None) -> dict[str, Any] | None:
    """Let searches make the least effort that finds 95 % of the exact 10 nearest of some of the index's own vectors.

    The effort doubles until that is so, or all there is. A vector itself, which any effort finds, does not count.

    Returns:
        What was measured; None of fewer than two vectors.
    """
    rows = np.arange(len(vectors)) if alive is None else np.flatnonzero(alive)
    if len(rows) < 2:
        return None
    chosen = np.sort(np.random.default_rng(0).permutation(rows)[:RECALL_QUERIES])
    queries, k = _float32(vectors[chosen]), min(RECALL_AT, len(rows) - 1)
    _, exact = nearest(queries, vectors, k + 1, competes=alive)
    wanted = [set(each) - {own} for each, own in zip(exact.tolist(), chosen.tolist(), strict=True)]
    effort, most = LEAST_EFFORT, _most_effort(index)
    while True:
        set_effort(index, min(effort, most))
        _, found = search(index, vectors, queries, k + 1, alive)
        hits = sum(len(right & set(each)) for right, each in zip(wanted, found.tolist(), strict=True))
        recall = hits / sum(map(len, wanted))
        if recall >= ENOUGH or effort >= most:
            return {"recall": recall, "at": k, "queries": len(queries)}
        effort *= 2


def _most_effort(index: Any) -> int:
    faiss = _faiss()
    return MOST_CANDIDATES if isinstance(index, faiss.IndexHNSW) else int(faiss.extract_index_ivf(index).nlist)


def effort(index: Any) -> int:
    """Of a search: how many lists, or candidates, it looks at."""
    faiss = _faiss()
    return int(index.hnsw.efSearch if isinstance(index, faiss.IndexHNSW) else faiss.extract_index_ivf(index).nprobe)


def set_effort(index: Any, number: int) -> None:
    """It is kept in the index's file."""
    faiss = _faiss()
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = number
    else:
        faiss.extract_index_ivf(index).nprobe = number


def write(index: Any, path: Path) -> None:
    faiss = _faiss()
    with atomic_replace(path) as temporary:
        faiss.write_index(index, str(temporary))


def read(path: Path) -> Any:
    faiss = _faiss()
    return faiss.read_index(str(path))


def _faiss() -> Any:
    with extra("search", "A gallery in a folder"):
        import faiss  # slow to import, and its types are those of what SWIG wrote
    return faiss


def _float32(vectors: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(vectors, dtype=np.float32)
