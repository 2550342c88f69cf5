"""Descriptors at several scales: the formula, and the models for which its exponent must be 1."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shortlist.errors import ModelError
from shortlist.model import Embedder, GeM, MultiScale

SCALES = (1.0, math.sqrt(2), 1 / math.sqrt(2))


def images(height: int = 64, width: int = 48) -> Tensor:
    return torch.randint(256, (3, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def literal(embedder: Embedder, pixels: Tensor, scales: tuple[float, ...], power: float) -> Tensor:
    """(mean of v_s^m)^(1/m), then L2: image by image, scale by scale, number by number."""
    result = []
    for image in pixels:
        normalised = (image[None] / 255 - embedder.mean) / embedder.std
        summed = torch.zeros(embedder.dim, dtype=torch.float64)
        for scale in scales:
            size = [math.floor(side * scale) for side in image.shape[1:]]
            resized = torch.nn.functional.interpolate(normalised, size=size, mode="bilinear")
            summed += embedder(resized)[0].double() ** power
        vector = (summed / len(scales)) ** (1 / power)
        result.append(vector / vector.square().sum().sqrt())
    return torch.stack(result)


@pytest.mark.parametrize(("dim", "layer_norm"), [(8, False), (8, True), (None, True)])
def test_vectors_with_signs_are_averaged(dim: int | None, layer_norm: bool) -> None:
    embedder = Embedder("test_resnet", dim=dim, layer_norm=layer_norm).eval()
    several = MultiScale(embedder, SCALES)
    with torch.no_grad():
        found = several(images())
        assert torch.allclose(found.double(), literal(embedder, images(), SCALES, 1.0), atol=1e-6)
        assert literal(embedder, images(), SCALES, 3.0).isnan().any()  # the mistake that the rule avoids
    assert several.power == 1
    assert found.isfinite().all()
    assert torch.allclose(found.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("p", [3.0, 2.4, 40.0])
def test_pooled_features_are_averaged_with_the_power_of_gem(p: float) -> None:
    embedder = Embedder("test_resnet", dim=None, layer_norm=False).eval()
    assert isinstance(embedder.pooling, GeM)
    embedder.pooling.p.data.fill_(p)
    several = MultiScale(embedder, SCALES)
    with torch.no_grad():
        found = several(images())
        assert torch.allclose(found.double(), literal(embedder, images(), SCALES, p), atol=1e-6)
        assert not torch.allclose(found.double(), literal(embedder, images(), SCALES, 1.0), atol=1e-4)
    assert several.power == pytest.approx(p)
    assert found.isfinite().all()


def test_average_pooling_has_no_power() -> None:
    assert MultiScale(Embedder("test_resnet", dim=None, layer_norm=False, pooling="average"), SCALES).power == 1


def test_one_scale_is_the_embedder_itself() -> None:
    embedder = Embedder("test_resnet", dim=8).eval()
    with torch.no_grad():
        assert torch.allclose(MultiScale(embedder, [1])(images()), embedder(images()), atol=1e-6)
        assert not torch.allclose(MultiScale(embedder, [0.5])(images()), embedder(images()), atol=1e-3)


def test_a_dead_channel_gives_no_nan() -> None:
    embedder = Embedder("test_resnet", dim=None, layer_norm=False).eval()
    embedder.pooling.p.data.fill_(30.0)  # 1e-6 ** 30 is 0 in float32
    with torch.no_grad():
        vectors = MultiScale(embedder, SCALES)(torch.zeros(2, 3, 32, 32))
    assert vectors.isfinite().all()


def test_small_images_keep_at_least_one_pixel() -> None:
    with torch.no_grad():
        assert MultiScale(Embedder("test_resnet", dim=4).eval(), [0.1])(images(4, 9)).isfinite().all()


@pytest.mark.parametrize("scales", [(), (0.0,), (1.0, -1.0), (math.inf,), (math.nan,)])
def test_impossible_scales_are_refused(scales: tuple[float, ...]) -> None:
    with pytest.raises(ModelError, match="scales must be"):
        MultiScale(Embedder("test_resnet", dim=4), scales)
