"""Smooth-AP (Brown et al. 2020): average precision with smooth ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from shortlist.ranking.losses import RankingLoss, ranking_loss
from shortlist.ranking.relevance import CountQuery
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.tail import LinearTail
from shortlist.ranking.tiles import Engine, Ranks


@dataclass(frozen=True)
class SmoothAPHead:
    """1 - average precision, the mean over the positives of (rank among the positives) / (rank in the database)."""

    def __call__(self, ranks: Ranks) -> Tensor:
        precision = (ranks.among_positives / ranks.overall) * ranks.present
        return 1 - precision.sum(1) / ranks.number

    def reach(self, width: float) -> float:
        return math.inf


def smooth_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    similarity_temperature: float = 0.01,
    virtual: VirtualBatch | None = None,
    count_query: bool = False,
    engine: Engine | None = None,
    *,
    tail: LinearTail | None = None,
) -> Tensor:
    """Compute the Smooth-AP loss of a batch that is its own database.

    Args:
        embeddings: Embeddings of shape (B, d). They are not normalised here.
        labels: Integer labels of shape (B,). Items with equal labels are positives of each other.
        similarity_temperature: Temperature of the sigmoid that decides whether an item is ahead of a positive.
        virtual: SiMix's virtual examples.
        count_query: Whether a query is the first of its own positives, as in the code that Brown et al. released.
        engine: Execution settings. Default: chosen by device and batch size.
        tail: Upper bound of the step function that takes the place of the sigmoid: the loss of SupAP.

    Returns:
        The loss, a scalar; 0 if the batch contains no positive pair.

    Raises:
        ValueError: If an input has the wrong shape, device or value.
        TypeError: If an input has the wrong type or dtype.

    Example:
        >>> import torch
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)
        >>> smooth_ap_loss(apart, torch.tensor([5, 5, 9, 9])).item()
        0.0
    """
    return ranking_loss(
        SmoothAPHead(),
        embeddings,
        labels,
        similarity_temperature=similarity_temperature,
        virtual=virtual,
        count_query="positive" if count_query else False,
        engine=engine,
        tail=tail,
    )


class SmoothAPLoss(RankingLoss):
    """Smooth-AP as a module with the call signature of pytorch-metric-learning's losses.

    For the wrappers `CrossBatchMemory` and `DistributedLossWrapper` of that library, import it from
    `shortlist.pytorch_metric_learning`. See `smooth_ap_loss` and `RankingLoss` for the other arguments.

    Args:
        simix: Generator of virtual examples for every batch, `SiMix()`, or None.
    """

    def __init__(
        self,
        similarity_temperature: float = 0.01,
        simix: SiMix | None = None,
        count_query: bool = False,
        engine: Engine | None = None,
        *,
        tail: LinearTail | None = None,
    ):
        counted: CountQuery = "positive" if count_query else False
        super().__init__(SmoothAPHead(), similarity_temperature, simix, counted, engine, tail=tail)
