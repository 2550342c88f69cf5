"""Exact nearest neighbours, computed in blocks: only the result and a few blocks are held in memory.

A similarity threshold per query is estimated from a sample of the gallery, such that slightly more than k vectors are
expected to reach it. Only those are considered further. Queries that fewer than k vectors reach are searched again
without a threshold.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import ConfigError, DataError
from shortlist.progress import Progress
from shortlist.ranking.precision import full_precision
from shortlist.search.all_pairs import find_candidates
from shortlist.search.vectors import Vectors, blocks, take

QUERIES_PER_BLOCK, PRODUCTS_PER_BLOCK = 4_096, 2**23  # 32 MB of inner products
MAX_BLOCK_ROWS = 65_536  # vectors of the gallery per block, for any number of queries
SAMPLE_SIZE = 2_048  # vectors of the gallery from which the thresholds are estimated
QUERIES_PER_SORT = 1_024
LOWEST = torch.finfo(torch.float32).min


def nearest(
    queries: Vectors,
    gallery: Vectors,
    k: int,
    *,
    searchable: NDArray[np.bool_] | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the k vectors of a gallery with the largest inner product with each query, computed in float32.

    Among vectors that tie for the last of the k results, it is not defined which are returned. If `queries` and
    `gallery` are the same object, each inner product is computed once, and the two results share memory.

    Args:
        queries: (q, d). If it is a tensor, the search runs on its device.
        gallery: (n, d). It may be memory-mapped and in half precision.
        k: Number of results per query. If the gallery has fewer vectors, all are returned.
        searchable: Mask of the gallery rows that can be found, (n,). None: all.
        progress: Called with the number of inner products done and the total number.

    Returns:
        Similarities in descending order and the corresponding rows, (q, k) each. Equal similarities are sorted by row.

    Raises:
        ConfigError: `k` is less than 1.
        DataError: The dimensions differ, or a value is not finite.

    Example:
        >>> nearest(torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]]), k=1)[1]
        tensor([[0],
                [1]])
    """
    if queries.ndim != 2 or gallery.ndim != 2 or queries.shape[1] != gallery.shape[1]:
        raise DataError(f"the queries have shape {tuple(queries.shape)}, but the gallery {tuple(gallery.shape)}")
    if k < 1:
        raise ConfigError(f"`k`, the number of results, must be at least 1, not {k}")
    like = torch.empty(0, device=queries.device if isinstance(queries, Tensor) else "cpu")
    gallery_rows = np.arange(len(gallery)) if searchable is None else np.flatnonzero(searchable)
    k = min(k, len(gallery_rows))
    values = torch.empty(len(queries), k, device=like.device)
    rows = torch.empty(len(queries), k, dtype=torch.int64, device=like.device)
    with full_precision(like.device):
        if gallery is queries and searchable is None and like.device.type == "cpu" and k:
            return _nearest_among_themselves(queries, k, progress)
        search = _GallerySearch(gallery, k, gallery_rows, like) if len(gallery_rows) else None
        for start, block in blocks([queries], QUERIES_PER_BLOCK, like):
            _check_finite(block, start, "queries")
            stop = start + len(block)
            if search is not None:
                values[start:stop], rows[start:stop] = search.nearest(block)
            if progress is not None:
                progress(stop * len(gallery), len(queries) * len(gallery))
    return values, rows


def _nearest_among_themselves(vectors: Vectors, k: int, progress: Progress | None) -> tuple[Tensor, Tensor]:
    for first, block in blocks([vectors], QUERIES_PER_BLOCK, torch.empty(0)):
        _check_finite(block, first, "queries")
    candidates = find_candidates(vectors, k, progress)
    values, rows = candidates.best()
    if len(incomplete := candidates.incomplete):
        values[incomplete], rows[incomplete] = nearest(take([vectors], incomplete, values), vectors, k)
    return _sort_in_place(values, rows)


