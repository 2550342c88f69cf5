"""The losses for the wrappers of pytorch-metric-learning, which check the class of a loss.

Its `DistributedLossWrapper` accepts only subclasses of `BaseMetricLossFunction`, and its `CrossBatchMemory` only
classes whose names are on a list. The losses of `shortlist.ranking` are neither, because they import only torch. To
use these wrappers, import the losses and `CrossBatchMemory` from here; values and gradients are the same.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from shortlist import ranking
from shortlist.extras import extra

with extra("baselines", __name__):
    from pytorch_metric_learning import distances, losses, reducers

__all__ = [
    "BinnedAPLoss",
    "BlackboxAPLoss",
    "CalibrationLoss",
    "CrossBatchMemory",
    "RecallAtKLoss",
    "SmoothAPLoss",
    "metric_loss_class",
]

Loss = TypeVar("Loss", bound=nn.Module)


class _MetricLoss(losses.BaseMetricLossFunction):  # type: ignore[misc]
    """Distance and reducer of the ranking losses. The library's own defaults are Euclidean distance and mean."""

    def get_default_distance(self) -> nn.Module:
        similarity: nn.Module = distances.DotProductSimilarity(normalize_embeddings=False)
        return similarity

    def get_default_reducer(self) -> nn.Module:
        reducer: nn.Module = reducers.DoNothingReducer()
        return reducer


def metric_loss_class(kind: type[Loss]) -> type[Loss]:
    """Derive a class that is a `BaseMetricLossFunction` as well. Its arguments, values and gradients are the same.

    Args:
        kind: Subclass of `RankingLoss` or `ListwiseLoss`.

    Example:
        >>> from pytorch_metric_learning.losses import BaseMetricLossFunction
        >>> loss = metric_loss_class(ranking.SmoothAPLoss)(similarity_temperature=0.05)
        >>> isinstance(loss, ranking.SmoothAPLoss) and isinstance(loss, BaseMetricLossFunction)
        True
    """
    about = f"`{kind.__module__}.{kind.__name__}` as a `BaseMetricLossFunction`; see there."
    return type(kind.__name__, (kind, _MetricLoss), {"__doc__": about})


RecallAtKLoss = metric_loss_class(ranking.RecallAtKLoss)
SmoothAPLoss = metric_loss_class(ranking.SmoothAPLoss)
BinnedAPLoss = metric_loss_class(ranking.BinnedAPLoss)
BlackboxAPLoss = metric_loss_class(ranking.BlackboxAPLoss)
CalibrationLoss = metric_loss_class(ranking.CalibrationLoss)


class CrossBatchMemory(losses.CrossBatchMemory):  # type: ignore[misc]
    """The library's memory of earlier batches, for all subclasses of `RankingLoss` and `ListwiseLoss` as well.

    Its counters are part of its state, so that a checkpoint contains them.
    """

    @staticmethod
    def supported_losses() -> list[str]:
        ours = _names(ranking.RankingLoss) | _names(ranking.ListwiseLoss)
        return [*losses.CrossBatchMemory.supported_losses(), *sorted(ours)]

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.queue_idx, int(self.has_been_filled)])

    def set_extra_state(self, state: Tensor) -> None:
        self.queue_idx, filled = state.tolist()
        self.has_been_filled = bool(filled)


def _names(kind: type) -> set[str]:
    """Return the names of a class and of all its subclasses."""
    return {kind.__name__}.union(*map(_names, kind.__subclasses__()))
