"""The streaming ranker: similarities of queries and the items of a gallery, computed tile by tile.

Metrics, judged protocols, reports and exact search are consumers of its tiles. The ranker is responsible for what they
have in common: memory for one tile, products in full precision, and items that are not part of a query's ranking, such
as the query itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shortlist.ranking.precision import full_precision
from shortlist.ranking.relevance import HIDDEN
from shortlist.ranking.scratch import Scratch

TILE = 2**22  # number of similarities in memory at once, unless the consumer chooses the shape of the tiles
FEW_QUERIES, ROWS_PER_PRODUCT = 32, 256  # products of few queries are computed in blocks of the gallery


class VectorSource(Protocol):
    """Vectors of shape (n, d) that are read in blocks, from memory or from files."""

    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int: ...

    def blocks(self, size: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield the vectors from `first` on in blocks of at most `size`, each with the index of its first vector."""
        ...

    def take(self, rows: Tensor) -> Tensor:
        """Return the vectors with these indices."""
        ...


class TensorSource:
    """Some rows of a tensor, by default all. They are copied only block by block."""

    def __init__(self, vectors: Tensor, rows: Tensor | None = None):
        self._vectors, self._rows = vectors.detach(), rows
        self.device, self.dtype = vectors.device, vectors.dtype

    def __len__(self) -> int:
        return len(self._vectors if self._rows is None else self._rows)

    def blocks(self, size: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        for start in range(first, len(self), size):
            yield start, self.take(slice(start, start + size))

    def take(self, rows: Tensor | slice) -> Tensor:
        return self._vectors[rows if self._rows is None else self._rows[rows]]


class Tile(NamedTuple):
    """Similarities of T queries and M items. They may be changed, and are overwritten by the next tile."""

    queries: slice  # indices of the queries
    items: slice  # indices of the items
    vectors: Tensor  # (T, d) the queries
    similarities: Tensor  # (T, M); HIDDEN for items that are not in the query's ranking


@dataclass(frozen=True)
class Ranker:
    """Ranks the items of a gallery for queries.

    Args:
        queries: Queries, (q, d).
        gallery: Items of the same dtype and on the same device, (n, d).
        hidden: Pairs of a query and an item that is not in its ranking: ascending indices of queries, and indices of
            items. Those outside the gallery are ignored.
        excluded: Mask of the items that are excluded from all rankings, (n,).
        check: Function that is called with the similarities of each tile before items are hidden, and the index of the
            tile's first item.
    """

    queries: VectorSource
    gallery: VectorSource
    hidden: tuple[Tensor, Tensor] | None = None
    excluded: Tensor | None = None
    check: Callable[[Tensor, int], None] | None = None

    @classmethod
    def leave_one_out(cls, vectors: Tensor, rows: Tensor) -> Ranker:
        """Rank all other vectors for the given rows. A row is excluded by its index, so that its copies are ranked."""
        hidden = torch.arange(len(rows), device=rows.device), rows
        return cls(TensorSource(vectors, rows), TensorSource(vectors), hidden)

    def select(self, queries: Tensor) -> Ranker:
        """Return a ranker of some of the queries, whose indices ascend."""
        hidden = self.hidden
        if hidden is not None:
            inside = torch.isin(hidden[0], queries)
            hidden = torch.searchsorted(queries, hidden[0][inside]), hidden[1][inside]
        return replace(self, queries=TensorSource(self.queries.take(queries)), hidden=hidden)

    def rankings(self, rows: int | None = None) -> Iterator[Tile]:
        """Yield tiles of some queries and the whole gallery, which must be in memory.

        Args:
            rows: Number of queries per tile. Default: as many as fit into `TILE`.
        """
        size = max(len(self.gallery), 1)
        return self.tiles(rows or max(TILE // size, 1), size)

    def tiles(self, rows: int | None = None, columns: int | None = None, symmetric: bool = False) -> Iterator[Tile]:
        """Yield all tiles, those of the first queries first.

        Args:
            rows: Maximum number of queries per tile. Default: all.
            columns: Maximum number of items per tile. Default: neither the similarities nor the items of a tile are
                more than `TILE` numbers.
            symmetric: Whether the queries are the gallery, and only tiles on and above the diagonal are needed. The
                similarities of the other tiles are those of a tile above the diagonal, transposed.
        """
        scratch = Scratch(self.gallery.device, self.gallery.dtype)
        for query, left in self.queries.blocks(rows or max(len(self.queries), 1)):
            width = columns or max(TILE // max(left.shape), 1)
            for item, right in self.gallery.blocks(width, query if symmetric else 0):
                similarities = products(left, right, scratch("similarities", len(left), len(right)))
                if self.check is not None:
                    self.check(similarities, item)
                tile = Tile(slice(query, query + len(left)), slice(item, item + len(right)), left, similarities)
                self._hide(tile)
                yield tile

    def _hide(self, tile: Tile) -> None:
        if self.excluded is not None:
            tile.similarities.masked_fill_(self.excluded[tile.items], HIDDEN)
        if self.hidden is not None:
            bounds = torch.tensor((tile.queries.start, tile.queries.stop), device=self.hidden[0].device)
            start, stop = torch.searchsorted(self.hidden[0], bounds).tolist()
            query, item = self.hidden[0][start:stop] - tile.queries.start, self.hidden[1][start:stop] - tile.items.start
            inside = (item >= 0) & (item < tile.similarities.shape[1])
            tile.similarities[query[inside], item[inside]] = HIDDEN


def products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute the dot products of all pairs of rows in full precision."""
    with full_precision(left.device):
        if len(left) > FEW_QUERIES or left.device.type != "cpu":
            return torch.mm(left, right.T, out=out)
        # One product of a few rows and many rows would read the memory at less than half of its speed.
        out = left.new_empty(len(left), len(right)) if out is None else out
        transposed = out.T if len(left) == 1 else torch.empty_like(out).view(out.T.shape)
        number = len(right) // ROWS_PER_PRODUCT
        end = number * ROWS_PER_PRODUCT
        blocks, found = (each[:end].view(number, ROWS_PER_PRODUCT, each.shape[1]) for each in (right, transposed))
        torch.bmm(blocks, left.T.expand(number, -1, -1), out=found)
        torch.mm(right[end:], left.T, out=transposed[end:])
        return out if len(left) == 1 else out.copy_(transposed.T)


def rounding(dimensions: int, dtype: torch.dtype) -> float:
    """Return the rounding error of a dot product of unit vectors. Similarities that are closer than this are ties.

    The error grows with the number of dimensions if all terms are equal. The measured growth is below eps / 16 per
    dimension, because processors sum in several lanes.
    """
    return max(8, dimensions / 16) * torch.finfo(dtype).eps
