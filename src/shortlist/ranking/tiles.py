"""The engine of every ranking loss: query tiles -> similarities -> smooth ranks -> loss and gradient, in one stream.

A loss is its *head*: a small function from the ranks of the positives to a loss for each query. The engine knows the
rest. It walks over tiles of queries, and a tile's gradient goes back to the embeddings before the next tile is made,
so memory stays a tile and backward costs nothing more.

Sigmoids are flat almost everywhere, and what is flat need not be computed:

- *Reach* (untrained embeddings): a positive whose rank is certainly past the head's reach adds nothing to the loss and
  has no gradient. The others are *kept*.
- *Band* (trained embeddings): a competitor far below a positive adds nothing to its rank and has no gradient. Where
  few competitors are left for all kept positives of a query, its row is *sparse*: those few are picked one by one, and
  the gradient of the row is sparse. The other rows are *dense*.
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
    Steps,
    compiled_steps,
    soft_steps,
)
from shortlist.ranking.inputs import check_tile_size
from shortlist.ranking.pruning import flat_from, similarity_out_of_reach, sparse_threshold
from shortlist.ranking.relevance import Relevance
from shortlist.ranking.scratch import Scratch
from shortlist.ranking.similarities import Gradients, Similarities


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


# Elements alive at once: of a tile (queries x database), of a step (pairs of query and positive x database). On a CPU
# a step stays in the caches close to the cores, and a tile has the rows that a fast matrix product needs.
_CPU_TILE, _CPU_ROWS, _CPU_STEP = 2**21, 512, 2**21
_GPU_STEP = 2**24
_PRUNE_FROM, _COMPILE_FROM = 1500, 2**25  # items, and sigmoids per call: below, it costs more than it saves


@dataclass(frozen=True)
class Engine:
    """How the stream runs. The defaults decide by device and sizes; the result does not depend on any of it.

    Args:
        tile_size: queries a tile.
        compile: fuse the sigmoids with torch.compile. Default: on GPUs, for large batches, where that should be worth
            the seconds it takes. What is pruned is not compiled.
        prune: leave out what is flat. Default: on CPUs, for databases from 1,500 items on, unless `compile` is
            True; on GPUs shapes that depend on the data would stall the device.
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
        stream = _Stream(
            head,
            temperature,
            queries=len(relevance.queries),
            steps=compiled_steps if fused else soft_steps,
            prune=on_cpu and not self.compile and similarities.size >= _PRUNE_FROM
            if self.prune is None
            else self.prune,
            backward=backward,
            step_size=_CPU_STEP if on_cpu else _GPU_STEP,
            scratch=Scratch(similarities.device, similarities.dtype),
        )
        losses = torch.empty(len(relevance.queries), device=similarities.device, dtype=similarities.dtype)
        for part, width in self._tiles(relevance.counts, similarities.size, on_cpu):
            rows = relevance.queries[part]
            competitors, pull_back = similarities.tile(rows, stream.scratch)
            positives, present = relevance.positives(rows, width)
            at = competitors.gather(1, positives)
            relevance.hide(competitors, rows, positives)
            losses[part], gradients = stream.tile(_Tile(competitors, positives, at, present, kept=present))
            if backward:
                pull_back(gradients)
        return losses.sum() / max(len(losses), 1)

    def _tiles(self, counts: list[int], size: int, on_cpu: bool) -> Iterator[tuple[slice, int]]:
        """The queries of each tile, and how many positives the last of them has: the most in the tile."""
        start = 0
        while start < len(counts):
            rows = self.tile_size or (max(_CPU_TILE // size, _CPU_ROWS) if on_cpu else max(_GPU_STEP // size, 1))
            stop = min(start + rows, len(counts))
            if self.tile_size is None:  # positives are ranked among each other, too; on a GPU a tile is one step
                room = _CPU_STEP if on_cpu else _GPU_STEP
                while (
                    stop > start + 1
                    and (stop - start) * counts[stop - 1] * (counts[stop - 1] if on_cpu else size) > room
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

    def take(self, rows: slice) -> _Tile:
        return _Tile(*(field[rows] for field in self))


@dataclass(frozen=True)
class _Stream:
    """One pass over all tiles: what stays the same from tile to tile."""

    head: Head
    temperature: float
    queries: int
    steps: Steps
    prune: bool
    backward: bool
    step_size: int
    scratch: Scratch

    def tile(self, tile: _Tile) -> tuple[Tensor, Gradients]:
        """Losses (T,), and the gradient of the mean loss at the similarities."""
        everyone = torch.arange(len(tile.at), device=tile.at.device)
        losses = torch.empty_like(tile.at[:, 0])
        if not self.prune:
            return losses, [self._dense(tile, everyone, losses)]
        width = flat_from(tile.competitors.shape[1], tile.at.dtype)
        out_of_reach = similarity_out_of_reach(
            tile.competitors, self.head.reach(flat_from(tile.at.shape[1], tile.at.dtype))
        )
        if out_of_reach is not None:
            tile = tile._replace(kept=tile.kept & (tile.at > out_of_reach))
        number, by_number = tile.kept.sum(1).sort(stable=True)  # rows with about as many kept positives come together
        if not number[0]:
            nothing = torch.full_like(tile.at, torch.inf).masked_fill_(~tile.present, 1)
            losses = self.head(Ranks(nothing, torch.ones_like(nothing), tile.present, tile.present.sum(1)))
        lowest = tile.at.masked_fill(~tile.kept, torch.inf).amin(1, keepdim=True)
        floor = lowest - width * self.temperature  # what is below counts nothing
        is_sparse = (floor >= sparse_threshold(tile.competitors)).squeeze(1)[by_number]
        gradients = []
        if len(rows := by_number[(number > 0) & is_sparse]):
            gradients.append(self._sparse(self._take(tile, rows), floor[rows], rows, losses))
        if len(rows := by_number[(number > 0) & ~is_sparse]):
            gradients.append(self._dense(self._take(tile, rows), rows, losses))
        return losses, gradients

    def _take(self, tile: _Tile, rows: Tensor) -> _Tile:
        """Some rows of a tile, in scratch: valid until the next are taken."""
        taken = []
        for name, field in tile._asdict().items():
            out = self.scratch(f"part of {name}", len(rows), field.shape[1], dtype=field.dtype)
            taken.append(torch.index_select(field, 0, rows, out=out))
        return _Tile(*taken)

    def _sparse(self, tile: _Tile, floor: Tensor, rows: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Fill in the losses of sparse rows; return their gradient, and the rows."""
        near = torch.ge(tile.competitors, floor, out=self.scratch("near", *tile.competitors.shape, dtype=torch.bool))
        near.scatter_(1, tile.positives, True)
        counts = BandCounts(tile.competitors, tile.at, tile.kept, 1 / self.temperature, near)
        losses[rows], gradient = self._loss_and_gradient(tile, counts, tile.competitors)
        return gradient, rows

    def _dense(self, tile: _Tile, rows: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """The same for any rows."""
        gradient = self.scratch("gradient", *tile.competitors.shape)
        scale = 1 / self.temperature
        for slice_ in self._parts(tile):
            part = tile.take(slice_)
            counts: RankCounts
            if self.prune:
                counts = FactoredCounts(part.competitors, part.at, part.kept, scale, self.scratch)
            else:
                counts = DenseCounts(part.competitors, part.at, scale, self.steps, self.scratch)
            losses[rows[slice_]], _ = self._loss_and_gradient(part, counts, gradient[slice_])
        return gradient, rows

    def _parts(self, tile: _Tile) -> Iterator[slice]:
        """Slices of a tile's rows, such that a step on each stays small. Rows with few kept positives come first."""
        rows, width = tile.at.shape
        pairs = tile.kept.sum(1).tolist() if self.prune else [width] * rows
        start, limit = 0, self.step_size // tile.competitors.shape[1]
        for row in range(rows):
            if (row + 1 - start) * pairs[row] > limit and row > start:
                yield slice(start, row)
                start = row
        yield slice(start, rows)

    def _loss_and_gradient(self, tile: _Tile, ahead: RankCounts, out: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each row, and gradient of the mean loss at the similarities, given who is ahead of the positives."""
        among = PositiveCounts(tile.at, tile.present, 1 / self.temperature)
        overall = (1 + among.counts + ahead.counts).masked_fill_(tile.present & ~tile.kept, torch.inf)
        ranks = Ranks(overall, 1 + among.counts, tile.present, tile.present.sum(1))
        if not self.backward:
            return self.head(ranks), out
        with torch.enable_grad():
            inputs = overall.requires_grad_(), ranks.among_positives.requires_grad_()
            losses = self.head(ranks)
            mean = losses.sum() / (self.queries * self.temperature)  # the sigmoids' inner derivative comes in here
            by_overall, by_among = torch.autograd.grad(mean, inputs, allow_unused=True, materialize_grads=True)
        at_positives = among.gradient(by_overall + by_among) - by_overall * ahead.slopes
        return losses.detach(), ahead.gradient(by_overall, tile.positives, at_positives, out)
