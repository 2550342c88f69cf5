"""Initialise the linear layer by whitening, which is learned from training images before the first step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.config import RunConfig
from shortlist.data import Catalog, FitTransform, TestTransform, Transform
from shortlist.encoding import embed_images
from shortlist.encoding.feature_cache import PooledFeatures
from shortlist.model import Embedder, pair_whitening, pca_whitening
from shortlist.model.whitening import check_sizes
from shortlist.progress import Progress
from shortlist.seeds import derived_seed
from shortlist.training.components import build_transforms


def check_whitening(config: RunConfig, embedder: Embedder, train: Catalog) -> None:
    """Raise a ModelError if the configuration requires whitening but there are too few images or channels for it."""
    model = config.model
    if model.whitening != "none" and model.dim is not None:
        number = len(train) * (config.data.number_of_views if config.frozen else 1)
        check_sizes(min(number, model.whitening_images), embedder.layout.channels, model.dim)


def learn_whitening(
    config: RunConfig,
    embedder: Embedder,
    train: Catalog,
    workers: int = 0,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Learn the weight and bias of the linear layer from pooled features, as `config.model.whitening` specifies.

    Args:
        config: Configuration of the run.
        embedder: Embedder whose linear layer will be initialised.
        train: Training images. At most `model.whitening_images` of them are used.
        workers: Number of decoding processes.
        batch_size: Number of images per forward pass.
        progress: Called with the number of images that are done and their total.

    Returns:
        Weight (dim, channels) and bias (dim,).

    Raises:
        ModelError: Whitening cannot be learned from these images.
    """
    model = config.model
    seed = derived_seed("whitening", config.training.seed)
    images = train.subset(sample_images(train.labels, model.whitening_images, seed))
    _, test = build_transforms(config, embedder)
    transform = test if model.whitening_size is None else _resized(test, model.whitening_size)
    network = PooledFeatures(embedder)
    pooled = embed_images(network, images, transform, batch_size=batch_size, workers=workers, progress=progress)
    return whiten(config, linear_input(embedder, pooled), torch.from_numpy(images.labels.copy()))


def linear_input(embedder: Embedder, pooled: Tensor) -> Tensor:
    """Compute the input of the linear layer from pooled features (n, channels), on the CPU."""
    with torch.no_grad():
        return embedder.head().linear_input(pooled.to(embedder.mean.device)).cpu()


def whiten(config: RunConfig, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Learn whitening from features (n, channels) with labels (n,); see `learn_whitening`."""
    model = config.model
    assert model.dim is not None
    if model.whitening == "pca":
        return pca_whitening(features, model.dim, model.whitening_shrinkage)
    return pair_whitening(features, labels, model.dim, model.whitening_shrinkage)


def sample_images(labels: NDArray[np.int64], number: int, seed: int) -> NDArray[np.int64]:
    """Sample images at random: two per class, then two more per class, and so on.

    This provides pairs even if there are many classes, and prevents large classes from dominating.

    Args:
        labels: Labels of all images (n,).
        number: Maximum number of images to sample.
        seed: Seed of the random order.

    Returns:
        Indices of the sampled images.
    """
    random = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=random).numpy()
    class_order = torch.randperm(int(labels.max()) + 1, generator=random).numpy()
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    classes = labels[by_class]
    within = np.arange(len(labels)) - np.searchsorted(classes, classes)
    chosen: NDArray[np.int64] = by_class[np.lexsort((class_order[classes], within // 2))[:number]]
    return chosen


def _resized(transform: Transform, size: int) -> Transform:
    """Return the transform for another image size."""
    if isinstance(transform, FitTransform):
        return replace(transform, max_side=size)
    assert isinstance(transform, TestTransform)
    return replace(transform, size=size, resize=round(transform.resize * size / transform.size))
