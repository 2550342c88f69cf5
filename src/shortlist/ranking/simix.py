"""SiMix: virtual examples between the positives of a batch, represented by pairs of items and mixing weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_labels
from shortlist.ranking.relevance import SharedLabel


class VirtualBatch(NamedTuple):
    """V virtual examples of a batch.

    Virtual example v is alphas[v] * x + (1 - alphas[v]) * z, where (x, z) = pairs[v] are two items with the same label.
    Its embedding is never computed, because its similarities are the same mixture of those of x and z.
    """

    pairs: Tensor  # (V, 2) indices of items of the batch
    alphas: Tensor  # (V,) mixing weights from 0 to 1

    def shared_labels(self, labels: Tensor) -> Tensor:
        """Return the labels of each virtual example: those that both of its items have.

        Args:
            labels: Labels of the batch, of shape (B,), or (B, L) for items with several labels, padded with negative
                numbers.

        Returns:
            Labels of shape (V,), or (V, L), padded with -1.
        """
        left, right = labels[self.pairs.long()].unbind(1)
        if labels.ndim == 1:
            return left
        return left.masked_fill((left[:, :, None] != right[:, None]).all(2), -1)

    def check(self, labels: Tensor) -> None:
        """Require valid shapes, dtypes, devices and values, and pairs of items with equal labels, or a shared one.

        Args:
            labels: Integer labels of the batch, of shape (B,), or (B, L) for items with several labels.
        """
        pairs, alphas = self
        if pairs.ndim != 2 or pairs.shape[1] != 2 or alphas.shape != pairs.shape[:1]:
            shapes = f"{tuple(pairs.shape)} and {tuple(alphas.shape)}"
            raise ValueError(f"A virtual batch needs pairs (V, 2) and alphas (V,), got {shapes}.")
        check_labels(pairs.flatten(), "Virtual pairs")
        for each in self:
            if each.device != labels.device:
                raise ValueError(f"The virtual batch is on {each.device} but the labels on {labels.device}.")
        if not len(pairs):
            return
        if not 0 <= int(pairs.min()) <= int(pairs.max()) < len(labels):
            raise ValueError(f"Virtual pairs contain an index outside the batch 0..{len(labels) - 1}.")
        if not ((alphas >= 0) & (alphas <= 1)).all():
            raise ValueError("Virtual alphas must lie between 0 and 1.")
        if labels.ndim == 1:
            left, right = labels[pairs.long()].unbind(1)
            mixed = left != right
        else:
            mixed = (self.shared_labels(labels) < 0).all(1)
        if mixed.any():
            first = mixed.nonzero()[0].item()
            raise ValueError(f"Virtual pair {first} mixes two labels: the items of a pair must be positives.")


class SiMix:
    """Generator of virtual batches: one virtual example for each unordered pair of positives, with a random alpha.

    The alphas are uniform in (0, 1). A class with m items yields m (m - 1) / 2 virtual examples. If items have several
    labels, each pair that shares a label is mixed, and the virtual example has the labels that they share.

    Args:
        generator: Random number generator of the alphas, on any device. Default: torch's default generator of the
            labels' device.

    Example:
        >>> SiMix()(torch.tensor([7, 7, 3, 7])).pairs.tolist()
        [[0, 1], [0, 3], [1, 3]]
    """

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator

    def __call__(self, labels: Tensor) -> VirtualBatch:
        """Generate the virtual batch for integer labels of shape (B,), or (B, L) for items with several labels."""
        check_labels(labels, several=True)
        labels = labels.long()
        pairs = _pairs_with_equal_labels(labels) if labels.ndim == 1 else _pairs_with_shared_labels(labels)
        source = labels.device if self.generator is None else self.generator.device
        alphas = torch.rand(len(pairs), generator=self.generator, device=source, dtype=torch.float32)
        return VirtualBatch(pairs, alphas.to(labels.device))

    def __repr__(self) -> str:
        return "SiMix()"


def _pairs_with_equal_labels(labels: Tensor) -> Tensor:
    members = labels.argsort(stable=True)
    position = torch.arange(len(labels), device=labels.device)
    by_label = labels[members]
    partners = torch.searchsorted(by_label, by_label, right=True) - position - 1  # later items of the same class
    left = torch.repeat_interleave(position, partners)
    right = left + 1 + torch.arange(len(left), device=labels.device) - (partners.cumsum(0) - partners)[left]
    return members[torch.stack((left, right), dim=1)]


def _pairs_with_shared_labels(labels: Tensor) -> Tensor:
    relevance = SharedLabel(labels)
    rows = relevance.queries.sort().values
    others, present = relevance.positives(rows, max(relevance.counts, default=0))
    row, column = (present & (others > rows[:, None])).nonzero(as_tuple=True)
    return torch.stack((rows[row], others[row, column]), dim=1)
