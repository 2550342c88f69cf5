"""The engine of every ranking loss: query tiles -> similarities -> smooth ranks -> loss and gradient, in one stream.

A loss is its *head*: a small function from the ranks of the positives to a loss for each query. The engine knows the
rest. It walks over tiles of queries, and a tile's gradient goes back to the embeddings before the next tile is made,
so memory stays a tile and backward costs nothing more.

Sigmoids are flat almost everywhere, and what is flat need not be computed:

- *Reach* (untrained embeddings): a positive whose rank is certainly past the head's reach adds nothing to the loss and
  has no gradient. The others are *kept*.
- *Band* (trained embeddings): a competitor far below a positive adds nothing to its rank and has no gradient. Where
  few competitors are left for all kept positives of a query, its row is *sparse*: those few are picked one by one, and
  the gradient of the row is sparse.
- *Series* (half-trained embeddings): the sigmoid of a competitor not so far below a positive is a short polynomial,
  which is summed up over all such competitors at once. Where few others are left, those are picked one by one.

The other rows are *dense*: every competitor meets every kept positive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shortlist.ranking.counting import (
    BandCounts,
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
from shortlist.ranking.scratch import Scratch
from shortlist.ranking.similarities import Gradients, Rows, Similarities


class Ranks(NamedTuple):
    """Where the positives of a tile of queries stand. Ranks are smooth and start at 1."""

    overall: Tensor  # (T, P) among the whole database; inf where certainly past the head's reach
    among_positives: Tensor  # (T, P) among the query's positives only
    present: Tensor  # (T, P) bool: a positive, not padding
    number: Tensor  # (T,) number of positives


class Head(Protocol):
    """A ranking loss: all that tells one from another."""

    def __call__(self, ranks: Ranks) -> Tensor:
        """Loss of each query, (T,), differentiable by `overall` and `among_positives`, and by nothing else."""
        ...

    def reach(self, width: float) -> float:
        """The rank past which a positive adds to the loss less than exp(-width); inf if every rank matters.

        Where it is finite, `overall` may hold inf.
        """
        ...


# Elements alive at once: of a tile (queries x database), which on a CPU has the rows that a fast matrix product needs,
# and of the pairs of query and positive x database, where these are kept.
_CPU_TILE, _CPU_ROWS, _CPU_STEP, _GPU_STEP = 2**21, 512, 2**21, 2**24
_PRUNE_FROM, _COMPILE_FROM = 2**22, 2**25  # sigmoids per call: below, it costs more than it saves
_SORT_FROM = 1500  # items from which rows are sorted by how they are best pruned


@dataclass(frozen=True)
class Engine:
    """How the stream runs. The defaults decide by device and sizes; the result does not depend on any of it.

    Args:
        tile_size: queries per tile.
        compile: fuse the sigmoids with torch.compile. Default: on GPUs, for large batches, where that should be worth
            the seconds it takes. What is pruned is not compiled.
        prune: leave out what is flat. Default: on CPUs, for large batches, unless `compile` is True; on GPUs shapes
            that depend on the data would stall the device.
    """

    tile_size: int | None = None
    compile: bool | None = None
    prune: bool | None = None

    def __post_init__(self) -> None:
        check_tile_size(self.tile_size)

    def run(
        self, head: Head, similarities: Similarities, relevance: Relevance, temperature: float, backward: bool
    ) -> Tensor:
        """Mean loss over the queries that have a positive. With `backward`, its gradient is pulled back as well."""
        on_cpu = similarities.device.type == "cpu"
        sigmoids = sum(relevance.counts) * similarities.size
        fused = not on_cpu and sigmoids >= _COMPILE_FROM if self.compile is None else self.compile
        prune = on_cpu and not self.compile and sigmoids >= _PRUNE_FROM if self.prune is None else self.prune
        stream = _Stream(
            head,
            temperature,
            queries=len(relevance.queries),
            steps=compiled_steps if fused else soft_steps,
            prune=prune,
            backward=backward,
            scratch=Scratch(similarities.device, similarities.dtype),
        )
        losses = torch.empty(len(relevance.queries), device=similarities.device, dtype=similarities.dtype)
        for part, width in self._tiles(relevance.counts, similarities.size, on_cpu, prune):
            rows = relevance.queries[part]
            competitors, pull_back = similarities.tile(rows, stream.scratch)
            positives, present = relevance.positives(rows, width)
            at = competitors.gather(1, positives)
            relevance.hide(competitors, rows, positives)
            losses[part], gradients = stream.tile(_Tile(competitors, positives, at, present, kept=present))
            if backward:
                pull_back(gradients)
        return losses.sum() / max(len(losses), 1)

    def _tiles(self, counts: list[int], size: int, on_cpu: bool, prune: bool) -> Iterator[tuple[slice, int]]:
        """The queries of each tile, and how many positives the last of them has: the most in the tile."""
        room = _CPU_STEP if on_cpu else _GPU_STEP
        start = 0
        while start < len(counts):
            rows = self.tile_size or (max(_CPU_TILE // size, _CPU_ROWS) if on_cpu else max(_GPU_STEP // size, 1))
            stop = min(start + rows, len(counts))
            if self.tile_size is None:  # for each positive, the database or, if pruned, only the positives are kept
                while (
                    stop > start + 1
                    and (stop - start) * counts[stop - 1] * (counts[stop - 1] if prune else size) > room
                ):
                    stop = (start + stop) // 2
            yield slice(start, stop), counts[stop - 1]
            start = stop


class _Tile(NamedTuple):
    """A tile of T queries with P positives each, on its way from similarities to loss."""

    competitors: Tensor  # (T, N) similarity of what competes with the positives; -inf elsewhere
    positives: Tensor  # (T, P) index in the database
    at: Tensor  # (T, P) similarity of the positives
    present: Tensor  # (T, P) bool: a positive, not padding
    kept: Tensor  # (T, P) bool: a positive within reach


@dataclass(frozen=True)
class _Stream:
    """One pass over all tiles: what stays the same from tile to tile."""

    head: Head
    temperature: float
    queries: int
    steps: Steps
    prune: bool
    backward: bool
    scratch: Scratch

    def tile(self, tile: _Tile) -> tuple[Tensor, Gradients]:
        """Losses (T,), and the gradient of the mean loss at the similarities."""
        if self.prune:
            reach = self.head.reach(flat_from(tile.at.shape[1], tile.at.dtype))
            tile = tile._replace(kept=tile.kept & (tile.at > similarity_out_of_reach(tile.competitors, reach)))
        counted = list(self._count(tile))
        among = PositiveCounts(tile.at, tile.present, 1 / self.temperature)
        overall = 1 + among.counts
        for rows, ahead in counted:
            overall[rows] += ahead.counts
        overall.masked_fill_(tile.present & ~tile.kept, torch.inf)
        ranks = Ranks(overall, 1 + among.counts, tile.present, tile.present.sum(1))
        if not self.backward:
            return self.head(ranks), []
        with torch.enable_grad():
            inputs = overall.requires_grad_(), ranks.among_positives.requires_grad_()
            losses = self.head(ranks)
            mean = losses.sum() / (self.queries * self.temperature)  # the sigmoids' inner derivative comes in here
            by_overall, by_among = torch.autograd.grad(mean, inputs, allow_unused=True, materialize_grads=True)
        at_positives = among.gradient(by_overall + by_among)

        gradients: Gradients = []
        dense = []
        out, filled = self.scratch("gradient", *tile.competitors.shape), 0
        for rows, ahead in counted:
            part = out[filled:][: len(by_overall[rows])]
            gradient = ahead.gradient(by_overall[rows], tile.positives[rows], at_positives[rows], part)
            if gradient is part:
                dense.append(rows)
                filled += len(part)
            else:
                gradients.append((gradient, rows))
        if dense:  # one matrix product for all of them is faster than one for each
            gradients.append((out[:filled], _joined(dense)))
        return losses.detach(), gradients

    def _count(self, tile: _Tile) -> Iterator[tuple[Rows, RankCounts]]:
        """Rows that are counted in one way, and who is ahead of their positives."""
        size, dtype, scale = tile.competitors.shape[1], tile.at.dtype, 1 / self.temperature
        everyone = slice(None)
        if not self.prune:
            yield everyone, DenseCounts(tile.competitors, tile.at, scale, self.steps, self.scratch)
            return
        if size < _SORT_FROM:
            yield everyone, SeriesCounts(tile.competitors, tile.at, tile.kept, scale, self.scratch)
            return
        lowest = tile.at.masked_fill(~tile.kept, torch.inf).amin(1, keepdim=True)
        flat = lowest - flat_from(size, dtype) * self.temperature  # what is below counts nothing
        summed = lowest - series(size, dtype)[0] * self.temperature  # what is below can be summed up
        few, more = sparse_thresholds(tile.competitors)
        is_sparse = flat >= few
        is_summed = ~is_sparse & (summed >= more)
        for name, kind in (("sparse", is_sparse), ("summed", is_summed), ("dense", ~is_sparse & ~is_summed)):
            chosen = (kind & tile.kept.any(1, keepdim=True)).squeeze(1).nonzero().squeeze(1)
            if not len(chosen):
                continue
            competitors = self.scratch(f"{name} competitors", len(chosen), size)
            torch.index_select(tile.competitors, 0, chosen, out=competitors)
            at, kept = tile.at[chosen], tile.kept[chosen]
            if name == "sparse":
                yield chosen, BandCounts(competitors, at, kept, scale, self.scratch, floor=flat[chosen])
            elif name == "summed":
                yield chosen, SeriesCounts(competitors, at, kept, scale, self.scratch)
            else:
                yield chosen, FactoredCounts(competitors, at, kept, scale, self.scratch)


def _joined(rows: list[Rows]) -> Rows:
    return rows[0] if len(rows) == 1 else torch.cat([each for each in rows if isinstance(each, Tensor)])
