"""The k most similar items of each query, collected exactly from the tiles of the streaming ranker.

For few queries, the most similar items of each tile are found directly. For many queries, a similarity threshold per
query is estimated from a sample of the gallery, so that slightly more than k items are expected to reach it. Only these
items are candidates. Queries for which fewer than k items reach the threshold are searched again, directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shortlist.ranking.ranker import FEW_QUERIES, Ranker, Tile, products

# Matrix products are fastest if a tile has an odd multiple of 16 columns: its rows are then aligned to 64 bytes, but do
# not compete for the same lines of the cache, as they do if the number of columns is a power of two.
BLOCK_SIZE = 4_080  # queries searched at once; rows and columns of a tile if the queries are the gallery (64 MB)
PRODUCTS_PER_TILE = 2**22  # of other tiles (16 MB)
MAX_SAMPLE, ITEMS_PER_SAMPLE = 2_048, 16  # the thresholds are estimated from every 16th item, and at most 2,048 items
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
    if symmetric and size > BLOCK_SIZE and estimate is not None:
        return _search(ranker, k, estimate, symmetric, progress)
    similarities = torch.empty(number, k, dtype=torch.float32, device=device)
    items = torch.empty(number, k, dtype=torch.int64, device=device)
    for start in range(0, number if k else 0, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, number)
        block = ranker.select(torch.arange(start, stop, device=device)) if number > BLOCK_SIZE else ranker
        similarities[start:stop], items[start:stop] = _search(block, k, estimate)
        if progress is not None:
            progress(stop * size, number * size)
    return similarities, items


def _search(
    ranker: Ranker, k: int, estimate: Estimate | None, symmetric: bool = False, progress: Progress | None = None
) -> Found:
    """Search with the candidates of all queries in memory."""
    if estimate is None:
        return _search_directly(ranker, k)
    number, done = len(ranker.queries), 0
    thresholds = [estimate(block) for _, block in ranker.queries.blocks(BLOCK_SIZE)]
    candidates = _Candidates(torch.cat(thresholds), k)
    columns = BLOCK_SIZE if symmetric else min(BLOCK_SIZE, _columns(number))
    for tile in ranker.tiles(BLOCK_SIZE, columns, symmetric):
        both_ways = symmetric and tile.queries != tile.items
        candidates.add(tile, both_ways)
        done += tile.similarities.numel() * (2 if both_ways else 1)
        if progress is not None:
            progress(done, number * len(ranker.gallery))
    similarities, items = candidates.best()
    incomplete = similarities[:, -1].isneginf().nonzero().view(-1)
    if len(incomplete):
        again = ranker.select(incomplete)
        similarities[incomplete], items[incomplete] = top_k(again, k) if symmetric else _search_directly(again, k)
    return similarities, items


def _search_directly(ranker: Ranker, k: int) -> Found:
    """Search without thresholds, with the most similar items of several tiles in memory."""
    found: list[Tensor] = []
    for tile in ranker.tiles(columns=_columns(len(ranker.queries))):
        similarities, size = tile.similarities, tile.similarities.shape[1]
        best, items = similarities.topk(min(k + 1, size))
        if size > k and (best[:, k - 1] == best[:, k]).any():  # topk returns any of several equal similarities
            best, items = similarities, torch.arange(size, device=items.device)
        found.append(_keys(best, items + tile.items.start))
        if sum(keys.shape[1] for keys in found) > 3 * k:
            found = [torch.cat(found, 1).topk(k).values]
    keys = torch.cat(found, 1).topk(k).values
    return _similarities(keys), _items(keys)


def _columns(number: int) -> int:
    """Return how many items a tile of these queries has: an odd multiple of 16, like `BLOCK_SIZE`."""
    columns = PRODUCTS_PER_TILE // number
    return columns // 32 * 32 - 16 if columns >= 32 else max(columns, 1)


def _estimate(ranker: Ranker, k: int) -> Estimate | None:
    """Choose the sample, and the rank in it whose similarity is the threshold: three standard deviations after k.

    Returns:
        None if there are few queries, or the sample is too small.
    """
    if len(ranker.queries) <= FEW_QUERIES:
        return None
    rows = torch.arange(len(ranker.gallery), device=ranker.gallery.device)
    if ranker.excluded is not None:
        rows = rows[~ranker.excluded]
    size = min(MAX_SAMPLE, len(rows) // ITEMS_PER_SAMPLE)
    expected = k * size / max(len(rows), 1)  # expected number of the k results that are in the sample
    rank = math.ceil(expected + 3 * expected**0.5 + 1)
    if rank > size:
        return None
    spread = torch.arange(size, device=rows.device) * len(rows) // size
    return partial(_similarity_at, rank, ranker.gallery.take(rows[spread]))


def _similarity_at(rank: int, sample: Tensor, queries: Tensor) -> Tensor:
    return products(queries, sample).topk(rank, sorted=False).values.amin(1)


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
        position = _positions(reached.view(-1))
        similarities = _take(tile.similarities.view(-1), position)
        query = position.div(reached.shape[1], rounding_mode="floor")
        item = position - query * reached.shape[1]
        if both_ways:
            chosen = (similarities >= _take(for_items, item)).nonzero().view(-1)
            chosen = _take(chosen, _take(item, chosen).to(torch.int32).argsort())
            keys = _keys(_take(similarities, chosen), _take(query, chosen) + tile.queries.start)
            self._append(tile.items.start, _take(item, chosen), keys)
            chosen = (similarities >= _take(for_queries, query)).nonzero().view(-1)
            similarities, query, item = _take(similarities, chosen), _take(query, chosen), _take(item, chosen)
        self._append(tile.queries.start, query, _keys(similarities, item + tile.items.start))

    def _append(self, first: int, query: Tensor, keys: Tensor) -> None:
        """Append candidates that are sorted by query, where query 0 is the one with index `first`."""
        new = torch.bincount(query)
        slot = torch.arange(len(query), device=query.device) - _take(new.cumsum(0) - new, query)
        counts = self.counts[first : first + len(new)]
        full = counts + new > self.capacity
        if full.any():
            is_full = _take(full, query)
            row = (full.cumsum(0) - 1)[query[is_full]]
            self._keep_best(first + full.nonzero().view(-1), row, slot[is_full], keys[is_full])
            query, slot, keys = query[~is_full], slot[~is_full], keys[~is_full]
            new.masked_fill_(full, 0)
        self.keys.view(-1).scatter_(0, (query + first) * self.capacity + _take(counts, query) + slot, keys)
        counts += new

    def _keep_best(self, queries: Tensor, row: Tensor, slot: Tensor, new: Tensor) -> None:
        """Keep the best k of some queries' candidates and of new ones in (row, slot), and raise their thresholds."""
        keys = self.keys.new_full((len(queries), self.capacity + int(slot.max()) + 1), _NO_KEY)
        keys[:, : self.capacity] = self.keys[queries]
        keys[row, self.capacity + slot] = new
        best = keys.topk(self.k, sorted=False).values
        self.keys[queries] = _NO_KEY
        self.keys[queries, : self.k], self.counts[queries] = best, self.k
        # The items of later tiles have higher indices, so they have to be more similar than the worst of the best k.
        worst = _similarities(best.amin(1))
        self.thresholds[queries] = worst.nextafter(worst.new_tensor(math.inf))

    def best(self) -> Found:
        """Return the best k of each query, sorted; -inf where there are fewer. Overwrites the candidates."""
        first = (self.k + 1) // 2  # after the similarities, which take 4 bytes each
        similarities, items = self.keys.view(torch.float32)[:, : self.k], self.keys[:, first : first + self.k]
        for start in range(0, len(items), QUERIES_PER_SORT):
            block = slice(start, start + QUERIES_PER_SORT)
            keys = self.keys[block].topk(self.k).values
            similarities[block], items[block] = _similarities(keys), _items(keys)
        return similarities, items


def _take(values: Tensor, positions: Tensor) -> Tensor:
    """Return values[positions], several times faster."""
    return values.index_select(0, positions)


def _positions(mask: Tensor) -> Tensor:
    """Return the indices of the true values, ascending. Most values are false, and are skipped 8 at a time."""
    if len(mask) % 8:
        return mask.nonzero().view(-1)
    some = mask.view(torch.int64).nonzero().view(-1)
    row, offset = _take(mask.view(-1, 8), some).nonzero(as_tuple=True)
    return _take(some, row) * 8 + offset


_LAST_ITEM = 2**32 - 1
_NO_KEY = -0x7F800001 << 32  # similarity -inf


def _keys(similarities: Tensor, items: Tensor) -> Tensor:
    """Return integers that ascend with the similarity and, for equal similarities, descend with the item."""
    bits = (similarities + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    return (_flip_negative(bits).long() << 32) | (_LAST_ITEM - items)


def _similarities(keys: Tensor) -> Tensor:
    return _flip_negative((keys >> 32).to(torch.int32)).view(torch.float32)


def _items(keys: Tensor) -> Tensor:
    return _LAST_ITEM - (keys & _LAST_ITEM)


def _flip_negative(bits: Tensor) -> Tensor:
    """Convert the bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
