"""The head of an embedder: the layers after the pooling, which are trained alone if the backbone is frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shortlist.ranking.precision import computed_dtype, no_autocast


class Head(nn.Module):
    """Maps pooled features (B, channels) to unit vectors (B, d): layer norm or L2, linear layer, L2.

    Args:
        layer_norm: Layer norm, or the identity.
        linear: Linear layer, or the identity.
        l2_pooled: Whether to L2-normalise the input of the linear layer.
    """

    def __init__(self, layer_norm: nn.Module, linear: nn.Module, l2_pooled: bool = False) -> None:
        super().__init__()
        self.layer_norm, self.linear, self.l2_pooled = layer_norm, linear, l2_pooled

    def forward(self, pooled: Tensor) -> Tensor:
        return head_vectors(self.layer_norm, self.linear, self.l2_pooled, pooled)

    def linear_input(self, pooled: Tensor) -> Tensor:
        """Compute the input of the linear layer."""
        return linear_input(self.layer_norm, self.l2_pooled, pooled)


class CorrectedLinear(nn.Module):
    """Linear layer whose weight is a fixed matrix plus a trained correction: W0 + D, or W0 + A B of rank r.

    The correction is 0 initially. Weight decay therefore pulls the weight towards W0 instead of 0.

    Args:
        linear: Layer whose weight is W0. Its bias is trained.
        rank: The rank r of a product A B; None for a matrix D of any rank.

    Example:
        >>> layer = CorrectedLinear(nn.Linear(6, 4), rank=2)
        >>> sum(parameter.numel() for parameter in layer.parameters())  # A, B and the bias
        24
    """

    initial: Tensor

    def __init__(self, linear: nn.Linear, rank: int | None = None) -> None:
        super().__init__()
        dim, channels = linear.weight.shape
        self.register_buffer("initial", linear.weight.detach().clone())
        self.bias = linear.bias
        self.left = nn.Parameter(torch.zeros(dim, channels if rank is None else rank))  # D, or A
        self.right = None if rank is None else nn.Parameter(torch.randn(rank, channels) / channels**0.5)  # B

    @property
    def weight(self) -> Tensor:
        """The weight (d, channels)."""
        return self.initial + (self.left if self.right is None else self.left @ self.right)

    def forward(self, pooled: Tensor) -> Tensor:
        return functional.linear(pooled, self.weight, self.bias)

    def merged(self) -> nn.Linear:
        """Return an ordinary layer with a copy of the weight and bias."""
        dim, channels = self.initial.shape
        layer = nn.Linear(channels, dim, device="meta")  # without initial weights, which would draw random numbers
        tensors = {"weight": self.weight.detach(), "bias": self.bias.detach().clone()}
        layer.load_state_dict(tensors, assign=True)
        return layer


def head_vectors(layer_norm: nn.Module, linear: nn.Module, l2_pooled: bool, pooled: Tensor) -> Tensor:
    """Map pooled features (B, channels) to unit vectors (B, d)."""
    with no_autocast(pooled.device):  # small differences between vectors decide ranks
        vectors: Tensor = linear(linear_input(layer_norm, l2_pooled, pooled))
        return functional.normalize(vectors.to(computed_dtype(vectors)), dim=1)


def linear_input(layer_norm: nn.Module, l2_pooled: bool, pooled: Tensor) -> Tensor:
    """Normalise pooled features (B, channels) for the linear layer."""
    with no_autocast(pooled.device):
        normalised: Tensor = layer_norm(pooled)
        return functional.normalize(normalised, dim=1) if l2_pooled else normalised
