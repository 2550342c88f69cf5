"""Losses of whole rankings that are not functions of smooth ranks, computed tile by tile like those of the engine.

Such a loss maps the similarities of a tile of queries to the loss of each query and its gradient with respect to the
similarities. Tiles of similarities and their backward pass are those of the engine, so memory use is that of a tile.
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
from shortlist.ranking.sharing import current_sharing
from shortlist.ranking.similarities import Similarities

_TILE = 2**21  # elements of a tile, queries x database


class Lists(NamedTuple):
    """Similarities of a tile of T queries to N database items, with up to P positives per query."""

    negatives: Tensor  # (T, N) similarities of the negatives; -inf for all other database items
    positives: Tensor  # (T, P) similarities of the positives
    present: Tensor  # (T, P) bool, False for padding

    @property
    def number(self) -> Tensor:
        """Number of positives of each query, (T,)."""
        return self.present.sum(1)


class ListwiseResult(NamedTuple):
    """Losses of a tile of queries, and the gradient of each query's loss with respect to its similarities."""

    losses: Tensor  # (T,)
    by_negatives: Tensor  # (T, N); 0 for items that are not negatives
    by_positives: Tensor  # (T, P); 0 for padding


class ListLoss(Protocol):
    """A loss as a function of the similarities of a tile of queries."""

    def __call__(self, lists: Lists) -> ListwiseResult: ...


def listwise_loss(
    loss: ListLoss,
    embeddings: Tensor,
    labels: Tensor,
    indices_tuple: IndicesTuple | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    tile_size: int | None = None,
) -> Tensor:
    """Compute the mean of a loss over all queries that have a positive; 0 if none has.

    See `ListwiseLoss` for `loss` and `tile_size`, and `ranking_loss` for the other arguments.
    """
    check_tile_size(tile_size)
    run = partial(_stream, loss, tile_size)
    return streamed_loss(run, embeddings, labels, indices_tuple=indices_tuple, ref_emb=ref_emb, ref_labels=ref_labels)


def _stream(
    loss: ListLoss, tile_size: int | None, similarities: Similarities, *, relevance: Relevance, backward: bool
) -> Tensor:
    scratch = Scratch(similarities.device, similarities.dtype)
    share, number = current_sharing().queries, len(relevance.queries)
    queries, counts = relevance.queries[share], relevance.counts[share]
    step = tile_size or max(_TILE // max(similarities.size, 1), 1)
    losses = torch.empty(len(queries), device=similarities.device, dtype=similarities.dtype)
    for start in range(0, len(queries), step):
        rows = queries[start : start + step]
        tile, pull_back = similarities.tile(rows, scratch)
        columns, present = relevance.positives(rows, counts[min(start + step, len(counts)) - 1])
        positives = tile.gather(1, columns)
        relevance.hide(tile, rows, columns)
        losses[start : start + step], by_negatives, by_positives = loss(Lists(tile, positives, present))
        if backward:
            gradient = by_negatives.scatter_add_(1, columns, by_positives).div_(number)
            pull_back([(gradient, slice(None))])
    return losses.sum() / max(number, 1)


class ListwiseLoss(nn.Module):
    """Base class of modules with a `ListLoss` and the call signature of pytorch-metric-learning's losses.

    `CrossBatchMemory` and `DistributedLossWrapper` of that library accept only certain classes. Those in
    `shortlist.pytorch_metric_learning` are accepted, and `metric_loss_class` there derives such a class from your own.

    Args:
        loss: Function from the similarities of a tile to losses and their gradient.
        tile_size: Number of queries per tile. Default: chosen by the size of the database. Affects memory and time
            only.
    """

    def __init__(self, loss: ListLoss, tile_size: int | None = None):
        super().__init__()
        check_tile_size(tile_size)
        self.list_loss, self.tile_size = loss, tile_size

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss, a scalar. See `ranking_loss` for the arguments."""
        return listwise_loss(self.list_loss, embeddings, labels, indices_tuple, ref_emb, ref_labels, self.tile_size)

    def extra_repr(self) -> str:
        return str(self.list_loss)
