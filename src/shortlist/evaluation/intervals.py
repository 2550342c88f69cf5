"""Means over queries, with the interval that the number of queries leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 10_000  # behind a p-value, so that small ones can be told apart
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


@dataclass(frozen=True)
class Difference:
    """How much more one mean is than another over the same queries.

    Args:
        value: the difference of the means.
        low, high: its 95 % interval, from drawing queries with replacement, both results of a query together.
        p: how likely so large a difference, up or down, would be if there were none (two-sided).
    """

    value: float
    low: float
    high: float
    p: float

    @property
    def real(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{100 * self.value:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def paired_differences(
    names: Sequence[str], first: Tensor, second: Tensor, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Difference]:
    """For each named column of two (queries, columns) tables of the same queries: second - first, by paired bootstrap.

    A query that is hard for one is hard for the other as well, so the interval is narrower than those of the two means
    suggest. The p-value counts the resamples on the other side of 0, and can not be less than 2 / (resamples + 1).

    Example:
        >>> first, second = torch.zeros(100, 1), (torch.arange(100) < 40)[:, None]
        >>> found = paired_differences(["r@1"], first, second)["r@1"]
        >>> round(found.value, 2), found.real
        (0.4, True)
    """
    if first.shape != second.shape or first.shape[1:] != (len(names),) or not len(first):
        raise ValueError(f"tables of {tuple(first.shape)} and {tuple(second.shape)} are not of the same queries")
    table = second.double().cpu() - first.double().cpu()
    drawn = _resampled_means(table, resamples, seed)
    low, high = _quantiles(drawn).tolist()
    against = torch.minimum((drawn <= 0).sum(0), (drawn >= 0).sum(0))
    p = (2 * (against + 1).double() / (resamples + 1)).clamp(max=1).tolist()
    return {name: Difference(*each) for name, *each in zip(names, table.mean(0).tolist(), low, high, p, strict=True)}


def _interval(table: Tensor, resamples: int, seed: int) -> Tensor:
    """The 2.5 and 97.5 % quantiles of the columns' means when rows are drawn with replacement, (2, columns)."""
    return _quantiles(_resampled_means(table, resamples, seed))


def _quantiles(means: Tensor) -> Tensor:
    return torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype), dim=0)


def _resampled_means(table: Tensor, resamples: int, seed: int) -> Tensor:
    """The columns' means when rows are drawn with replacement, (resamples, columns)."""
    random = torch.Generator().manual_seed(seed)
    number = len(table)
    block = max(1, _DRAWS // number)
    means = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = torch.randint(number, (rows, number), generator=random)
        times = torch.zeros(rows, number, dtype=table.dtype).scatter_add_(1, drawn, torch.ones_like(drawn).double())
        means.append(times @ table / number)
    return torch.cat(means)
