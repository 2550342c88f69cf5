"""Whitening, compared with numpy and scipy: covariances after whitening, and errors if it cannot be learned."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.errors import ModelError
from shortlist.model.whitening import pair_whitening, pca_whitening


def some_features(classes: int = 12, each: int = 7, channels: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(n, d) in float64: classes around centres, stretched and far from the origin."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = 3 * torch.randn(classes, channels, generator=random, dtype=torch.float64)
    noise = torch.randn(len(labels), channels, generator=random, dtype=torch.float64)
    stretch = torch.randn(channels, channels, generator=random, dtype=torch.float64)
    return (centres[labels] + noise) @ stretch + 5, labels


def literal_pca(features: np.ndarray, dim: int, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """C = mean of (x - m)(x - m)^T, shrunk; rows e_i / sqrt(variance_i)."""
    mean = sum(features) / len(features)
    covariance = sum(np.outer(x - mean, x - mean) for x in features) / len(features)
    return mean, literal_map(covariance, shrinkage)[:dim]


def literal_pairs(features: np.ndarray, labels: list[int], dim: int, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """S = mean over images with a match of the mean over matches of (x - x')(x - x')^T; S^(-1/2), then PCA."""
    channels = features.shape[1]
    total, images = np.zeros((channels, channels)), 0
    for i, x in enumerate(features):
        matches = [y for j, y in enumerate(features) if j != i and labels[j] == labels[i]]
        if matches:
            total += sum(np.outer(x - y, x - y) for y in matches) / len(matches)
            images += 1
    within = total / images
    within = (1 - shrinkage) * within + shrinkage * np.trace(within) / channels * np.eye(channels)
    mean = features.mean(0)
    root = scipy.linalg.inv(scipy.linalg.sqrtm(within))  # any root does: the rotation after it undoes the choice
    whitened = (features - mean) @ root.T
    variances, directions = scipy.linalg.eigh(whitened.T @ whitened / len(whitened))
    return mean, (directions[:, np.argsort(-variances)].T @ root)[:dim]


def literal_map(covariance: np.ndarray, shrinkage: float) -> np.ndarray:
    channels = len(covariance)
    shrunk = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / channels * np.eye(channels)
    values, vectors = scipy.linalg.eigh(shrunk)
    return np.array([vectors[:, i] / np.sqrt(values[i]) for i in np.argsort(-values)])


def same_map(found: tuple[Tensor, Tensor], mean: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the sign of each direction, which nothing determines."""
    weight, bias = (part.numpy() for part in found)
    signs = np.sign((weight * expected).sum(1))
    np.testing.assert_allclose(weight * signs[:, None], expected, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(bias * signs, -expected @ mean, rtol=1e-7, atol=1e-9)


def applied(features: Tensor, found: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.linear(features, *found)


@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("dim", [6, 2])
def test_pca_equals_its_formula(dim: int, shrinkage: float) -> None:
    features, _ = some_features()
    same_map(pca_whitening(features, dim, shrinkage), *literal_pca(features.numpy(), dim, shrinkage))


@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("dim", [6, 2])
def test_pair_whitening_equals_its_formula(dim: int, shrinkage: float) -> None:
    features, labels = some_features()
    kept = torch.cat((torch.arange(50), torch.tensor([55, 83])))  # classes of 7, one of 1, and one of 1
    features, labels = features[kept], labels[kept]
    expected = literal_pairs(features.numpy(), labels.tolist(), dim, shrinkage)
    same_map(pair_whitening(features, labels, dim, shrinkage), *expected)


@given(seed=st.integers(0, 1000), channels=st.integers(1, 6), data=st.data())
@settings(max_examples=25)
def test_pca_gives_unit_covariance(seed: int, channels: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, channels))
    features, _ = some_features(channels=channels, seed=seed)
    white = applied(features, pca_whitening(features, dim, 0))
    torch.testing.assert_close(white.mean(0), torch.zeros(dim).double(), atol=1e-7, rtol=0)
    torch.testing.assert_close(torch.atleast_2d(white.T.cov(correction=0)), torch.eye(dim).double(), atol=1e-6, rtol=0)


@given(seed=st.integers(0, 1000), dim=st.integers(1, 6))
@settings(max_examples=25)
def test_pair_whitening_gives_unit_differences_within_classes(seed: int, dim: int) -> None:
    """Differences of matching pairs have covariance 1, and that of the features is diagonal and falls."""
    features, labels = some_features(seed=seed)
    white = applied(features, pair_whitening(features, labels, dim, 0))
    one, other = torch.nonzero((labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool), as_tuple=True)
    differences = white[one] - white[other]  # classes of one size: each pair counts the same
    torch.testing.assert_close(differences.T @ differences / len(one), torch.eye(dim).double(), atol=1e-6, rtol=0)
    covariance = torch.atleast_2d(white.T.cov(correction=0))
    variances = covariance.diagonal()
    torch.testing.assert_close(covariance, variances.diag(), atol=1e-6 * variances[0].item(), rtol=0)
    assert (variances.diff() <= 0).all()


def test_shuffling_changes_nothing() -> None:
    features, labels = some_features()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    for learn in (lambda x, _: pca_whitening(x, 3, 0.1), lambda x, y: pair_whitening(x, y, 3, 0.1)):
        torch.testing.assert_close(
            applied(features, learn(features, labels)).abs(),
            applied(features, learn(features[order], labels[order])).abs(),
        )


def test_other_labels_give_other_whitening() -> None:
    features, labels = some_features()
    one, other = (applied(features, pair_whitening(features, each, 3, 0)) for each in (labels, labels.roll(3)))
    assert (one.abs() - other.abs()).abs().max() > 0.1


def test_pairs_ignore_what_differs_within_classes() -> None:
    """A direction of much noise and no class is the first of a PCA, and has no part in the first one here."""
    features, labels = some_features()
    noise = torch.randn(len(labels), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    features[:, 0] = 1000 * noise
    first_of_pca, first = (
        applied(features, found)[:, 0]
        for found in (pca_whitening(features, 5, 0), pair_whitening(features, labels, 5, 0))
    )
    assert torch.corrcoef(torch.stack((first_of_pca, noise)))[0, 1].abs() > 0.99
    assert torch.corrcoef(torch.stack((first, noise)))[0, 1].abs() < 0.3


def test_float32_in_and_out() -> None:
    features, labels = some_features()
    exact = pair_whitening(features.float().double(), labels, 4, 0.1)
    found = pair_whitening(features.float(), labels, 4, 0.1)
    assert [part.dtype for part in found] == [torch.float32] * 2
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.float())


def test_features_fewer_than_channels_need_shrinkage() -> None:
    features, labels = some_features(classes=5, each=3, channels=20)
    for learn in (lambda s: pca_whitening(features, 4, s), lambda s: pair_whitening(features, labels, 4, s)):
        white = applied(features, learn(0.1))
        assert white.isfinite().all()
        assert (white.norm(dim=1) > 1e-3).all()
    assert applied(features, pca_whitening(features, 4, 0)).isfinite().all()  # 15 features do for 4 directions
    with pytest.raises(
        ModelError, match="vary in 10 directions only, but 20 are required; use more images, or shrinkage"
    ):
        pair_whitening(features, labels, 4, 0)


@pytest.mark.parametrize(
    ("change", "dim", "message"),
    [
        (lambda x: x, 7, "6 channels into 7 dimensions"),
        (lambda x: x[:5], 5, "requires more than 5 images, but there are 5"),
        (lambda x: x / 0, 3, "not finite"),
        (lambda x: x * 0, 3, "vary in 0 directions"),
        (lambda x: x[:, :1].expand(-1, 6), 3, "vary in 1 directions only, but 3 are required"),
    ],
)
def test_invalid_features_are_refused(change: object, dim: int, message: str) -> None:
    features, labels = some_features()
    features = change(features)
    with pytest.raises(ModelError, match=message):
        pca_whitening(features, dim, 0)
    with pytest.raises(ModelError, match=message.replace("3 are", "6 are")):
        pair_whitening(features, labels[: len(features)], dim, 0)


def test_pair_whitening_requires_pairs() -> None:
    features, labels = some_features()
    with pytest.raises(ModelError, match="alone in its class"):
        pair_whitening(features, torch.arange(len(labels)), 3, 0.1)
