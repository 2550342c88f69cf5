"""Smooth-AP: average precision with smooth ranks (Brown et al. 2020), on the same engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from shortlist.ranking.losses import RankingLoss, ranking_loss
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.tiles import Engine, Ranks


@dataclass(frozen=True)
class SmoothAPHead:
    """1 - average precision: the mean over the positives of rank among positives / rank among all."""

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
    engine: Engine | None = None,
) -> Tensor:
    """Smooth-AP of a batch that is its own database: a scalar, 0 without any positive pair.

    Args:
        embeddings: (B, d), used as given.
        labels: (B,) integers; equal means positive.
        similarity_temperature: of the sigmoid that counts who is ahead of a positive.
        virtual: SiMix's virtual examples.
        engine: how to run; the default decides by itself.

    Raises:
        ValueError, TypeError: on bad input, with what is wrong and where.

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
        engine=engine,
    )


class SmoothAPLoss(RankingLoss):
    """Smooth-AP as a module, with pytorch-metric-learning's call. Arguments as in `smooth_ap_loss`.

    Args:
        simix: draws virtual examples for every batch, `SiMix()`; None for none.
    """

    def __init__(self, similarity_temperature: float = 0.01, simix: SiMix | None = None, engine: Engine | None = None):
        super().__init__(SmoothAPHead(), similarity_temperature, simix, engine=engine)
