"""SiMix: virtual examples between the positives of a batch, represented by pairs of items and mixing weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_labels


class VirtualBatch(NamedTuple):
    """V virtual examples of a batch.

    Virtual example v is alphas[v] * x + (1 - alphas[v]) * z, where (x, z) = pairs[v] are two items with the same label.
    Its embedding is never computed, because its similarities are the same mixture of those of x and z.
    """

    pairs: Tensor  # (V, 2) indices of items of the batch
    alphas: Tensor  # (V,) mixing weights from 0 to 1

    def check(self, labels: Tensor) -> None:
        """Require valid shapes, dtypes, devices and values, and pairs of items with equal labels.

        Args:
            labels: Integer labels of the batch, of shape (B,).
        """
        pairs, alphas = self
        if pairs.ndim != 2 or pairs.shape[1] != 2 or alphas.shape != pairs.shape[:1]:
            shapes = f"{tuple(pairs.shape)} and {tuple(alphas.shape)}"
            raise ValueError(f"a virtual batch needs pairs (V, 2) and alphas (V,), got {shapes}")
        check_labels(pairs.flatten(), "virtual pairs")
        for each in self:
            if each.device != labels.device:
                raise ValueError(f"the virtual batch is on {each.device} but the labels on {labels.device}")
        if not len(pairs):
            return
        if not 0 <= int(pairs.min()) <= int(pairs.max()) < len(labels):
            raise ValueError(f"virtual pairs contain an index outside the batch 0..{len(labels) - 1}")
        if not ((alphas >= 0) & (alphas <= 1)).all():
            raise ValueError("virtual alphas must lie between 0 and 1")
        left, right = labels[pairs.long()].unbind(1)
        mixed = (left != right).nonzero()
        if len(mixed):
            raise ValueError(f"virtual pair {mixed[0].item()} mixes two labels: SiMix mixes positives only")


class SiMix:
    """Generator of virtual batches: one virtual example for each unordered pair of positives, with a random alpha.

    The alphas are uniform in (0, 1). A class with m items yields m (m - 1) / 2 virtual examples.

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
        """Generate the virtual batch for integer labels of shape (B,)."""
        check_labels(labels)
        labels = labels.long()
        members = labels.argsort(stable=True)
        position = torch.arange(len(labels), device=labels.device)
        by_label = labels[members]
        partners = torch.searchsorted(by_label, by_label, right=True) - position - 1  # later items of the same class
        left = torch.repeat_interleave(position, partners)
        right = left + 1 + torch.arange(len(left), device=labels.device) - (partners.cumsum(0) - partners)[left]
        source = labels.device if self.generator is None else self.generator.device
        alphas = torch.rand(len(left), generator=self.generator, device=source, dtype=torch.float32)
        return VirtualBatch(members[torch.stack((left, right), dim=1)], alphas.to(labels.device))

    def __repr__(self) -> str:
        return "SiMix()"