class _GallerySearch:
    """Searches one gallery with one block of queries at a time."""

    def __init__(self, gallery: Vectors, k: int, rows: NDArray[np.int64], like: Tensor) -> None:
        self.gallery, self.k, self.like = gallery, k, like
        self.excluded: Tensor | None = None  # (n,) mask
        if len(rows) < len(gallery):
            self.excluded = torch.ones(len(gallery), dtype=torch.bool, device=like.device)
            self.excluded[torch.from_numpy(rows).to(like.device)] = False
        spread = np.linspace(0, len(rows) - 1, SAMPLE_SIZE).astype(np.int64)
        self.sample = take([gallery], rows[spread] if len(rows) > SAMPLE_SIZE else rows[:0], like)
        expected = k * len(self.sample) / len(rows)  # of the k nearest, those in the sample
        self.rank = int(np.ceil(expected + 2 * expected**0.5 + 1))  # two standard deviations more
        self.buffer = torch.empty(0, device=like.device)

    def nearest(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        no_threshold = torch.full((len(queries),), LOWEST, device=queries.device)
        thresholds = no_threshold
        if self.rank <= len(self.sample):
            thresholds = (queries @ self.sample.T).topk(self.rank, sorted=False).values.amin(1)
        values, rows = self._best_above(queries, thresholds)
        incomplete = values.isinf().any(1)
        if incomplete.any():
            values[incomplete], rows[incomplete] = self._best_above(queries[incomplete], no_threshold[incomplete])
        return _sort_in_place(values, rows)

    def _best_above(self, queries: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best k results that reach the thresholds, unsorted; the similarity is -inf if there are fewer."""
        width = min(MAX_BLOCK_ROWS, max(1, PRODUCTS_PER_BLOCK // len(queries)))
        top_k = _TopK(thresholds, self.k, width)
        for first, block in blocks([self.gallery], width, self.like):
            if self.buffer.shape != (len(queries), len(block)):
                self.buffer = torch.empty(len(queries), len(block), device=queries.device)
            similarities = torch.mm(queries, block.T, out=self.buffer)  # allocating memory for each block is slower
            _check_finite(similarities[0, :, None], first, "gallery")  # the first query is enough to detect it
            if self.excluded is not None:
                similarities[:, self.excluded[first : first + len(block)]] = -torch.inf
            top_k.update(first, similarities)
        return top_k.compact()


class _TopK:
    """The best k results per query so far, with room for the candidates of one more block.

    Args:
        thresholds: Similarity per query that a candidate has to reach, (q,). It is raised as results are found.
        k: Number of results per query.
        width: Maximum number of gallery vectors per block.
    """

    def __init__(self, thresholds: Tensor, k: int, width: int) -> None:
        self.thresholds, self.k = thresholds, k
        self.values = torch.full((len(thresholds), k + width), -torch.inf, device=thresholds.device)
        self.rows = torch.zeros_like(self.values, dtype=torch.int64)
        self.counts = torch.zeros(len(thresholds), dtype=torch.int64, device=thresholds.device)

    def update(self, first: int, similarities: Tensor) -> None:
        """Add the candidates of a block of similarities (q, width), where column 0 is row `first` of the gallery."""
        (position,) = (similarities >= self.thresholds[:, None]).view(-1).nonzero(as_tuple=True)
        query = position.div(similarities.shape[1], rounding_mode="floor")
        new = torch.bincount(query, minlength=len(self.thresholds))
        if (self.counts + new).amax() > self.values.shape[1]:
            self.compact()
        free = torch.arange(len(self.thresholds), device=query.device) * self.values.shape[1] + self.counts
        slot = torch.arange(len(query), device=query.device) + (free - new.cumsum(0) + new)[query]
        self.values.view(-1)[slot] = similarities.view(-1)[position]
        self.rows.view(-1)[slot] = position - query * similarities.shape[1] + first
        self.counts += new

    def compact(self) -> tuple[Tensor, Tensor]:
        """Keep only the best k, raise the thresholds to the worst of them, and return similarities and rows (q, k)."""
        best = self.values.topk(self.k, sorted=False)
        self.rows[:, : self.k] = self.rows.gather(1, best.indices)
        self.values[:, : self.k], self.values[:, self.k :] = best.values, -torch.inf
        self.counts.fill_(self.k)
        self.thresholds = torch.maximum(self.thresholds, best.values.amin(1))
        return self.values[:, : self.k], self.rows[:, : self.k]


def _sort_in_place(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the results of each query by descending similarity and then by row."""
    for start in range(0, len(values), QUERIES_PER_SORT):
        block_values, block_rows = values[start : start + QUERIES_PER_SORT], rows[start : start + QUERIES_PER_SORT]
        bits = (block_values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
        ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
        order = ((ascending.long() << 32) | (0xFFFFFFFF - block_rows)).argsort(dim=1, descending=True)
        block_values.copy_(block_values.gather(1, order))
        block_rows.copy_(block_rows.gather(1, order))
    return values, rows


def _check_finite(vectors: Tensor, first: int, name: str) -> None:
    bad = ~vectors.isfinite().all(1)
    if bad.any():
        raise DataError(f"row {first + int(bad.nonzero()[0])} of the {name} holds values that are not finite")
