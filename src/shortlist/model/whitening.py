"""Whitening learned from features, as the start of a linear layer: PCA, or from pairs that match.

Each gives the weight and the bias of an affine map of features. Computed in float64.

Shrinkage s replaces a covariance C by (1 - s) C + s v 1, where v is the mean variance. The smallest of many variances
are mostly chance, and whitening divides by their roots: with 0, which is whitening in the strict sense, it takes far
more features than dimensions not to do harm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shortlist.errors import ModelError

ROUNDING = 1e-12  # a variance below this share of the largest is nothing but rounding


def pca_whitening(features: Tensor, dim: int, shrinkage: float) -> tuple[Tensor, Tensor]:
    """The map after which features have mean 0 and, without shrinkage, covariance 1.

    Args:
        features: (n, d).
        dim: how many directions are kept, those of largest variance; at most d, and less than n.
        shrinkage: from 0 to 1.

    Returns:
        weight (dim, d) and bias (dim,), in the features' dtype.

    Raises:
        ModelError: there are too few features, or they span fewer than `dim` directions.

    >>> features = torch.randn(100, 3) @ torch.randn(3, 3)
    >>> weight, bias = pca_whitening(features, dim=2, shrinkage=0)
    >>> torch.allclose((features @ weight.T + bias).T.cov(correction=0), torch.eye(2), atol=1e-3)
    True
    """
    exact = _checked(features, dim)
    mean = exact.mean(0)
    whitened = _whitened(_covariance(exact - mean), dim, shrinkage)
    return _affine(whitened, mean, features)


def pair_whitening(features: Tensor, labels: Tensor, dim: int, shrinkage: float) -> tuple[Tensor, Tensor]:
    """The map after which differences within a class have, without shrinkage, covariance 1.

    So what differs between images that match counts little (Mikolajczyk and Matas 2007). Of that space, a PCA of all
    features keeps some directions (Radenovic et al. 2019).

    Args:
        features: (n, d).
        labels: (n,). Each feature makes a pair with every other of its label; each counts the same, however many these
            are. One without any serves the PCA alone.
        dim: how many directions are kept, those of largest variance; at most d, and less than n.
        shrinkage: from 0 to 1, of the covariance of differences.

    Returns:
        weight (dim, d) and bias (dim,), in the features' dtype.

    Raises:
        ModelError: there are too few features, or no pair; or, without shrinkage, differences do not span d directions.
    """
    exact = _checked(features, dim)
    mean = exact.mean(0)
    within = _differences_covariance(exact, labels)
    whitened = _whitened(within, len(within), shrinkage)
    _, rotation = _principal(_covariance((exact - mean) @ whitened.T), dim)
    return _affine(rotation @ whitened, mean, features)


def check_sizes(number: int, channels: int, dim: int) -> None:
    """Raise ModelError if so many features of so many channels cannot be whitened to `dim`."""
    if dim > channels:
        raise ModelError(
            f"whitening turns {channels} channels into at most as many dimensions, not into {dim}: use a smaller dim"
        )
    if dim >= number:
        raise ModelError(
            f"whitening to {dim} dimensions needs more than {dim} images, and there are {number}: "
            "use more images, or a smaller dim"
        )


def _checked(features: Tensor, dim: int) -> Tensor:
    """In float64."""
    number, channels = features.shape
    check_sizes(number, channels, dim)
    if not features.isfinite().all():
        raise ModelError("whitening cannot be learned: there are features that are not finite numbers")
    return features.double()


def _differences_covariance(features: Tensor, labels: Tensor) -> Tensor:
    """The mean over images, then over the others of the image's class, of (x - x')(x - x')^T: (d, d).

    A class of m adds up to 2 m / (m - 1) times the scatter around its mean: no pair has to be made.
    """
    _, classes, sizes = torch.unique(labels.to(features.device), return_inverse=True, return_counts=True)
    paired = int(sizes[sizes > 1].sum())
    if not paired:
        raise ModelError("whitening from pairs needs images of one class, and each image here is alone in its class")
    means = torch.zeros(len(sizes), features.shape[1]).to(features).index_add_(0, classes, features) / sizes[:, None]
    weights: Tensor = 2 * sizes / (sizes - 1).clamp(min=1)  # one that is alone is its own mean, and gives 0
    centred = (features - means[classes]) * weights.to(features)[classes].sqrt()[:, None]
    scatter: Tensor = centred.T @ centred
    return scatter / paired


def _covariance(centred: Tensor) -> Tensor:
    return centred.T @ centred / len(centred)


def _whitened(covariance: Tensor, dim: int, shrinkage: float) -> Tensor:
    """The map (dim, d) that makes a covariance 1, in its main directions."""
    mean = covariance.diagonal().mean()
    shrunk = covariance * (1 - shrinkage) + torch.eye(len(covariance)).to(covariance) * (mean * shrinkage)
    variances, directions = _principal(shrunk, dim)
    spanned = int((variances > ROUNDING * variances[0]).sum())
    if spanned < dim:
        raise ModelError(
            f"whitening cannot be learned: the features vary in {spanned} directions, and {dim} are needed; use more "
            "images, or shrinkage"
        )
    return directions / variances.sqrt()[:, None]


def _principal(covariance: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest variances (dim,), falling, and their directions (dim, d)."""
    variances, directions = torch.linalg.eigh(covariance)
    return variances.flip(0)[:dim], directions.flip(1)[:, :dim].T


def _affine(weight: Tensor, mean: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (x - mean) as weight x + bias."""
    return weight.to(features), -(weight @ mean).to(features)
