"""Whitening learned from features, to initialise a linear layer: by PCA, or from matching pairs.

Both functions return the weight and bias of an affine map, and compute in float64.

Shrinkage s replaces a covariance C by (1 - s) C + s v I, where v is the mean variance. The smallest of many estimated
variances are mostly noise, and whitening divides by their square roots. Without shrinkage (s = 0, whitening in the
strict sense), whitening is harmful unless there are far more features than dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shortlist.errors import ModelError

ROUNDING = 1e-12  # variances below this fraction of the largest are rounding errors


def pca_whitening(features: Tensor, dim: int, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Learn the map after which features have mean 0 and, without shrinkage, identity covariance.

    Args:
        features: Features (n, d).
        dim: Number of directions to keep, those of largest variance; at most d, and less than n.
        shrinkage: Shrinkage of the covariance, from 0 to 1.

    Returns:
        Weight (dim, d) and bias (dim,), in the dtype of the features.

    Raises:
        ModelError: There are too few features, or they span fewer than `dim` directions.

    Example:
        >>> features = torch.randn(100, 3) @ torch.randn(3, 3)
        >>> weight, bias = pca_whitening(features, dim=2, shrinkage=0)
        >>> torch.allclose((features @ weight.T + bias).T.cov(correction=0), torch.eye(2), atol=1e-3)
        True
    """
    exact = _validate(features, dim)
    mean = exact.mean(0)
    whitened = _whitening(_covariance(exact - mean), dim, shrinkage)
    return _affine(whitened, mean, features)


def pair_whitening(features: Tensor, labels: Tensor, dim: int, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Learn the map after which differences within a class have, without shrinkage, identity covariance.

    Directions in which matching images differ then count little (Mikolajczyk and Matas 2007). A PCA of all features in
    the whitened space selects the directions to keep (Radenovic et al. 2019).

    Args:
        features: Features (n, d).
        labels: Class labels (n,). Each feature forms pairs with all others of its class, and all features have the same
            weight regardless of the size of the class. A feature that is alone in its class is used by the PCA only.
        dim: Number of directions to keep, those of largest variance; at most d, and less than n.
        shrinkage: Shrinkage of the covariance of differences, from 0 to 1.

    Returns:
        Weight (dim, d) and bias (dim,), in the dtype of the features.

    Raises:
        ModelError: There are too few features, or no pair; or, without shrinkage, the differences do not span d
            directions.
    """
    exact = _validate(features, dim)
    mean = exact.mean(0)
    within = _differences_covariance(exact, labels)
    whitened = _whitening(within, len(within), shrinkage)
    _, rotation = _principal(_covariance((exact - mean) @ whitened.T), dim)
    return _affine(rotation @ whitened, mean, features)


def check_sizes(number: int, channels: int, dim: int) -> None:
    """Raise a ModelError if `number` features with `channels` channels cannot be whitened to `dim` dimensions."""
    if dim > channels:
        raise ModelError(f"Whitening cannot turn {channels} channels into {dim} dimensions: use at most {channels}.")
    if dim >= number:
        raise ModelError(
            f"Whitening to {dim} dimensions requires more than {dim} images, but there are {number}: "
            "use more images, or a smaller dim."
        )


def _validate(features: Tensor, dim: int) -> Tensor:
    """Validate features, and convert them to float64."""
    number, channels = features.shape
    check_sizes(number, channels, dim)
    if not features.isfinite().all():
        raise ModelError("Whitening cannot be learned: some features are not finite.")
    return features.double()


def _differences_covariance(features: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean of (x - x')(x - x')^T over images x, and over the other images x' of its class: (d, d).

    For a class of m images this is 2 m / (m - 1) times the scatter around its mean, so pairs need not be formed.
    """
    _, classes, sizes = torch.unique(labels.to(features.device), return_inverse=True, return_counts=True)
    paired = int(sizes[sizes > 1].sum())
    if not paired:
        raise ModelError(
            "Whitening from pairs requires classes with at least two images, but every image is alone in its class."
        )
    means = torch.zeros(len(sizes), features.shape[1]).to(features).index_add_(0, classes, features) / sizes[:, None]
    weights: Tensor = 2 * sizes / (sizes - 1).clamp(min=1)  # a class of one has scatter 0
    centred = (features - means[classes]) * weights.to(features)[classes].sqrt()[:, None]
    scatter: Tensor = centred.T @ centred
    return scatter / paired


def _covariance(centred: Tensor) -> Tensor:
    return centred.T @ centred / len(centred)


def _whitening(covariance: Tensor, dim: int, shrinkage: float) -> Tensor:
    """Return the map (dim, d) that whitens a covariance in its principal directions."""
    mean = covariance.diagonal().mean()
    shrunk = covariance * (1 - shrinkage) + torch.eye(len(covariance)).to(covariance) * (mean * shrinkage)
    variances, directions = _principal(shrunk, dim)
    spanned = int((variances > ROUNDING * variances[0]).sum())
    if spanned < dim:
        raise ModelError(
            f"Whitening cannot be learned: the features vary in {spanned} directions only, but {dim} are required; use "
            "more images, or shrinkage."
        )
    return directions / variances.sqrt()[:, None]


def _principal(covariance: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the largest variances (dim,) in descending order, and their directions (dim, d)."""
    variances, directions = torch.linalg.eigh(covariance)
    return variances.flip(0)[:dim], directions.flip(1)[:, :dim].T


def _affine(weight: Tensor, mean: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Write weight (x - mean) as weight x + bias."""
    return weight.to(features), -(weight @ mean).to(features)
