"""Histogram-binned average precision (He et al. 2018, Revaud et al. 2019), with soft assignment to bins."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from shortlist.ranking.listwise import Lists, ListwiseLoss, ListwiseResult, listwise_loss


@dataclass(frozen=True)
class BinnedAP:
    """1 - average precision, with precision and recall evaluated at the ends of M bins instead of at every rank.

    The centres of the bins lie on [1, -1], from the most similar downwards, 2 / (M - 1) apart. A similarity is shared
    between the two nearest centres by linear interpolation, so that the histogram changes smoothly. Similarities
    outside [-1, 1], which occur by rounding or for vectors that are not unit vectors, belong to the outermost bin.

    Args:
        bins: Number of bins M.
    """

    bins: int

    def __post_init__(self) -> None:
        if isinstance(self.bins, bool) or not isinstance(self.bins, Integral) or self.bins < 2:
            raise ValueError(f"bins must be an integer of at least 2, got {self.bins!r}")

    def __call__(self, lists: Lists) -> ListwiseResult:
        negatives, positives = self._assign(lists.negatives), self._assign(lists.positives)
        hidden = lists.negatives.isneginf()
        positive_histogram = self._histogram(*positives, ~lists.present)
        negative_histogram = self._histogram(*negatives, hidden)
        with torch.enable_grad():
            inputs = positive_histogram.requires_grad_(), negative_histogram.requires_grad_()
            losses = _loss(*inputs, lists.number)
            by_positives, by_negatives = torch.autograd.grad(losses.sum(), inputs)
        return ListwiseResult(
            losses.detach(),
            self._gradient(by_negatives, negatives[0], lists.negatives).masked_fill_(hidden, 0),
            self._gradient(by_positives, positives[0], lists.positives).masked_fill_(~lists.present, 0),
        )

    def _assign(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the centre at or above each similarity, and its distance to it as a fraction of a bin."""
        position = (1 - similarities.clamp(-1, 1)) * ((self.bins - 1) / 2)
        above = position.long().clamp_(max=self.bins - 2)
        return above, position.sub_(above)

    def _histogram(self, above: Tensor, fraction: Tensor, hidden: Tensor) -> Tensor:
        """Sum the shares of all items that are not hidden in each bin, (T, M)."""
        histogram = torch.zeros(len(above), self.bins, device=fraction.device, dtype=fraction.dtype)
        histogram.scatter_add_(1, above, (1 - fraction).masked_fill_(hidden, 0))
        return histogram.scatter_add_(1, above + 1, fraction.masked_fill(hidden, 0))

    def _gradient(self, by_bin: Tensor, above: Tensor, similarities: Tensor) -> Tensor:
        """Propagate a gradient from the bins to the items.

        A higher similarity moves an item's share from the centre below it to the centre above it.
        """
        slope = (by_bin[:, :-1] - by_bin[:, 1:]) * ((self.bins - 1) / 2)
        return slope.gather(1, above).masked_fill_(similarities.abs() > 1, 0)


def _loss(positives: Tensor, negatives: Tensor, number: Tensor) -> Tensor:
    """Compute 1 - the sum over the bins of (precision up to and including this bin) x (recall added by this bin).

    Args:
        positives: Histogram of the positives, of shape (T, M).
        negatives: Histogram of the negatives, of shape (T, M).
        number: Number of positives, of shape (T,).
    """
    retrieved_positives, retrieved = positives.cumsum(1), (positives + negatives).cumsum(1)
    precision = retrieved_positives / torch.where(retrieved > 0, retrieved, 1)  # empty leading bins add no recall
    return 1 - (precision * positives).sum(1) / number


def binned_ap_loss(embeddings: Tensor, labels: Tensor, bins: int = 20, tile_size: int | None = None) -> Tensor:
    """Compute the binned AP loss of a batch that is its own database. A query is not in its own database.

    Args:
        embeddings: Unit vectors of shape (B, d).
        labels: Integer labels of shape (B,). Items with equal labels are positives of each other.
        bins: Number of bins; 20 as in Revaud et al.
        tile_size: Number of queries per tile. Default: chosen by the size of the batch. Affects memory and time only.

    Returns:
        The loss, a scalar; 0 if the batch contains no positive pair.

    Raises:
        ValueError: If an input has the wrong shape, device or value.
        TypeError: If an input has the wrong type or dtype.

    Example:
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)
        >>> binned_ap_loss(apart, torch.tensor([5, 5, 9, 9])).item()
        0.0
    """
    return listwise_loss(BinnedAP(bins), embeddings, labels, tile_size=tile_size)


class BinnedAPLoss(ListwiseLoss):
    """Binned AP as a module with the call signature of pytorch-metric-learning's losses.

    For the wrappers `CrossBatchMemory` and `DistributedLossWrapper` of that library, import it from
    `shortlist.pytorch_metric_learning`. See `binned_ap_loss` for the arguments.
    """

    def __init__(self, bins: int = 20, tile_size: int | None = None):
        super().__init__(BinnedAP(bins), tile_size)
