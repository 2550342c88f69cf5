"""Combine the embeddings of an image at several scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from shortlist.errors import ModelError
from shortlist.model.embedder import Embedder
from shortlist.model.pooling import GeM


class MultiScale(nn.Module):
    """Multi-scale embedding: v = (mean of v_s^m)^(1/m) over the scales s, then L2 normalisation.

    m is the exponent p of GeM if the embeddings are the output of GeM, which is positive. After a linear layer or a
    layer norm, values can be negative, and m = 1.

    Args:
        embedder: Embedder that is applied at each scale.
        scales: Factors of width and height, such as (1, sqrt 2, 1 / sqrt 2).

    Shapes:
        (B, 3, H, W) -> (B, d), as for the embedder. Images are normalised first, then resized bilinearly.

    Raises:
        ModelError: `scales` is empty, or a scale is not positive.

    Example:
        >>> embedder = Embedder("test_resnet", dim=8).eval()
        >>> MultiScale(embedder, (1, 2**0.5, 2**-0.5))(torch.zeros(2, 3, 64, 48, dtype=torch.uint8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, embedder: Embedder, scales: Sequence[float]) -> None:
        super().__init__()
        if not scales or not all(0 < scale < math.inf for scale in scales):
            raise ModelError(f"scales must be one or more positive numbers, not {list(scales)}.")
        self.embedder, self.scales = embedder, tuple(float(scale) for scale in scales)

    @property
    def power(self) -> float:
        """The exponent m."""
        exponent = self._exponent
        return 1.0 if exponent is None else exponent.item()

    @property
    def _exponent(self) -> Tensor | None:
        """The exponent m as a tensor, which can be exported, or None for m = 1."""
        config, pooling = self.embedder.config, self.embedder.pooling
        positive = config.dim is None and not config.layer_norm
        return pooling.p if positive and isinstance(pooling, GeM) else None

    def forward(self, images: Tensor) -> Tensor:
        images = self.embedder.normalise(images)
        vectors = torch.stack([self.embedder(_resized(images, scale)) for scale in self.scales])
        return functional.normalize(_power_mean(vectors, self._exponent), dim=1)


def _resized(images: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return images
    size = [torch.sym_max(1, torch.sym_int(side * scale)) for side in images.shape[2:]]  # symbolic in an export
    return functional.interpolate(images, size, mode="bilinear", align_corners=False)  # type: ignore[arg-type]


def _power_mean(vectors: Tensor, power: Tensor | None) -> Tensor:
    """Compute (mean of v^m)^(1/m) over the first dimension, relative to the maximum to prevent underflow."""
    if power is None:
        return vectors.mean(0)
    largest = vectors.amax(0).clamp(min=torch.finfo(vectors.dtype).tiny)
    return (vectors / largest).pow(power).mean(0).pow(1 / power) * largest
