"""The engine of every ranking loss: query tiles -> similarities -> smooth ranks -> loss and its gradient, in one stream.

A loss is its *head*: a small function from the ranks of the positives to a loss for each query. The engine knows the
rest. It walks over tiles of queries, and a tile's gradient goes back to the embeddings before the next tile is made,
so memory stays a tile and backward costs nothing more.

Sigmoids are flat almost everywhere, and what is flat need not be computed. `width` is how many temperatures away a
sigmoid is as good as 0 or 1: log(N / eps) of the dtype, so that N items cut there err by less than one rounding.

- *Reach* (untrained embeddings): half the number of competitors at or above a positive bounds its smooth rank from
  below. Where that bound is past the head's reach, the positive adds nothing to the loss and has no gradient.
- *Band* (trained embeddings): a competitor further than `width` temperatures below every positive adds to no rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shortlist.ranking.counting import Ahead, Band, EachOther, Everything, compiled_steps, soft_steps
from shortlist.ranking.relevance import Relevance
from shortlist.ranking.similarities import Similarities


class Ranks(NamedTuple):
    """Where the positives of a tile of queries stand. Ranks are smooth and start at 1."""

    overall: Tensor  # (T, P) among the whole database; inf where certainly past the head's reach
    among_positives: Tensor  # (T, P) among the query's positives only
    present: Tensor  # (T, P) bool: a positive, not padding
    count: Tensor  # (T,) number of positives


class Head(Protocol):
    """A ranking loss: all that tells one from another."""

    def __call__(self, ranks: Ranks) -> Tensor:
        """Loss of each query, (T,), differentiable by `overall` and `among_positives`."""
        ...

    def reach(self, width: float) -> float:
        """The rank past which a positive adds to the loss less than exp(-width); inf if every rank matters."""
        ...


@dataclass(frozen=True)
class Engine:
    """How the stream runs. The defaults decide by device and sizes; the result does not depend on any of it.

    Args:
        tile_size: queries a tile.
        compile: fuse the sigmoids with torch.compile. Default: on GPUs, and on CPUs where a call has so many of
            them that compiling is worth its seconds.
        prune: leave out what is flat. Default: on CPUs; on GPUs shapes that depend on data would stall the device.
    """

    tile_size: int | None = None
    compile: bool | None = None
    prune: bool | None = None

    def __post_init__(self) -> None:
        if self.tile_size is not None and self.tile_size < 1:
            raise ValueError(f"tile_size must be at least 1, got {self.tile_size}")

    def run(
        self, head: Head, similarities: Similarities, relevance: Relevance, temperature: float, backward: bool
    ) -> Tensor:
        """Mean loss over the queries that have a positive. With `backward`, its gradient is pulled back as well."""
        on_cpu = relevance.queries.device.type == "cpu"
        work = sum(relevance.counts) * similarities.size
        fused = (work >= _COMPILE_FROM if on_cpu else True) if self.compile is None else self.compile
        prune = on_cpu if self.prune is None else self.prune
        stream = _Stream(head, temperature, compiled_steps if fused else soft_steps, prune, on_cpu)
        losses = []
        for rows, width in self._tiles(relevance, similarities.size, on_cpu):
            competitors, pull_back = similarities.tile(rows)
            positives, present = relevance.positives(rows, width)
            at = competitors.gather(1, positives)
            relevance.hide(competitors, rows, positives)
            tile = _Tile(competitors, positives, at, present, present, torch.arange(len(rows), device=rows.device))
            loss, gradient, kept = stream.tile(tile)
            losses.append(loss)
            if backward:
                pull_back(gradient.div_(len(relevance.queries)), kept)
        return torch.cat(losses).mean()

    def _tiles(self, relevance: Relevance, size: int, on_cpu: bool) -> Iterator[tuple[Tensor, int]]:
        """The queries of each tile, and how many positives its last query has: the most in the tile."""
        start, counts = 0, relevance.counts
        while start < len(counts):
            rows = max(_CPU_TILE // size, _CPU_ROWS) if on_cpu else max(_GPU_STEP // (size * counts[-1]), 1)
            stop = min(start + (self.tile_size or rows), len(counts))
            yield relevance.queries[start:stop], counts[stop - 1]
            start = stop


# Elements alive at once of a tile (queries x database) and of a step (queries x positives x database). On a CPU a step
# stays in the caches close to the cores, and a tile has the rows that fast matrix products need.
_CPU_TILE, _CPU_ROWS, _CPU_STEP, _GPU_STEP = 2**20, 256, 2**20, 2**26
_COMPILE_FROM = 2**25  # sigmoids a call; below, all of them take eager less than a hundredth of the time to compile
_BAND_SHARE = 1 / 8  # to gather a competitor first and then take its sigmoid costs about eight sigmoids


class _Tile(NamedTuple):
    """A tile of T queries with P positives each, on its way from similarities to loss."""

    competitors: Tensor  # (T, N) similarity of what competes with the positives; -inf elsewhere
    positives: Tensor  # (T, P) index in the database
    at: Tensor  # (T, P) similarity of the positives
    present: Tensor  # (T, P) bool: a positive, not padding
    kept: Tensor  # (T, P) bool: within the head's reach; these stand first
    rows: Tensor  # (T,) place in the tile as it was first

    def take(self, rows: Tensor | slice) -> _Tile:
        return _Tile(*(field[rows] for field in self))


@dataclass(frozen=True)
class _Stream:
    head: Head
    temperature: float
    steps: Callable[..., tuple[Tensor, ...]]
    prune: bool
    on_cpu: bool

    def tile(self, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (T,), their gradient at the similarities of the rows that have one, (R, N), and those rows, (R,)."""
        nothing = torch.full_like(tile.at, torch.inf)
        losses = self.head(Ranks(nothing, torch.ones_like(nothing), tile.present, tile.present.sum(1)))
        near = None
        if self.prune:
            tile = self._within_reach(tile)
            near = self._band(tile)
        gradient = torch.empty_like(tile.competitors)
        for part in self._parts(tile, near is not None):
            rows = tile.take(part)
            width = int(rows.kept.sum(1).max()) if self.prune else rows.at.shape[1]
            thresholds = rows.at[:, :width]
            ahead: Ahead
            if near is None:
                ahead = Everything(rows.competitors, thresholds, 1 / self.temperature, self.steps)
            else:
                ahead = Band(rows.competitors, thresholds, 1 / self.temperature, near[part])
            losses[rows.rows], gradient[part] = self._loss_and_gradient(rows, ahead)
        return losses, gradient, tile.rows

    def _loss_and_gradient(self, tile: _Tile, ahead: Ahead) -> tuple[Tensor, Tensor]:
        """Loss of each row and its gradient at the similarities, given who is ahead of its first positives."""
        width = ahead.counts.shape[1]
        among = EachOther(tile.at, tile.present, 1 / self.temperature)
        overall = 1 + among.counts
        overall[:, :width] += ahead.counts
        ranks = Ranks(overall.masked_fill_(~tile.kept, torch.inf), 1 + among.counts, tile.present, tile.present.sum(1))
        loss, by_overall, by_among = _with_gradient(self.head, ranks)
        at_competitors = ahead.spread(by_overall[:, :width])
        at_positives = among.spread(by_overall + by_among) - (by_overall + by_among) * among.slopes
        at_positives[:, :width] -= by_overall[:, :width] * ahead.slopes
        return loss, at_competitors.scatter_add_(1, tile.positives, at_positives).div_(self.temperature)

    def _width(self, tile: _Tile) -> float:
        """How many temperatures from its middle a sigmoid is flat: cut there, N of them err by less than a rounding."""
        return math.log(tile.competitors.shape[1] / torch.finfo(tile.at.dtype).eps)

    def _within_reach(self, tile: _Tile) -> _Tile:
        """The rows with a positive that matters, such positives first, rows with many of them first.

        The rank of a positive that has c competitors at or above it is at least 1 + c / 2. The c-th largest maximum of
        disjoint groups of competitors is a similarity that certainly c of them attain, and nearly the largest such.
        """
        size = tile.competitors.shape[1]
        beyond = 2 * (self.head.reach(self._width(tile)) - 1) + 1
        if 8 * beyond > size:
            return tile
        groups = 4 * int(beyond)
        maxima = tile.competitors[:, : size - size % groups].view(len(tile.rows), -1, groups).amax(1)
        bar = maxima.topk(int(beyond), dim=1, sorted=False).values.amin(1, keepdim=True)
        kept = tile.present & (tile.at > bar)
        if kept.equal(tile.present):
            return tile
        order = tile.at.masked_fill(~kept, -torch.inf).argsort(1, descending=True)
        number = kept.sum(1)
        rows = number.argsort(descending=True)[: number.count_nonzero()]
        fields = (field.gather(1, order) for field in (tile.positives, tile.at, tile.present, kept))
        return _Tile(tile.competitors, *fields, tile.rows).take(rows)

    def _band(self, tile: _Tile) -> Tensor | None:
        """Which competitors are not too far below every kept positive, (T, N) bool; None if that is most of them."""
        lowest = tile.at.masked_fill(~tile.kept, torch.inf).amin(1, keepdim=True)
        near = tile.competitors > lowest - self._width(tile) * self.temperature
        return near if near.count_nonzero() <= _BAND_SHARE * near.numel() else None

    def _parts(self, tile: _Tile, banded: bool) -> Iterator[slice]:
        """Slices of a tile's rows such that a step on each stays small."""
        size, width = tile.competitors.shape[1], tile.at.shape[1]
        budget = _CPU_STEP if self.on_cpu else _GPU_STEP
        rows = max(budget // (width * (width if banded else size)), 1)
        return (slice(start, start + rows) for start in range(0, len(tile.rows), rows))


def _with_gradient(head: Head, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """A head's loss for each query, and the gradient of their sum by `overall` and by `among_positives`."""
    with torch.enable_grad():
        overall, among = ranks.overall.requires_grad_(), ranks.among_positives.requires_grad_()
        loss = head(ranks)
        gradients = torch.autograd.grad(loss.sum(), (overall, among), materialize_grads=True, allow_unused=True)
    return loss.detach(), *gradients
