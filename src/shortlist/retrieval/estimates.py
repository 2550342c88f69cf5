"""Means over queries, with the interval that the number of queries leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DRAWS = 2**24  # of the bootstrap, alive at once


@dataclass(frozen=True)
class Estimate:
    """A mean over queries, and its 95 % interval (None where nobody asked for one)."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{100 * self.value:.1f}{interval}"


def estimates(names: Sequence[str], table: Tensor, bootstrap: int, seed: int) -> dict[str, Estimate]:
    """The mean of each named column of a (queries, columns) table, with its interval from `bootstrap` resamples."""
    table = table.double().cpu()
    means = table.mean(0).tolist()
    if not bootstrap:
        return {name: Estimate(mean) for name, mean in zip(names, means, strict=True)}
    low, high = _interval(table, bootstrap, seed).tolist()
    return {name: Estimate(*each) for name, *each in zip(names, means, low, high, strict=True)}


def _interval(table: Tensor, resamples: int, seed: int) -> Tensor:
    """The 2.5 and 97.5 % quantiles of the columns' means when rows are drawn with replacement, (2, columns)."""
    random = torch.Generator().manual_seed(seed)
    number = len(table)
    block = max(1, _DRAWS // number)
    means = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = torch.randint(number, (rows, number), generator=random)
        times = torch.zeros(rows, number, dtype=table.dtype).scatter_add_(1, drawn, torch.ones_like(drawn).double())
        means.append(times @ table / number)
    return torch.quantile(torch.cat(means), torch.tensor([0.025, 0.975], dtype=table.dtype), dim=0)
