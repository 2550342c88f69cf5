"""The k most similar items of each query, collected exactly from the tiles of the streaming ranker.

A similarity threshold per query is estimated from a sample of the gallery, so that slightly more than k items are
expected to reach it. Only these items are candidates. Queries for which fewer than k items reach the threshold are
searched again without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shortlist.ranking.ranker import Ranker, Tile, products

BLOCK_SIZE = 4_096  # queries searched at once; rows and columns of a tile if the queries are the gallery (64 MB)
PRODUCTS_PER_TILE, MAX_COLUMNS = 2**23, 65_536  # other tiles: 32 MB, and maximum number of items
SAMPLE_SIZE = 2_048  # number of items from which the thresholds are estimated
CAPACITY_FACTOR = 1.5  # candidates per query, divided by k: 1.5 k keys of 8 bytes make room for k results of 12 bytes
QUERIES_PER_SORT = 1_024

Found = tuple[Tensor, Tensor]  # similarities and indices of items, (q, k) each
Progress = Callable[[int, int], None]
Estimate = Callable[[Tensor], Tensor]  # threshold of each query, (q,), from the queries, (q, d)


def top_k(ranker: Ranker, k: int, *, symmetric: bool = False, progress: Progress | None = None) -> Found:
    """Find the k most similar items of each query.

    Args:
        ranker: Queries and gallery, in float32.
        k: Number of results per query, at most the number of items in its ranking.
        symmetric: Whether the queries are the gallery, and no items are hidden or excluded. Each product is then
            computed once, and the two results share memory.
        progress: Function that is called with the number of products done and the total number.

    Returns:
        Similarities in descending order, and the indices of the items, (q, k) each. Among equal similarities, lower
        indices come first.
    """
    number, size, device = len(ranker.queries), len(ranker.gallery), ranker.gallery.device
    estimate = _estimate(ranker, k)
    if symmetric and size > BLOCK_SIZE:
        return _search(ranker, k, estimate, symmetric, progress)
    similarities = torch.empty(number, k, device=device)
    items = torch.empty(number, k, dtype=torch.int64, device=device)
    for start in range(0, number if k else 0, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, number)
        block = ranker.select(torch.arange(start, stop, device=device))
        similarities[start:stop], items[start:stop] = _search(block, k, estimate)
        if progress is not None:
            progress(stop * size, number * size)
    return similarities, items


def _search(
    ranker: Ranker, k: int, estimate: Estimate, symmetric: bool = False, progress: Progress | None = None
) -> Found:
    """Search with the candidates of all queries in memory."""
    number, done = len(ranker.queries), 0
    thresholds = [estimate(block) for _, block in ranker.queries.blocks(BLOCK_SIZE)]
    candidates = _Candidates(torch.cat(thresholds), k)
    products_per_tile = PRODUCTS_PER_TILE // (8 if estimate is _no_thresholds else 1)  # then all are candidates
    columns = BLOCK_SIZE if symmetric else min(MAX_COLUMNS, max(1, products_per_tile // number))
    for tile in ranker.tiles(BLOCK_SIZE, columns, symmetric):
        both_ways = symmetric and tile.queries != tile.items
        candidates.add(tile, both_ways)
        done += tile.similarities.numel() * (2 if both_ways else 1)
        if progress is not None:
            progress(done, number * len(ranker.gallery))
    similarities, items = candidates.best()
    incomplete = similarities[:, -1].isneginf().nonzero().view(-1)
    if len(incomplete) and estimate is not _no_thresholds:
        again = ranker.select(incomplete)
        found = top_k(again, k) if symmetric else _search(again, k, _no_thresholds)
        similarities[incomplete], items[incomplete] = found
    return similarities, items


def _estimate(ranker: Ranker, k: int) -> Estimate:
    """Choose the sample, and the rank in it whose similarity is the threshold: two standard deviations after k."""
    rows = torch.arange(len(ranker.gallery), device=ranker.gallery.device)
    if ranker.excluded is not None:
        rows = rows[~ranker.excluded]
    expected = k * SAMPLE_SIZE / max(len(rows), 1)  # expected number of the k results that are in the sample
    rank = math.ceil(expected + 2 * expected**0.5 + 1)
    if len(rows) <= SAMPLE_SIZE or rank > SAMPLE_SIZE:
        return _no_thresholds
    spread = torch.arange(SAMPLE_SIZE, device=rows.device) * len(rows) // SAMPLE_SIZE
    return partial(_similarity_at, rank, ranker.gallery.take(rows[spread]))


def _similarity_at(rank: int, sample: Tensor, queries: Tensor) -> Tensor:
    return products(queries, sample).topk(rank, sorted=False).values.amin(1)


def _no_thresholds(queries: Tensor) -> Tensor:
    return torch.full_like(queries[:, 0], torch.finfo(queries.dtype).min)


class _Candidates:
    """Items that reach the threshold of each query. When the memory of a query is full, its best k are kept.

    An item and its similarity are stored as one integer of 8 bytes, their key. 1.5 k keys take the memory of k results
    of 4 + 8 bytes: `best` stores the results in place of the keys.

    Args:
        thresholds: Similarity per query that an item has to reach, (q,). It is raised when the memory is full.
        k: Number of results per query.
    """

    def __init__(self, thresholds: Tensor, k: int) -> None:
        self.thresholds, self.k, self.capacity = thresholds, k, int(CAPACITY_FACTOR * k) + 64
        self.keys = torch.full((len(thresholds), self.capacity), _NO_KEY, device=thresholds.device)
        self.counts = torch.zeros(len(thresholds), dtype=torch.int64, device=thresholds.device)

    def add(self, tile: Tile, both_ways: bool) -> None:
        """Add the candidates of a tile: items for the queries and, if it counts both ways, queries for the items."""
        for_queries = self.thresholds[tile.queries]
        reached = tile.similarities >= for_queries[:, None]
        if both_ways:
            for_items = self.thresholds[tile.items]
            reached |= tile.similarities >= for_items
        (position,) = reached.view(-1).nonzero(as_tuple=True)
        similarities = tile.similarities.view(-1).index_select(0, position)
        query = position.div(reached.shape[1], rounding_mode="floor")
        item = position - query * reached.shape[1]
        if both_ways:
            chosen = (similarities >= for_items[item]).nonzero().view(-1)
            chosen = chosen[item[chosen].to(torch.int32).argsort()]
            keys = _keys(similarities[chosen], query[chosen] + tile.queries.start)
            self._append(tile.items.start, item[chosen], keys)
            chosen = similarities >= for_queries[query]
            similarities, query, item = similarities[chosen], query[chosen], item[chosen]
        self._append(tile.queries.start, query, _keys(similarities, item + tile.items.start))

    def _append(self, first: int, query: Tensor, keys: Tensor) -> None:
        """Append candidates that are sorted by query, where query 0 is the one with index `first`."""
        new = torch.bincount(query)
        slot = torch.arange(len(query), device=query.device) - (new.cumsum(0) - new)[query]
        counts = self.counts[first : first + len(new)]
        full = counts + new > self.capacity
        if full.any():
            is_full = full[query]
            row = (full.cumsum(0) - 1)[query[is_full]]
            self._keep_best(first + full.nonzero().view(-1), row, slot[is_full], keys[is_full])
            query, slot, keys = query[~is_full], slot[~is_full], keys[~is_full]
            new.masked_fill_(full, 0)
        self.keys.view(-1)[(query + first) * self.capacity + counts[query] + slot] = keys
        counts += new

    def _keep_best(self, queries: Tensor, row: Tensor, slot: Tensor, new: Tensor) -> None:
        """Keep the best k of some queries' candidates and of new ones in (row, slot), and raise their thresholds."""
        keys = self.keys.new_full((len(queries), self.capacity + int(slot.max()) + 1), _NO_KEY)
        keys[:, : self.capacity] = self.keys[queries]
        keys[row, self.capacity + slot] = new
        best = keys.topk(self.k, sorted=False).values
        self.keys[queries] = _NO_KEY
        self.keys[queries, : self.k], self.counts[queries] = best, self.k
        self.thresholds[queries] = _similarities(best.amin(1))

    def best(self) -> Found:
        """Return the best k of each query, sorted; -inf where there are fewer. Overwrites the candidates."""
        first = (self.k + 1) // 2  # after the similarities, which take 4 bytes each
        similarities, items = self.keys.view(torch.float32)[:, : self.k], self.keys[:, first : first + self.k]
        for start in range(0, len(items), QUERIES_PER_SORT):
            block = slice(start, start + QUERIES_PER_SORT)
            keys = self.keys[block].topk(self.k).values
            similarities[block], items[block] = _similarities(keys), _LAST_ITEM - (keys & _LAST_ITEM)
        return similarities, items


_LAST_ITEM = 2**32 - 1
_NO_KEY = -0x7F800001 << 32  # similarity -inf


def _keys(similarities: Tensor, items: Tensor) -> Tensor:
    """Return integers that ascend with the similarity and, for equal similarities, descend with the item."""
    bits = (similarities + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    return (_flip_negative(bits).long() << 32) | (_LAST_ITEM - items)


def _similarities(keys: Tensor) -> Tensor:
    return _flip_negative((keys >> 32).to(torch.int32)).view(torch.float32)


def _flip_negative(bits: Tensor) -> Tensor:
    """Convert the bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
