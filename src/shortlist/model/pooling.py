"""Pooling layers: feature maps (B, C, H, W) or tokens (B, N, C) -> one vector per image (B, C)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shortlist.ranking.precision import computed_dtype


class GeM(nn.Module):
    """Generalised-mean pooling: (mean of x^p)^(1/p) over the positions.

    p = 1 is average pooling, and a large p approaches max pooling. Computed in float32 or higher precision. Each
    channel is divided by its maximum before the power and multiplied by it afterwards. This changes neither the value
    nor the gradient (the mean is homogeneous), and prevents overflow and underflow: without it, a dead channel and a
    large p would give a gradient of 0 * inf.

    Args:
        p: Initial exponent.
        eps: Lower bound to which the features are clamped, since the power requires positive numbers.
        learnable: Whether p is a parameter; otherwise it is a buffer.

    Example:
        >>> GeM(p=2)(torch.tensor([[[1.0], [7.0]]])).item()  # one image, two tokens of one channel: sqrt((1 + 49) / 2)
        5.0
    """

    p: Tensor

    def __init__(self, p: float = 3.0, eps: float = 1e-6, learnable: bool = True):
        super().__init__()
        if not p > 0 or not eps > 0:
            raise ValueError(f"GeM's p and eps must be positive, not {p} and {eps}.")
        start = torch.full((1,), float(p))  # not a scalar: sharded training does not support scalars
        if learnable:
            self.p = nn.Parameter(start)
        else:
            self.register_buffer("p", start)
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        positions = _positions(features)
        values = features.to(computed_dtype(features)).clamp(min=self.eps)
        p = self.p.to(values.dtype)
        largest = values.detach().amax(positions, keepdim=True)
        mean = (values / largest).pow(p).mean(positions)
        return mean.pow(1 / p) * largest.view_as(mean)

    def extra_repr(self) -> str:
        return f"p={self.p.item():.4g}, eps={self.eps:g}, learnable={isinstance(self.p, nn.Parameter)}"


class Average(nn.Module):
    """Average pooling, in float32 or higher precision."""

    def forward(self, features: Tensor) -> Tensor:
        return features.to(computed_dtype(features)).mean(_positions(features))


class Max(nn.Module):
    """Max pooling."""

    def forward(self, features: Tensor) -> Tensor:
        return features.to(computed_dtype(features)).amax(_positions(features))


class ClassToken(nn.Module):
    """The first token, in which a ViT was trained to summarise the image."""

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim != 3:
            raise ValueError(
                f"Pooling by class token requires tokens (B, N, C), not features of shape {tuple(features.shape)}."
            )
        return features[:, 0].to(computed_dtype(features))


POOLINGS: Mapping[str, type[nn.Module]] = {"gem": GeM, "average": Average, "max": Max, "token": ClassToken}


def _positions(features: Tensor) -> tuple[int, ...]:
    """Return the dimensions to pool over."""
    if features.ndim == 4:
        return (2, 3)
    if features.ndim == 3:
        return (1,)
    raise ValueError(f"Expected maps (B, C, H, W) or tokens (B, N, C), not features of shape {tuple(features.shape)}.")
