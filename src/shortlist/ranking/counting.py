"""Smooth counting: how many items stand ahead of a threshold when the step function is a sigmoid.

This is where the time of a ranking loss goes. Two ways to the same numbers: every sigmoid, or only those in the band
where a sigmoid is not yet flat.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Ahead(Protocol):
    """How many of the N items of each row stand ahead of each of its P thresholds, smoothly."""

    counts: Tensor  # (T, P) sum over the items of sigmoid((item - threshold) * scale)
    slopes: Tensor  # (T, P) sum over the items of that sigmoid's derivative by its argument

    def spread(self, weights: Tensor) -> Tensor:
        """Gradient of sum(weights * counts) at the items, (T, N), but for the factor `scale`."""
        ...


def soft_steps(items: Tensor, thresholds: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Counts and slopes (T, P) of items (T, N) against thresholds (T, P), and each item's own slope (T, P, N)."""
    soft = (items.unsqueeze(1) - thresholds.unsqueeze(2)).mul_(scale).sigmoid_()
    slope = (1 - soft).mul_(soft)
    return soft.sum(-1), slope.sum(-1), slope


class Everything:
    """Every item against every threshold: shapes do not depend on the data, so this is the way of GPUs.

    Args:
        steps: `soft_steps`, or what `compiled_steps` made of it.
    """

    def __init__(self, items: Tensor, thresholds: Tensor, scale: float, steps: Callable[..., tuple[Tensor, ...]]):
        self.counts, self.slopes, self._slope = steps(items, thresholds, scale)

    def spread(self, weights: Tensor) -> Tensor:
        return torch.bmm(weights.unsqueeze(1), self._slope).squeeze(1)


class EachOther(Everything):
    """The thresholds of a row against each other, itself and padding left out: ranks among the positives alone."""

    def __init__(self, thresholds: Tensor, present: Tensor, scale: float):
        items = thresholds.masked_fill(~present, -torch.inf)
        counts, _, self._slope = soft_steps(items, thresholds, scale)
        self._slope.diagonal(dim1=1, dim2=2).zero_()
        self.counts, self.slopes = counts - 0.5 * present, self._slope.sum(-1)  # sigmoid(0) = 0.5 is itself


class Band:
    """Only the items marked in `near`, (T, N): those so far below every threshold that they count nothing are left out."""

    def __init__(self, items: Tensor, thresholds: Tensor, scale: float, near: Tensor):
        self._shape = items.shape
        self._place = near.view(-1).nonzero().squeeze(1)
        self._lengths = near.sum(1)
        self._row = torch.repeat_interleave(self._lengths)
        soft = (items.view(-1)[self._place].unsqueeze(1) - thresholds[self._row]).mul_(scale).sigmoid_()
        self._slope = (1 - soft).mul_(soft)
        self.counts, self.slopes = self._sum_rows(soft), self._sum_rows(self._slope)

    def _sum_rows(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=self._lengths, axis=0, unsafe=True)

    def spread(self, weights: Tensor) -> Tensor:
        gradient = weights.new_zeros(self._shape)
        gradient.view(-1)[self._place] = self._slope.mul_(weights[self._row]).sum(1)
        return gradient


class _Compiled:
    """`soft_steps` fused by torch.compile at its first use; the plain one, with one warning, where that does not work."""

    def __init__(self) -> None:
        self._steps: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(self, items: Tensor, thresholds: Tensor, scale: float) -> tuple[Tensor, ...]:
        if self._steps is None:
            self._steps = torch.compile(soft_steps, dynamic=True)
        try:
            return self._steps(items, thresholds, scale)
        except Exception as error:  # whatever a missing or broken compiler raises: the plain steps need none
            if self._steps is soft_steps:
                raise
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"torch.compile does not work here, going on without it: {reason}", stacklevel=2)
            self._steps = soft_steps
            return soft_steps(items, thresholds, scale)


compiled_steps = _Compiled()
