"""Blackbox AP (Rolinek et al. 2020): average precision of exact ranks, with a gradient by blackbox differentiation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_temperature
from shortlist.ranking.listwise import Lists, ListwiseLoss, Ranked, listwise_loss


@dataclass(frozen=True)
class BlackboxAP:
    """1 - the mean over the positives of (rank among positives) / (rank among all), ranks exact, ties against.

    Ranks are constant almost everywhere. Blackbox differentiation (Vlastelica et al. 2020) takes for the gradient of
    the loss L at the scores y the ranks' answer to a push of a certain length: y' = y + lambda dL/drank, and the
    gradient is -(rank(y) - rank(y')) / lambda. The rank among positives counts as a constant of L, and L is that of
    one query, so that lambda means the same whatever the size of the batch.

    Before, positives lose and negatives gain half the margin, so that a positive is content only when it is that far
    ahead.
    """

    blackbox_lambda: float
    margin: float

    def __post_init__(self) -> None:
        check_temperature(self.blackbox_lambda, "blackbox_lambda")
        if isinstance(self.margin, bool) or not isinstance(self.margin, Real) or not 0 <= self.margin < math.inf:
            raise ValueError(f"margin must be a finite number from 0 up, got {self.margin!r}")

    def __call__(self, lists: Lists) -> Ranked:
        present, number = lists.present, lists.number.unsqueeze(1)
        negatives = lists.negatives.add_(self.margin / 2)
        positives = (lists.positives - self.margin / 2).masked_fill_(~present, torch.inf)  # padding: above everything
        among, overall, ahead = _ranks(positives, negatives, present)
        precision = among / overall
        push = self.blackbox_lambda * precision / overall / number
        _, moved, ahead_moved = _ranks(positives + push, negatives, present)
        return Ranked(
            1 - precision.sum(1) / number.squeeze(1),
            (ahead_moved - ahead).to(negatives.dtype).div_(self.blackbox_lambda),
            (moved - overall).div_(self.blackbox_lambda),
        )


def _ranks(positives: Tensor, negatives: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the positives (T, P): rank among the positives, and among all. Of the negatives (T, N): positives ahead.

    An item at the same score is ahead. Padding, at inf, is ahead of every negative; its own ranks are 0 and 1.
    """
    ascending, order = positives.sort(1)
    below = torch.searchsorted(ascending, positives)  # positives strictly below each, (T, P)
    among = present.sum(1, keepdim=True) - below
    passed = torch.searchsorted(ascending, negatives, right=True)  # positives that each negative is ahead of, (T, N)
    histogram = torch.zeros(len(positives), positives.shape[1] + 1, device=passed.device, dtype=passed.dtype)
    histogram.scatter_add_(1, passed, torch.ones_like(passed))
    passing = histogram.flip(1).cumsum(1).flip(1)[:, 1:]  # negatives ahead of the lowest positive, the next, ...
    rivals = torch.empty_like(passing).scatter_(1, order, passing)
    ahead = positives.shape[1] - torch.searchsorted(ascending, negatives)
    return among.to(positives.dtype), (among + rivals).clamp_(min=1).to(positives.dtype), ahead


def blackbox_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    blackbox_lambda: float = 4.0,
    margin: float = 0.02,
    tile_size: int | None = None,
) -> Tensor:
    """Blackbox AP of a batch that is its own database: a scalar, 0 without any positive pair.

    Args:
        embeddings: (B, d), used as given.
        labels: (B,) integers; equal means positive. No item is in its own database.
        blackbox_lambda: how far scores are pushed to see which ranks change: larger reaches more rivals.
        margin: how far ahead of its rivals a positive must be.
        tile_size: queries a tile; None: by the size of the batch.

    Raises:
        ValueError, TypeError: on bad input, with what is wrong and where.

    Example:
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)
        >>> blackbox_ap_loss(apart, torch.tensor([5, 5, 9, 9])).item()
        0.0
    """
    return listwise_loss(BlackboxAP(blackbox_lambda, margin), embeddings, labels, tile_size=tile_size)


class BlackboxAPLoss(ListwiseLoss):
    """Blackbox AP as a module, with pytorch-metric-learning's call. Arguments as in `blackbox_ap_loss`."""

    def __init__(self, blackbox_lambda: float = 4.0, margin: float = 0.02, tile_size: int | None = None):
        super().__init__(BlackboxAP(blackbox_lambda, margin), tile_size)
