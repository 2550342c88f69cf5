"""Embeddings as a network gives them at three stages of its training, to time a loss where it will be used."""

from __future__ import annotations

import torch
from torch import Tensor

STAGES = {"trained": 0.95, "half-trained": 0.5, "untrained": None}
"""Stage -> r@1 of the batch, None for whatever chance gives."""

PER_CLASS = 4
LATENT = 24  # dimensions that a trained network uses of its 512: negatives spread by about 0.2, not by 1 / sqrt(512)
SHARED = 0.5  # a direction that all images share, as in real embeddings: negatives are not orthogonal on average


def embeddings(batch: int, stage: str, dimensions: int = 512, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of unit vectors, (batch, dimensions), and its labels, four of a class, for a stage of training."""
    labels = torch.arange(batch) // PER_CLASS
    generator = torch.Generator().manual_seed(seed)
    target = STAGES[stage]
    if target is None:
        return torch.nn.functional.normalize(torch.randn(batch, dimensions, generator=generator)), labels
    easy, hard = 0.0, 4.0  # spread of a class around its centre, between which the wanted r@1 lies
    for _ in range(12):
        middle = (easy + hard) / 2
        if r_at_1(_clusters(batch, dimensions, middle, seed)) > target:
            easy = middle
        else:
            hard = middle
    return _clusters(batch, dimensions, easy, seed), labels


def r_at_1(vectors: Tensor, queries: int = 2000) -> float:
    """Share of (up to 2000) queries whose nearest neighbour is of their class."""
    rows = torch.arange(0, len(vectors), max(len(vectors) // queries, 1))
    similarities = vectors[rows] @ vectors.T
    similarities[torch.arange(len(rows)), rows] = -torch.inf
    return (similarities.argmax(1) // PER_CLASS == rows // PER_CLASS).double().mean().item()


def _clusters(batch: int, dimensions: int, spread: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(batch // PER_CLASS, LATENT, generator=generator).repeat_interleave(PER_CLASS, dim=0)
    latent = (centres + spread * torch.randn(batch, LATENT, generator=generator)) / LATENT**0.5
    latent = torch.cat((torch.full((batch, 1), SHARED), latent), dim=1)
    basis = torch.linalg.qr(torch.randn(dimensions, LATENT + 1, generator=generator)).Q
    return torch.nn.functional.normalize(latent @ basis.T)
