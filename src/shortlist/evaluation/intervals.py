"""Means over queries with bootstrap confidence intervals, and paired differences between two results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 10_000  # for p-values, so that small ones can be distinguished
_DRAWS_PER_BLOCK = 2**19  # number of bootstrap draws in memory at a time


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
        p: Two-sided p-value: the probability of a difference at least this large if the true difference were 0.
    """

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
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
        >>> round(found.value, 2), found.significant
        (0.4, True)
    """
    if first.shape != second.shape or first.shape[1:] != (len(names),) or not len(first):
        raise ValueError(f"Tables of shape {tuple(first.shape)} and {tuple(second.shape)} must have the same queries.")
    table = second.double().cpu() - first.double().cpu()
    return _differences(names, table.mean(0), _resampled_means(table, resamples, seed))


def group_differences(
    names: Sequence[str],
    first: Tensor,
    second: Tensor,
    clusters: Tensor,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Difference]:
    """Compute second - first for each column of two tables of the same seeds and queries, by a paired bootstrap.

    Each resample draws clusters of queries with replacement, the same for all seeds, and independently seeds with
    replacement. S - 1 of S seeds are drawn, so that the variance of their mean is unbiased. The deviation of their
    weights from 1 / S is multiplied by the ratio of the 97.5 % quantiles of Student's t-distribution with S - 1 degrees
    of freedom and of the normal distribution, so that the interval is not too narrow for few seeds. A single seed is
    not resampled.

    Args:
        names: Names of the columns.
        first: (seeds, queries, columns).
        second: (seeds, queries, columns).
        clusters: Cluster of each query, such as its class, (queries,). Queries of a cluster are drawn together.
        resamples: Number of resamples.
        seed: Seed of the resamples.

    Raises:
        ValueError: The tables have different shapes, or no rows.

    Example:
        >>> first, second = torch.zeros(3, 100, 1), (torch.arange(100) < 40)[None, :, None].expand(3, 100, 1)
        >>> found = group_differences(["r@1"], first, second, torch.arange(100) // 2)["r@1"]
        >>> round(found.value, 2), found.significant
        (0.4, True)
    """
    shape = (len(clusters), len(names))
    if first.shape != second.shape or first.shape[1:] != shape or not first.numel():
        raise ValueError(f"Tables of shape {tuple(first.shape)} and {tuple(second.shape)} must have the same queries.")
    table = second.double().cpu() - first.double().cpu()
    _, index, sizes = torch.unique(clusters.cpu(), return_inverse=True, return_counts=True)
    sums = table.new_zeros(len(table), len(sizes), len(names)).index_add_(1, index, table)  # (seeds, clusters, columns)
    random, number = torch.Generator().manual_seed(seed), len(table)
    means = []
    for times in _draws(len(sizes), resamples, random):
        weights = table.new_full((len(times), number), 1 / number)
        if number > 1:
            drawn = _count_draws(number, number - 1, len(times), random) / (number - 1)
            weights += _widening(number - 1) * (drawn - weights)
        per_seed = torch.stack([times @ each for each in sums]) / (times @ sizes.double())[:, None]
        means.append(torch.einsum("bs,sbm->bm", weights, per_seed))
    return _differences(names, table.mean((0, 1)), torch.cat(means))


def _widening(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t-distribution divided by that of the normal distribution."""
    from scipy.special import ndtri, stdtrit  # imported here because it is slow to import

    return float(stdtrit(degrees, 0.975) / ndtri(0.975))


def _differences(names: Sequence[str], values: Tensor, means: Tensor) -> dict[str, Difference]:
    """Return the differences of the columns from their values (columns) and resampled means (resamples, columns)."""
    low, high = _interval(means).tolist()
    other_side = torch.minimum((means <= 0).sum(0), (means >= 0).sum(0))
    p = (2 * (other_side + 1).double() / (len(means) + 1)).clamp(max=1).tolist()
    return {name: Difference(*each) for name, *each in zip(names, values.tolist(), low, high, p, strict=True)}


def _interval(means: Tensor) -> Tensor:
    """Return the 2.5 % and 97.5 % quantiles of each column, (2, columns)."""
    return torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype), dim=0)


def _resampled_means(table: Tensor, resamples: int, seed: int) -> Tensor:
    """Return the means of the columns when rows are drawn with replacement, (resamples, columns)."""
    random = torch.Generator().manual_seed(seed)
    return torch.cat([times @ table / len(table) for times in _draws(len(table), resamples, random)])


def _draws(number: int, resamples: int, random: torch.Generator) -> Iterator[Tensor]:
    """Draw `number` of `number` items with replacement; yield how often each is drawn in blocks, (block, number)."""
    block = max(1, _DRAWS_PER_BLOCK // number)
    for start in range(0, resamples, block):
        yield _count_draws(number, number, min(block, resamples - start), random)


def _count_draws(number: int, draws: int, rows: int, random: torch.Generator) -> Tensor:
    """Draw items with replacement; return how often each is drawn, (rows, number)."""
    drawn = torch.randint(number, (rows, draws), generator=random)
    one = torch.ones((), dtype=torch.float64)
    return torch.zeros(rows, number, dtype=torch.float64).scatter_add_(1, drawn, one.expand_as(drawn))
