"""From features to one vector an image: GeM and its friends.

Each takes feature maps (B, C, H, W) or tokens (B, N, C) and returns (B, C).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class GeM(nn.Module):
    """Generalised mean: (mean of x^p)^(1/p) over the positions; p = 1 is the average, a large p nears the maximum.

    Computed in float32 at least. Each channel is divided by its largest value before the power and multiplied by it
    after, which changes neither value nor gradient (the mean is homogeneous) and lets no power over- or underflow: a
    dead channel with a large p would otherwise give a gradient of 0 * inf.

    Args:
        p: the exponent, where it starts.
        eps: values below it are raised to it, since the power is of positive numbers.
        learnable: train p; otherwise it is a buffer.

    Example:
        >>> GeM(p=2)(torch.tensor([[[1.0], [7.0]]])).item()  # one image, two tokens of one channel: sqrt((1 + 49) / 2)
        5.0
    """

    p: Tensor

    def __init__(self, p: float = 3.0, eps: float = 1e-6, learnable: bool = True):
        super().__init__()
        if not p > 0 or not eps > 0:
            raise ValueError(f"GeM's p and eps must be positive, not {p} and {eps}")
        start = torch.full((1,), float(p))  # not a scalar: sharded training refuses those
        if learnable:
            self.p = nn.Parameter(start)
        else:
            self.register_buffer("p", start)
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        positions = _positions(features)
        values = _float32_at_least(features).clamp(min=self.eps)
        p = self.p.to(values.dtype)
        largest = values.detach().amax(positions, keepdim=True)
        mean = (values / largest).pow(p).mean(positions)
        return mean.pow(1 / p) * largest.view_as(mean)

    def extra_repr(self) -> str:
        return f"p={self.p.item():.4g}, eps={self.eps:g}, learnable={isinstance(self.p, nn.Parameter)}"


class Average(nn.Module):
    """The mean over the positions, in float32 at least."""

    def forward(self, features: Tensor) -> Tensor:
        return _float32_at_least(features).mean(_positions(features))


class Max(nn.Module):
    """The largest value over the positions."""

    def forward(self, features: Tensor) -> Tensor:
        return _float32_at_least(features).amax(_positions(features))


class ClassToken(nn.Module):
    """The first token: what a ViT was trained to summarise an image in."""

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim != 3:
            raise ValueError(f"a class token needs tokens (B, N, C), not features of shape {tuple(features.shape)}")
        return _float32_at_least(features[:, 0])


POOLINGS: Mapping[str, type[nn.Module]] = {"gem": GeM, "average": Average, "max": Max, "token": ClassToken}


def _positions(features: Tensor) -> tuple[int, ...]:
    """The dimensions to pool over."""
    if features.ndim == 4:
        return (2, 3)
    if features.ndim == 3:
        return (1,)
    raise ValueError(f"expected maps (B, C, H, W) or tokens (B, N, C), not features of shape {tuple(features.shape)}")


def _float32_at_least(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
