"""Embeddings of many kinds, to measure a loss on anything that a network may produce."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

SHARED = 0.5  # length of a component shared by all images, as in real embeddings, whose negatives are similar as well


@dataclass(frozen=True)
class Embeddings:
    """Unit vectors of classes of equal size: synthetic vectors with a given r@1, or real embeddings from a file.

    Args:
        per_class: Number of images per class.
        latent: Number of dimensions in which the vectors differ. A trained network uses few: with 24, the standard
            deviation of the similarities of negatives is about 0.2.
        shared: Whether all vectors share a component.
        r_at_1: Share of the queries whose nearest neighbour is of their class; None for vectors independent of the
            class.
        file: Name of a file of embeddings and labels that real_embeddings.py saved in `folder`. If given, all other
            arguments except `per_class` are ignored.
    """

    folder: ClassVar[Path] = Path()

    per_class: int = 4
    latent: int = 24
    shared: bool = True
    r_at_1: float | None = 0.95
    file: str | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"{Path(self.file).stem}, {self.per_class} per class"
        direction = "shared direction" if self.shared else "no shared direction"
        return f"latent {self.latent}, {direction}, r@1 {self.r_at_1}, {self.per_class} per class"

    @lru_cache(maxsize=2)  # noqa: B019 - the instances are frozen, and consecutive cases use the same embeddings
    def make(self, batch: int, dimensions: int = 512, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return a batch of complete classes and its labels. Real embeddings may be fewer than requested."""
        batch -= batch % self.per_class
        if self.file is not None:
            return self._real(batch)
        labels = torch.arange(batch) // self.per_class
        if self.r_at_1 is None:
            return self._clusters(batch, dimensions, None, seed), labels
        easy, hard = 0.0, 8.0  # spreads of a class around its centre that enclose the one with the requested r@1
        for _ in range(12):
            middle = (easy + hard) / 2
            if r_at_1(self._clusters(batch, dimensions, middle, seed), labels) >= self.r_at_1:
                easy = middle
            else:
                hard = middle
        return self._clusters(batch, dimensions, easy, seed), labels

    def _clusters(self, batch: int, dimensions: int, spread: float | None, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        latent = torch.randn(batch, self.latent, generator=generator)
        if spread is not None:
            centres = torch.randn(batch // self.per_class, self.latent, generator=generator)
            latent = centres.repeat_interleave(self.per_class, dim=0) + spread * latent
        latent = latent / self.latent**0.5
        if self.shared:
            latent = torch.cat((torch.full((batch, 1), SHARED), latent), dim=1)
        used = min(latent.shape[1], dimensions)
        basis = torch.linalg.qr(torch.randn(dimensions, used, generator=generator)).Q
        return torch.nn.functional.normalize(latent[:, :used] @ basis.T)

    def _real(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return the first `per_class` images of as many classes as fit into the batch."""
        saved = torch.load(self.folder / self.file, weights_only=True)
        order = saved["labels"].argsort(stable=True)
        labels = saved["labels"][order]
        number = torch.arange(len(labels)) - torch.searchsorted(labels, labels)  # position of each image in its class
        complete = torch.bincount(labels)[labels] >= self.per_class
        chosen = order[(number < self.per_class) & complete][:batch]
        return torch.nn.functional.normalize(saved["vectors"][chosen].float()), saved["labels"][chosen]


STAGES = {
    "trained": Embeddings(r_at_1=0.95),
    "half-trained": Embeddings(r_at_1=0.5),
    "untrained": Embeddings(latent=512, shared=False, r_at_1=None),
}


def r_at_1(vectors: Tensor, labels: Tensor, queries: int = 1000) -> float:
    """Compute the share of about `queries` queries whose nearest neighbour is of their class."""
    rows = torch.arange(0, len(vectors), max(len(vectors) // queries, 1))
    similarities = vectors[rows] @ vectors.T
    similarities[torch.arange(len(rows)), rows] = -torch.inf
    return (labels[similarities.argmax(1)] == labels[rows]).double().mean().item()
