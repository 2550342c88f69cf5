"""Helpers shared by the tests of losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=random, dtype=dtype), dim=-1)


def clusters(
    classes: int, per_class: int, spread: float, dimensions: int = 16, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Unit vectors around class centres: spread 0.3 is a trained network, 3 hardly differs from noise."""
    centres = unit(classes, dimensions, seed=1, dtype=dtype).repeat_interleave(per_class, dim=0)
    noise = unit(classes * per_class, dimensions, seed=2, dtype=dtype)
    return torch.nn.functional.normalize(centres + spread * noise, dim=1)


def value_and_gradient(
    loss: Callable[..., Tensor], vectors: Tensor, *args: object, **options: object
) -> tuple[Tensor, Tensor]:
    leaf = vectors.detach().clone().requires_grad_()
    value = loss(leaf, *args, **options)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float = 1e-9) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def learned(loss: Callable[..., Tensor], steps: int = 60, rate: float = 0.05) -> tuple[float, float]:
    """r@1 of unseen toy items before and after a linear map has learned from others."""
    from shortlist.ranking import retrieval_metrics

    torch.manual_seed(0)
    centres = torch.randn(12, 4)

    def items(seed: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        labels = torch.arange(96) // 8
        signal = centres[labels] + 0.3 * torch.randn(96, 4, generator=random)
        return torch.cat((signal, 2 * torch.randn(96, 16, generator=random)), 1), labels

    model = torch.nn.Linear(20, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def embed(images: Tensor) -> Tensor:
        return torch.nn.functional.normalize(model(images), dim=1)

    def r_at_1() -> float:
        images, labels = items(10**6)
        return retrieval_metrics(embed(images), labels, k=1)["r@1"]

    before = r_at_1()
    for step in range(steps):
        images, labels = items(step)
        optimizer.zero_grad()
        loss(embed(images), labels).backward()
        optimizer.step()
    return before, r_at_1()
