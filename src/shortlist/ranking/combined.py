"""A loss plus other losses of the same batch, with weights."""

from __future__ import annotations

from torch import Tensor, nn

from shortlist.ranking.inputs import check_temperature


class CombinedLoss(nn.Module):
    """A loss plus weighted other losses, such as RS@k plus a proxy loss, which has a gradient at any rank.

    In our experiments with large batches (docs/results.md), none of 3 runs from random weights failed with a proxy loss
    added to RS@k, and 2 of 3 without it, but r@1 was lower than with `MedianRank`; in another experiment
    (docs/remedies.md), training failed. It did not improve training from pretrained weights.

    Args:
        loss: Module that maps (embeddings, labels) to a scalar.
        added: Further modules of this kind, each with its weight. Their parameters are parameters of this module.

    Example:
        >>> import torch
        >>> from shortlist.ranking import CalibrationLoss, RecallAtKLoss
        >>> embeddings, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
        >>> loss = CombinedLoss(RecallAtKLoss(), (CalibrationLoss(), 0.5))
        >>> expected = RecallAtKLoss()(embeddings, labels) + 0.5 * CalibrationLoss()(embeddings, labels)
        >>> torch.equal(loss(embeddings, labels), expected)
        True
    """

    def __init__(self, loss: nn.Module, *added: tuple[nn.Module, float]):
        super().__init__()
        self.loss = loss
        self.added = nn.ModuleList(module for module, _ in added)
        self.weights = [check_temperature(weight, "The weight of an added loss") for _, weight in added]

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the sum, a scalar."""
        total: Tensor = self.loss(embeddings, labels)
        for weight, module in zip(self.weights, self.added, strict=True):
            total = total + weight * module(embeddings, labels)
        return total

    def extra_repr(self) -> str:
        return f"weights={self.weights}"
