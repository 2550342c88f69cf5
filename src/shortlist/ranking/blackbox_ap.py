"""Blackbox AP (Rolinek et al. 2020): average precision of exact ranks, differentiated as a black box."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shortlist.ranking.count_at_least import count_at_least
from shortlist.ranking.inputs import check_temperature, is_finite_number
from shortlist.ranking.listwise import Lists, ListwiseLoss, ListwiseResult, listwise_loss


@dataclass(frozen=True)
class BlackboxAP:
    """1 - the mean over the positives of (rank among the positives) / (rank among all), with exact ranks.

    Tied items count as ahead. Exact ranks are constant almost everywhere. Blackbox differentiation (Vlastelica et al.
    2020) replaces the gradient of the loss L with respect to the scores y by the change of the ranks under a
    perturbation of the scores: with y' = y + lambda dL/drank, the gradient is -(rank(y) - rank(y')) / lambda. The rank
    among the positives is treated as a constant of L. L is the loss of one query, so that the effect of lambda does
    not depend on the batch size.

    Before ranking, half the margin is subtracted from the positives and added to the negatives, so that a positive must
    be ahead by the margin.

    Args:
        blackbox_lambda: Size of the perturbation.
        margin: Required difference between the similarity of a positive and that of a negative.
    """

    blackbox_lambda: float
    margin: float

    def __post_init__(self) -> None:
        check_temperature(self.blackbox_lambda, "blackbox_lambda")
        if not is_finite_number(self.margin) or self.margin < 0:
            raise ValueError(f"margin must be a finite number of at least 0, got {self.margin!r}")

    def __call__(self, lists: Lists) -> ListwiseResult:
        present, number = lists.present, lists.number.unsqueeze(1)
        negatives = lists.negatives.add_(self.margin / 2)
        positives = (lists.positives - self.margin / 2).masked_fill_(~present, torch.inf)  # padding comes first
        among, overall, ahead = _ranks(positives, negatives, present)
        precision = among / overall
        perturbation = self.blackbox_lambda * precision / overall / number
        _, perturbed, ahead_perturbed = _ranks(positives + perturbation, negatives, present)
        return ListwiseResult(
            1 - precision.sum(1) / number.squeeze(1),
            (ahead_perturbed - ahead).to(negatives.dtype).div_(self.blackbox_lambda),
            (perturbed - overall).div_(self.blackbox_lambda),
        )


def _ranks(positives: Tensor, negatives: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute exact ranks. An item with the same score counts as ahead.

    Padding has an infinite score and is ahead of every negative; its own ranks are 0 and 1.

    Returns:
        The rank of each positive among the positives and among all items, both (T, P), and the number of positives
        ahead of each negative, (T, N).
    """
    ascending = positives.sort(1).values
    below = torch.searchsorted(ascending, positives)  # number of positives strictly below each positive, (T, P)
    among = present.sum(1, keepdim=True) - below
    overall = (among + count_at_least(negatives, positives)).clamp_(min=1)
    ahead = positives.shape[1] - torch.searchsorted(ascending, negatives)
    return among.to(positives.dtype), overall.to(positives.dtype), ahead


def blackbox_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    blackbox_lambda: float = 4.0,
    margin: float = 0.02,
    tile_size: int | None = None,
) -> Tensor:
    """Compute the blackbox AP loss of a batch that is its own database. A query is not in its own database.

    Args:
        embeddings: Embeddings of shape (B, d). They are not normalised here.
        labels: Integer labels of shape (B,). Items with equal labels are positives of each other.
        blackbox_lambda: Size of the perturbation of the scores. Larger values involve more negatives.
        margin: Required difference between the similarity of a positive and that of a negative.
        tile_size: Number of queries per tile. Default: chosen by the size of the batch. Affects memory and time only.

    Returns:
        The loss, a scalar; 0 if the batch contains no positive pair.

    Raises:
        ValueError: If an input has the wrong shape, device or value.
        TypeError: If an input has the wrong type or dtype.

    Example:
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)
        >>> blackbox_ap_loss(apart, torch.tensor([5, 5, 9, 9])).item()
        0.0
    """
    return listwise_loss(BlackboxAP(blackbox_lambda, margin), embeddings, labels, tile_size=tile_size)


class BlackboxAPLoss(ListwiseLoss):
    """Blackbox AP as a module with the call signature of pytorch-metric-learning's losses.

    For the wrappers `CrossBatchMemory` and `DistributedLossWrapper` of that library, import it from
    `shortlist.pytorch_metric_learning`. See `blackbox_ap_loss` for the arguments.
    """

    def __init__(self, blackbox_lambda: float = 4.0, margin: float = 0.02, tile_size: int | None = None):
        super().__init__(BlackboxAP(blackbox_lambda, margin), tile_size)
