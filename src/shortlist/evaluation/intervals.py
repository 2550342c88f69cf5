"""Means over queries with bootstrap confidence intervals, and paired differences between two results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 10_000  # for p-values, so that small ones can be distinguished
_DRAWS_PER_BLOCK = 2**24  # of the bootstrap, in memory at a time


@dataclass(frozen=True)
class Estimate:
    """A mean over queries and its 95 % confidence interval, which is None if it was not computed."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{100 * self.value:.1f}{interval}"


def estimates(names: Sequence[str], table: Tensor, bootstrap: int, seed: int) -> dict[str, Estimate]:
    """Compute the mean of each column with its confidence interval.

    Args:
        names: Names of the columns.
        table: (queries, columns).
        bootstrap: Number of resamples of the queries; 0 for no intervals.
        seed: Seed of the resamples.
    """
    table = table.double().cpu()
    means = table.mean(0).tolist()
    if not bootstrap:
        return {name: Estimate(mean) for name, mean in zip(names, means, strict=True)}
    low, high = _interval(_resampled_means(table, bootstrap, seed)).tolist()
    return {name: Estimate(*each) for name, *each in zip(names, means, low, high, strict=True)}


@dataclass(frozen=True)
class Difference:
    """The difference of two means over the same queries.

    Args:
        value: The second mean minus the first.
        low: Lower end of the 95 % confidence interval, from resampling the pairs of results.
        high: Upper end of the interval.
        p: Two-sided p-value: the probability of a difference as large as this one if there were none.
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
    """Compute second - first for each column of two tables of the same queries, by a paired bootstrap.

    A query that is hard for one model is usually hard for the other, so the interval of the difference is narrower than
    the intervals of the two means suggest. The p-value counts the resamples on the other side of 0, and is never less
    than 2 / (resamples + 1).

    Args:
        names: Names of the columns.
        first: (queries, columns).
        second: (queries, columns).
        resamples: Number of resamples of the queries.
        seed: Seed of the resamples.

    Raises:
        ValueError: The tables have different shapes, or no rows.

    Example:
        >>> first, second = torch.zeros(100, 1), (torch.arange(100) < 40)[:, None]
        >>> found = paired_differences(["r@1"], first, second)["r@1"]
        >>> round(found.value, 2), found.real
        (0.4, True)
    """
    if first.shape != second.shape or first.shape[1:] != (len(names),) or not len(first):
        raise ValueError(f"tables of shape {tuple(first.shape)} and {tuple(second.shape)} are not of the same queries")
    table = second.double().cpu() - first.double().cpu()
    means = _resampled_means(table, resamples, seed)
    low, high = _interval(means).tolist()
    other_side = torch.minimum((means <= 0).sum(0), (means >= 0).sum(0))
    p = (2 * (other_side + 1).double() / (resamples + 1)).clamp(max=1).tolist()
    return {name: Difference(*each) for name, *each in zip(names, table.mean(0).tolist(), low, high, p, strict=True)}


def _interval(means: Tensor) -> Tensor:
    """Return the 2.5 % and 97.5 % quantiles of each column, (2, columns)."""
    return torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype), dim=0)


def _resampled_means(table: Tensor, resamples: int, seed: int) -> Tensor:
    """Return the means of the columns when rows are drawn with replacement, (resamples, columns)."""
    random = torch.Generator().manual_seed(seed)
    number = len(table)
    block = max(1, _DRAWS_PER_BLOCK // number)
    means = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = torch.randint(number, (rows, number), generator=random)
        times = torch.zeros(rows, number, dtype=table.dtype).scatter_add_(1, drawn, torch.ones_like(drawn).double())
        means.append(times @ table / number)
    return torch.cat(means)
