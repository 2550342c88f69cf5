"""Models, losses and heads as a user would write them, and the text of a module for commands in other processes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shortlist.ranking import Ranks


class Net(nn.Module):
    """Maps images to vectors that are not normalised."""

    def __init__(self, dim: int = 6, width: int = 8) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 5, stride=4)
        self.norm = nn.BatchNorm2d(width)
        self.linear = nn.Linear(width * 4, dim)

    def forward(self, images: Tensor) -> Tensor:
        maps = torch.relu(self.norm(self.convolution(images)))
        return self.linear(nn.functional.adaptive_avg_pool2d(maps, 2).flatten(1))


def build(dim: int, width: int = 8) -> Net:
    return Net(dim, width)


def pull(embeddings: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """Similarity to other classes minus similarity within the class."""
    similarities, same = embeddings @ embeddings.T, labels[:, None] == labels
    return scale * (similarities[~same].mean() - similarities[same].mean())


class Proxies(nn.Module):
    """A proxy per class: has weights, needs the number of classes, and labels below it. Counts its calls."""

    def __init__(self, num_classes: int, embedding_size: int, scale: float = 5.0) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(num_classes, embedding_size)), scale
        self.calls = torch.zeros((), dtype=torch.long)  # state that is neither a parameter nor a buffer

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        scores = embeddings @ nn.functional.normalize(self.weight, dim=1).T
        return nn.functional.cross_entropy(self.scale * scores, labels)


class ReciprocalRank:
    """A head: 1 - the mean over the positives of 1 / rank**power."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def __call__(self, ranks: Ranks) -> Tensor:
        return 1 - (ranks.present / ranks.overall**self.power).sum(1) / ranks.number

    def reach(self, width: float) -> float:
        return math.inf


NUMBER = 3
