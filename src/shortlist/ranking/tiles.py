"""The engine of every ranking loss: tiles of queries -> similarities -> smooth ranks -> loss and gradient.

A loss is defined by its *head*, a small function from the ranks of the positives to a loss per query. The engine does
the rest. It processes one tile of queries after another and propagates the gradient of a tile to the embeddings before
it computes the next tile. Memory use is therefore that of a tile, and backward() adds no further cost.

Sigmoids are flat almost everywhere, and flat parts need not be computed:

- *Reach* (untrained embeddings): a positive whose rank certainly exceeds the head's reach contributes nothing to the
  loss and has no gradient. The other positives are *active*.
- *Band* (trained embeddings): a competitor far below a positive contributes nothing to its rank and has no gradient.
  If few competitors remain for the active positives of a query, its row is *sparse*: these competitors are selected
  one by one, and the gradient of the row is sparse.
- *Series* (half-trained embeddings): for a competitor that is less far below a positive, the sigmoid is a short
  polynomial, which is summed over all such competitors at once. If few other competitors remain, these are selected
  one by one.

All other rows are *dense*: every competitor is compared with every active positive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shortlist.ranking.counting import (
    BandCounts,
    Comparison,
    DenseCounts,
    FactoredCounts,
    PositiveCounts,
    RankCounts,
    SeriesCounts,
    Steps,
    compiled_steps,
    soft_steps,
)
from shortlist.ranking.inputs import check_tile_size
from shortlist.ranking.pruning import flat_from, series, similarity_out_of_reach, sparse_thresholds
from shortlist.ranking.relevance import Relevance
from shortlist.ranking.scratch import Scratch, kept_scratch
from shortlist.ranking.sharing import current_sharing
from shortlist.ranking.similarities import Gradients, Rows, Similarities
from shortlist.ranking.tail import LinearTail


class Ranks(NamedTuple):
    """Smooth ranks, starting at 1, of the positives of a tile of T queries with up to P positives each."""

    overall: Tensor  # (T, P) rank in the whole database; inf if it certainly exceeds the head's reach
    among_positives: Tensor  # (T, P) rank among the positives of the query; may be NaN if the head does not use it
    present: Tensor  # (T, P) bool, False for padding
    number: Tensor  # (T,) number of positives


class Head(Protocol):
    """A ranking loss as a function of ranks.

    If a head has an attribute `uses_among_positives` that is False, the ranks among the positives are not always
    computed, which makes small batches faster.
    """

    def __call__(self, ranks: Ranks) -> Tensor:
        """Compute the loss of each query, (T,), differentiable with respect to `overall` and `among_positives` only."""
        ...

    def reach(self, width: float) -> float:
        """Return the rank beyond which a positive contributes less than exp(-width) to the loss.

        Return inf if every rank matters. If the reach is finite, `overall` may contain inf.
        """
        ...


# Number of elements in memory at once: in a tile of similarities (queries x database), which on a CPU has at least the
# number of rows that a fast matrix product needs, and in the pairs of positives and items that are kept.
_CPU_TILE, _CPU_ROWS, _CPU_PAIRS, _GPU_PAIRS = 2**21, 512, 2**23, 2**24
_PRUNE_FROM, _COMPILE_FROM = 6 * 2**20, 2**25  # sigmoids per call from which pruning and compilation save time
_SORT_FROM = 1500  # database size from which the best way to prune is chosen row by row


@dataclass(frozen=True)
class Engine:
    """Execution settings of a ranking loss. The defaults depend on device and sizes; the result never does.

    Args:
        tile_size: Number of queries per tile.
        compile: Whether to fuse the sigmoids with torch.compile. Default: on GPUs, for batches large enough to be worth
            the seconds that compilation takes. Pruned computations are not compiled.
        prune: Whether to skip computations where sigmoids are flat. Default: on CPUs, for large batches, unless
            `compile` is True. On GPUs, shapes that depend on the data would stall the device.
    """

    tile_size: int | None = None
    compile: bool | None = None
    prune: bool | None = None

    def __post_init__(self) -> None:
        check_tile_size(self.tile_size)

    def run(
        self,
        head: Head,
        similarities: Similarities,
        relevance: Relevance,
        temperature: float,
        backward: bool,
        tail: LinearTail | None = None,
    ) -> Tensor:
        """Compute the mean loss over the queries that have a positive; this process's part of it if queries are shared.

        Args:
            head: Loss as a function of ranks.
            similarities: Source of the tiles of similarities.
            relevance: Positives and competitors of each query.
            temperature: Temperature of the sigmoid on similarity differences.
            backward: Whether to accumulate the gradient in `similarities` as well.
            tail: Upper bound that takes the place of this sigmoid, if any.
        """
        on_cpu = similarities.device.type == "cpu"
        share = current_sharing().queries
        queries, counts = relevance.queries[share], relevance.counts[share]
        sigmoids = sum(counts) * similarities.size
        fused = not on_cpu and sigmoids >= _COMPILE_FROM if self.compile is None else self.compile
        prune = on_cpu and not self.compile and sigmoids >= _PRUNE_FROM if self.prune is None else self.prune
        losses = torch.empty(len(queries), device=similarities.device, dtype=similarities.dtype)
        with kept_scratch(similarities.device, similarities.dtype) as scratch:
            stream = _Stream(
                head,
                temperature,
                queries=len(relevance.queries),
                steps=compiled_steps if fused else soft_steps,
                prune=prune,
                backward=backward,
                scratch=scratch,
                tail=tail,
            )
            for part, width in self._tiles(counts, similarities.size, on_cpu, prune):
                rows = queries[part]
                competitors, pull_back = similarities.tile(rows, scratch)
                columns, present = relevance.positives(rows, width)
                positives = competitors.gather(1, columns)
                relevance.hide(competitors, rows, columns)
                if not stream.splits:
                    competitors.scatter_(1, columns, positives)
                losses[part], gradients = stream.tile(_Tile(competitors, columns, positives, present, active=present))
                if backward:
                    pull_back(gradients)
        return losses.sum() / max(len(relevance.queries), 1)

    def _tiles(self, counts: list[int], size: int, on_cpu: bool, prune: bool) -> Iterator[tuple[slice, int]]:
        """Yield the queries of each tile and their largest number of positives, which is that of the last query."""
        limit = _CPU_PAIRS if on_cpu else _GPU_PAIRS
        start = 0
        while start < len(counts):
            rows = self.tile_size or (max(_CPU_TILE // size, _CPU_ROWS) if on_cpu else max(_GPU_PAIRS // size, 1))
            stop = min(start + rows, len(counts))
            if self.tile_size is None:  # kept for each positive: all items or, with pruning, only the positives
                while (
                    stop > start + 1
                    and (stop - start) * counts[stop - 1] * (counts[stop - 1] if prune else size) > limit
                ):
                    stop = (start + stop) // 2
            yield slice(start, stop), counts[stop - 1]
            start = stop


class _Tile(NamedTuple):
    """Similarities of a tile of T queries with up to P positives each."""

    competitors: Tensor  # (T, N) similarities of the competitors of the positives; -inf for items that do not count
    columns: Tensor  # (T, P) database indices of the positives
    positives: Tensor  # (T, P) similarities of the positives
    present: Tensor  # (T, P) bool, False for padding
    active: Tensor  # (T, P) bool, True for positives within the head's reach


@dataclass(frozen=True)
class _Stream:
    """Settings that are common to all tiles of one pass."""

    head: Head
    temperature: float
    queries: int
    steps: Steps
    prune: bool
    backward: bool
    scratch: Scratch
    tail: LinearTail | None

    @property
    def splits(self) -> bool:
        """Whether positives are compared with each other separately. Otherwise they are among the competitors.

        A pruned computation cannot leave out the comparison of a positive with itself, whose slope of 1/4 would hide
        small gradients.
        """
        return self.prune or self.tail is not None or getattr(self.head, "uses_among_positives", True)

    def tile(self, tile: _Tile) -> tuple[Tensor, Gradients]:
        """Compute the losses, (T,), and the gradients of the mean loss with respect to the similarities."""
        if self.prune:
            reach = self.head.reach(flat_from(tile.positives.shape[1], tile.positives.dtype))
            least = 0.5 if self.tail is None else 1.0
            in_reach = tile.positives > similarity_out_of_reach(tile.competitors, reach, least)
            tile = tile._replace(active=tile.active & in_reach)
        counted = list(self._count(tile))
        among = self._count_among_positives(tile)
        overall = torch.ones_like(tile.positives) if among is None else 1 + among.counts
        among_positives = torch.full_like(overall, torch.nan) if among is None else overall.clone()
        for rows, ahead in counted:
            overall[rows] += ahead.counts
        overall.masked_fill_(tile.present & ~tile.active, torch.inf)
        ranks = Ranks(overall, among_positives, tile.present, tile.present.sum(1))
        if not self.backward:
            return self.head(ranks), []
        with torch.enable_grad():
            inputs = overall.requires_grad_(), ranks.among_positives.requires_grad_()
            losses = self.head(ranks)
            mean = losses.sum() / (self.queries * self.temperature)  # includes the inner derivative of the sigmoids
            by_overall, by_among = torch.autograd.grad(mean, inputs, allow_unused=True, materialize_grads=True)
        at_positives = torch.zeros_like(by_overall) if among is None else among.gradient(by_overall + by_among)

        gradients: Gradients = []
        dense = []
        out, filled = self.scratch("gradient", *tile.competitors.shape), 0
        for rows, ahead in counted:
            part = out[filled:][: len(by_overall[rows])]
            gradient = ahead.gradient(by_overall[rows], tile.columns[rows], at_positives[rows], part)
            if gradient is part:
                dense.append(rows)
                filled += len(part)
            else:
                gradients.append((gradient, rows))
        if dense:  # a single matrix product for all dense gradients is faster than one for each
            gradients.append((out[:filled], _concatenate(dense)))
        return losses.detach(), gradients

    def _count_among_positives(self, tile: _Tile) -> PositiveCounts | None:
        if not self.splits:
            return None
        exact = self.tail is not None
        return PositiveCounts(tile.positives, tile.present, 1 / self.temperature, self.scratch, exact)

    def _count(self, tile: _Tile) -> Iterator[tuple[Rows, RankCounts]]:
        """Count the competitors ahead of each positive. Yield the rows that are counted in the same way together."""
        size, dtype, scale = tile.competitors.shape[1], tile.positives.dtype, 1 / self.temperature
        whole = Comparison(tile.competitors, tile.positives, tile.active, scale, self.scratch, self.tail)
        if not self.prune:
            yield slice(None), DenseCounts(whole, self.steps, own=None if self.splits else tile.columns)
            return
        if size < _SORT_FROM:
            yield slice(None), SeriesCounts(whole)
            return
        lowest = tile.positives.masked_fill(~tile.active, torch.inf).amin(1, keepdim=True)
        negligible = lowest - flat_from(size, dtype) * self.temperature  # competitors below do not count
        summable = lowest - series(size, dtype)[0] * self.temperature  # competitors below can be summed by a series
        sparse_threshold, series_threshold = sparse_thresholds(tile.competitors)
        is_sparse = negligible >= sparse_threshold
        is_series = ~is_sparse & (summable >= series_threshold)
        for name, kind in (("sparse", is_sparse), ("series", is_series), ("dense", ~is_sparse & ~is_series)):
            rows = (kind & tile.active.any(1, keepdim=True)).squeeze(1).nonzero().squeeze(1)
            if not len(rows):
                continue
            competitors = self.scratch(f"{name} competitors", len(rows), size)
            torch.index_select(tile.competitors, 0, rows, out=competitors)
            part = whole._replace(items=competitors, thresholds=tile.positives[rows], active=tile.active[rows])
            if name == "sparse":
                yield rows, BandCounts(part, negligible[rows])
            elif name == "series":
                yield rows, SeriesCounts(part)
            else:
                yield rows, FactoredCounts(part)


def _concatenate(rows: list[Rows]) -> Rows:
    return rows[0] if len(rows) == 1 else torch.cat([each for each in rows if isinstance(each, Tensor)])
