"""Calibration: thresholds for similarities that are the same for all queries (Ramzi et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shortlist.ranking.inputs import is_finite_number
from shortlist.ranking.listwise import Lists, ListwiseLoss, ListwiseResult, listwise_loss


@dataclass(frozen=True)
class Calibration:
    """Mean over positives of max(positives_above - s, 0), plus mean over negatives of max(s - negatives_below, 0).

    Args:
        positives_above: Minimum similarity of positives.
        negatives_below: Maximum similarity of negatives.
    """

    positives_above: float
    negatives_below: float

    def __post_init__(self) -> None:
        for name in ("positives_above", "negatives_below"):
            value = getattr(self, name)
            if not is_finite_number(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")

    def __call__(self, lists: Lists) -> ListwiseResult:
        missing = (self.positives_above - lists.positives).clamp_(min=0).mul_(lists.present)
        excess = (lists.negatives - self.negatives_below).clamp_(min=0)
        number = lists.number.unsqueeze(1)
        negatives = (~lists.negatives.isneginf()).sum(1, keepdim=True).clamp_(min=1)
        return ListwiseResult(
            (missing / number).sum(1) + (excess / negatives).sum(1),
            (excess > 0) / negatives.to(excess.dtype),
            (missing > 0) / -number.to(missing.dtype),
        )


def calibration_loss(
    embeddings: Tensor,
    labels: Tensor,
    positives_above: float = 0.9,
    negatives_below: float = 0.6,
    tile_size: int | None = None,
) -> Tensor:
    """Compute the calibration loss of a batch, to be added to a ranking loss.

    Ranks do not depend on the absolute values of similarities. This loss fixes them, and has a gradient at any rank.

    Args:
        embeddings: Unit vectors of shape (B, d).
        labels: Integer labels of shape (B,). Items with equal labels are positives of each other.
        positives_above: Minimum similarity of positives.
        negatives_below: Maximum similarity of negatives.
        tile_size: Number of queries per tile. Default: chosen by the size of the batch. Affects memory and time only.

    Returns:
        The loss, a scalar; 0 if the batch contains no positive pair.

    Raises:
        ValueError: If an input has the wrong shape, device or value.
        TypeError: If an input has the wrong type or dtype.

    Example:
        >>> import torch
        >>> same = torch.tensor([[1.0, 0.0]]).repeat(3, 1)  # a pair, and a negative with similarity 1 = 0.6 + 0.4
        >>> round(calibration_loss(same, torch.tensor([5, 5, 9])).item(), 6)
        0.4
    """
    return listwise_loss(Calibration(positives_above, negatives_below), embeddings, labels, tile_size=tile_size)


class CalibrationLoss(ListwiseLoss):
    """The calibration loss as a module with the call signature of pytorch-metric-learning's losses.

    For the wrappers `CrossBatchMemory` and `DistributedLossWrapper` of that library, import it from
    `shortlist.pytorch_metric_learning`. See `calibration_loss` for the arguments.

    In our experiments with large batches (docs/results.md), none of 3 runs from random weights failed when it was added
    to RS@k, and 2 of 3 without it, which does not decide whether it helps. From pretrained weights, it decreased r@1.
    """

    def __init__(self, positives_above: float = 0.9, negatives_below: float = 0.6, tile_size: int | None = None):
        super().__init__(Calibration(positives_above, negatives_below), tile_size)
