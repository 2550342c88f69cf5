"""SiMix: virtual examples between the positives of a batch. A virtual batch is pairs and alphas, nothing more."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_labels


class VirtualBatch(NamedTuple):
    """Virtual example v stands at alphas[v] * x + (1 - alphas[v]) * z, where (x, z) = pairs[v] are items of one label.

    It is never built: its similarities are the same mixture of theirs.
    """

    pairs: Tensor  # (V, 2) long, items of the batch
    alphas: Tensor  # (V,) in 0..1

    def check(self, labels: Tensor) -> None:
        """Raise ValueError unless the pairs are of this batch and of one label each."""
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
            raise ValueError(f"virtual pairs name an item outside the batch 0..{len(labels) - 1}")
        if not ((alphas >= 0) & (alphas <= 1)).all():
            raise ValueError("virtual alphas must lie between 0 and 1")
        left, right = labels[pairs.long()].unbind(1)
        mixed = (left != right).nonzero()
        if len(mixed):
            raise ValueError(f"virtual pair {mixed[0].item()} mixes two labels: SiMix mixes positives only")


class SiMix:
    """Draws a virtual batch: every unordered pair of positives once, alpha uniform in (0, 1) for each.

    A class with m items gives m (m - 1) / 2 virtual ones, whatever m is; a class of one gives none.

    Args:
        generator: source of the alphas, on any device; torch's default one of the labels' device if None.

    Example:
        >>> SiMix()(torch.tensor([7, 7, 3, 7])).pairs.tolist()
        [[0, 1], [0, 3], [1, 3]]
    """

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator

    def __call__(self, labels: Tensor) -> VirtualBatch:
        check_labels(labels)
        labels = labels.long()
        members = labels.argsort(stable=True)
        place = torch.arange(len(labels), device=labels.device)
        by_label = labels[members]
        partners = torch.searchsorted(by_label, by_label, right=True) - place - 1  # classmates further down
        left = torch.repeat_interleave(place, partners)
        right = left + 1 + torch.arange(len(left), device=labels.device) - (partners.cumsum(0) - partners)[left]
        source = labels.device if self.generator is None else self.generator.device
        alphas = torch.rand(len(left), generator=self.generator, device=source, dtype=torch.float32)
        return VirtualBatch(members[torch.stack((left, right), dim=1)], alphas.to(labels.device))

    def __repr__(self) -> str:
        return "SiMix()"
