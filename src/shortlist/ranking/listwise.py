"""Losses of whole rankings that are no function of smooth ranks: beside the engine, in the same kind of stream.

A loss says what becomes of a tile: similarities of some queries -> loss of each query, and its gradient at them. The
way to the similarities and back is the engine's, so memory stays a tile here, too.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shortlist.ranking.inputs import check_tile_size
from shortlist.ranking.losses import IndicesTuple, streamed_loss
from shortlist.ranking.relevance import Relevance
from shortlist.ranking.scratch import Scratch
from shortlist.ranking.similarities import Similarities

_TILE = 2**21  # elements of a tile, queries x database


class Lists(NamedTuple):
    """What a tile of T queries ranks."""

    negatives: Tensor  # (T, N) similarity of the database items that are negatives; -inf for all others
    positives: Tensor  # (T, P) similarity of the positives
    present: Tensor  # (T, P) bool: a positive, not padding

    @property
    def number(self) -> Tensor:
        """(T,) positives of each query."""
        return self.present.sum(1)


class Ranked(NamedTuple):
    losses: Tensor  # (T,)
    by_negatives: Tensor  # (T, N) the gradient of each query's loss; 0 for items that are no negatives
    by_positives: Tensor  # (T, P) the same; 0 for padding


class ListLoss(Protocol):
    """All that tells one of these losses from another."""

    def __call__(self, lists: Lists) -> Ranked: ...


def listwise_loss(
    loss: ListLoss,
    embeddings: Tensor,
    labels: Tensor,
    indices_tuple: IndicesTuple | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    tile_size: int | None = None,
) -> Tensor:
    """The mean of a loss over all queries that have a positive; 0 if none has. Arguments as in `ranking_loss`."""
    check_tile_size(tile_size)
    run = partial(_stream, loss, tile_size)
    return streamed_loss(run, embeddings, labels, indices_tuple=indices_tuple, ref_emb=ref_emb, ref_labels=ref_labels)


def _stream(
    loss: ListLoss, tile_size: int | None, similarities: Similarities, *, relevance: Relevance, backward: bool
) -> Tensor:
    scratch = Scratch(similarities.device, similarities.dtype)
    number = len(relevance.queries)
    step = tile_size or max(_TILE // max(similarities.size, 1), 1)
    losses = torch.empty(number, device=similarities.device, dtype=similarities.dtype)
    for start in range(0, number, step):
        rows = relevance.queries[start : start + step]
        tile, pull_back = similarities.tile(rows, scratch)
        places, present = relevance.positives(rows, relevance.counts[min(start + step, number) - 1])
        positives = tile.gather(1, places)
        relevance.hide(tile, rows, places)
        losses[start : start + step], by_negatives, by_positives = loss(Lists(tile, positives, present))
        if backward:
            gradient = by_negatives.scatter_add_(1, places, by_positives).div_(number)
            pull_back([(gradient, torch.arange(len(rows), device=rows.device))])
    return losses.sum() / max(number, 1)


class ListwiseLoss(nn.Module):
    """A `ListLoss` as a module with pytorch-metric-learning's call; inherit, and give it one.

    Args:
        loss: similarities of a tile -> losses and their gradient.
        tile_size: queries a tile; None: by the size of the batch. Changes memory and time only.
    """

    def __init__(self, loss: ListLoss, tile_size: int | None = None):
        super().__init__()
        check_tile_size(tile_size)
        self.of_lists, self.tile_size = loss, tile_size

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss, a scalar; see `ranking_loss` for the arguments."""
        return listwise_loss(self.of_lists, embeddings, labels, indices_tuple, ref_emb, ref_labels, self.tile_size)

    def extra_repr(self) -> str:
        return str(self.of_lists)
