"""The linear layer's start: whitening learned from training images, once, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.config import RunConfig
from shortlist.data import Catalog, FitTransform, TestTransform, Transform
from shortlist.encoding import embed_images
from shortlist.model import Embedder, pair_whitening, pca_whitening
from shortlist.model.whitening import check_sizes
from shortlist.seeds import derived_seed
from shortlist.training.parts import build_transforms


def check_whitening(config: RunConfig, embedder: Embedder, train: Catalog) -> None:
    """Raise ModelError if whitening is asked for and there are too few images, or too few channels, for it."""
    model = config.model
    if model.whitening != "none" and model.dim is not None:
        check_sizes(min(len(train), model.whitening_images), embedder.layout.channels, model.dim)


def learn_whitening(
    config: RunConfig,
    embedder: Embedder,
    train: Catalog,
    workers: int = 0,
    at_once: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Weight and bias for the linear layer of an embedder, as `config.model.whitening` says, from its pooled features.

    Raises:
        ModelError: they cannot be learned from these images.
    """
    model = config.model
    assert model.dim is not None
    seed = derived_seed("whitening", config.training.seed)
    images = train.subset(drawn(train.labels, model.whitening_images, seed))
    _, test = build_transforms(config, embedder)
    transform = test if model.whitening_size is None else _of_size(test, model.whitening_size)
    pooled = _Pooled(embedder)
    features = embed_images(pooled, images, transform, batch_size=at_once, workers=workers, progress=progress)
    if model.whitening == "pca":
        return pca_whitening(features, model.dim, model.whitening_shrinkage)
    labels = torch.from_numpy(images.labels.copy())
    return pair_whitening(features, labels, model.dim, model.whitening_shrinkage)


def drawn(labels: NDArray[np.int64], number: int, seed: int) -> NDArray[np.int64]:
    """Indices of at most so many images: two of each class, then two more of each, and so on, in a random order.

    So there are pairs, however many classes there are, and large classes do not outweigh the others.
    """
    random = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=random).numpy()
    place = torch.randperm(int(labels.max()) + 1, generator=random).numpy()  # of each class in the order
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    classes = labels[by_class]
    within = np.arange(len(labels)) - np.searchsorted(classes, classes)
    chosen: NDArray[np.int64] = by_class[np.lexsort((place[classes], within // 2))[:number]]
    return chosen


def _of_size(transform: Transform, size: int) -> Transform:
    """The same for images of another size."""
    if isinstance(transform, FitTransform):
        return replace(transform, max_side=size)
    assert isinstance(transform, TestTransform)
    return replace(transform, size=size, resize=round(transform.resize * size / transform.size))


class _Pooled(nn.Module):
    """An embedder before its linear layer."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.pooled(images)
