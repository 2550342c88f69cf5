"""Histogram-binned average precision (He et al. 2018, Revaud et al. 2019): similarities fall softly into bins."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from shortlist.ranking.listwise import Lists, ListwiseLoss, Ranked, listwise_loss


@dataclass(frozen=True)
class BinnedAP:
    """1 - average precision, with precision and recall taken at the ends of M bins instead of at every rank.

    The bins have their centres on [1, -1], from the most similar down, 2 / (M - 1) apart. A similarity is shared by the
    two centres next to it, the nearer the more, so that a histogram moves with it smoothly. What is beyond the ends,
    by rounding or because the vectors have other lengths, is in the outer bin.
    """

    bins: int

    def __post_init__(self) -> None:
        if isinstance(self.bins, bool) or not isinstance(self.bins, Integral) or self.bins < 2:
            raise ValueError(f"bins must be a whole number from 2 up, got {self.bins!r}")

    def __call__(self, lists: Lists) -> Ranked:
        negatives, positives = self._place(lists.negatives), self._place(lists.positives)
        hidden = lists.negatives.isneginf()
        of_positives = self._histogram(*positives, ~lists.present)
        of_negatives = self._histogram(*negatives, hidden)
        with torch.enable_grad():
            inputs = of_positives.requires_grad_(), of_negatives.requires_grad_()
            losses = _loss(*inputs, lists.number)
            by_positives, by_negatives = torch.autograd.grad(losses.sum(), inputs)
        return Ranked(
            losses.detach(),
            self._gradient(by_negatives, negatives[0], lists.negatives).masked_fill_(hidden, 0),
            self._gradient(by_positives, positives[0], lists.positives).masked_fill_(~lists.present, 0),
        )

    def _place(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """The centre at or above each similarity, from 0, and how far on the way to the next one it is, 0 to 1."""
        place = (1 - similarities.clamp(-1, 1)) * ((self.bins - 1) / 2)
        above = place.long().clamp_(max=self.bins - 2)
        return above, place.sub_(above)

    def _histogram(self, above: Tensor, way: Tensor, hidden: Tensor) -> Tensor:
        """(T, M): how much of the items is in each bin."""
        found = torch.zeros(len(above), self.bins, device=way.device, dtype=way.dtype)
        found.scatter_add_(1, above, (1 - way).masked_fill_(hidden, 0))
        return found.scatter_add_(1, above + 1, way.masked_fill(hidden, 0))

    def _gradient(self, by_bin: Tensor, above: Tensor, similarities: Tensor) -> Tensor:
        """At the items: a higher similarity moves an item to the centre above it, away from the one below."""
        slope = (by_bin[:, :-1] - by_bin[:, 1:]) * ((self.bins - 1) / 2)
        return slope.gather(1, above).masked_fill_(similarities.abs() > 1, 0)


def _loss(of_positives: Tensor, of_negatives: Tensor, number: Tensor) -> Tensor:
    """1 - sum over the bins of (precision of this bin and those above) x (recall that this bin adds)."""
    found, seen = of_positives.cumsum(1), (of_positives + of_negatives).cumsum(1)
    precision = found / torch.where(seen > 0, seen, 1)  # an empty start has no recall, whatever its precision
    return 1 - (precision * of_positives).sum(1) / number


def binned_ap_loss(embeddings: Tensor, labels: Tensor, bins: int = 20, tile_size: int | None = None) -> Tensor:
    """Binned AP of a batch of unit vectors that is its own database: a scalar, 0 without any positive pair.

    Args:
        embeddings: (B, d), of length 1.
        labels: (B,) integers; equal means positive. No item is in its own database.
        bins: M; 20 as in Revaud et al.
        tile_size: queries a tile; None: by the size of the batch.

    Raises:
        ValueError, TypeError: on bad input, with what is wrong and where.

    Example:
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)
        >>> binned_ap_loss(apart, torch.tensor([5, 5, 9, 9])).item()
        0.0
    """
    return listwise_loss(BinnedAP(bins), embeddings, labels, tile_size=tile_size)


class BinnedAPLoss(ListwiseLoss):
    """Binned AP as a module, with pytorch-metric-learning's call. Arguments as in `binned_ap_loss`."""

    def __init__(self, bins: int = 20, tile_size: int | None = None):
        super().__init__(BinnedAP(bins), tile_size)
