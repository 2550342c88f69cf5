"""Smooth counting: the number of items above a threshold, with a sigmoid in place of the step function.

A ranking loss spends most of its time here. Four classes compute the same counts:

- `DenseCounts` evaluates one sigmoid per pair of item and threshold. Its shapes do not depend on the data, which GPUs
  need.
- `FactoredCounts` evaluates one exponential per item, for so few rows at a time that they stay in the CPU's caches.
- `BandCounts` does the same, but ignores items that are far below all thresholds.
- `SeriesCounts` does the same for the items near or above the lowest threshold, and sums the others by a series.

All of them set a sigmoid to exactly 0 where it is negligible (see `pruning.flat_from`). Otherwise sigmoids far from
their midpoint, and products with them, would be subnormal numbers, on which some processors are a hundred times slower.

With a `tail`, an upper bound of the step function takes the place of the sigmoid. The two differ only for items above a
threshold, and these items are always among those that `DenseCounts` and `FactoredCounts` treat one by one.

Shapes: T rows, N items per row, P thresholds per row.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shortlist.ranking.pruning import exponent_range, flat_from, series
from shortlist.ranking.scratch import Scratch
from shortlist.ranking.tail import LinearTail

Steps = Callable[[Tensor, Tensor, float, Tensor, LinearTail | None, Tensor | None], tuple[Tensor, Tensor]]

_CACHE_ELEMENTS = 2**20  # number of elements that a CPU processes at a time


class Comparison(NamedTuple):
    """The items to count, and the thresholds to compare them with.

    Args:
        items: Items of shape (T, N).
        thresholds: Thresholds of shape (T, P).
        active: Boolean mask of shape (T, P). The counts of the other thresholds are 0, or not used (`DenseCounts`).
        scale: Inverse temperature of the sigmoid.
        scratch: Buffers.
        tail: Upper bound that takes the place of the sigmoid, if any.
    """

    items: Tensor
    thresholds: Tensor
    active: Tensor
    scale: float
    scratch: Scratch
    tail: LinearTail | None = None


class RankCounts(Protocol):
    """Smooth number of items above each threshold of their row."""

    counts: Tensor  # (T, P) sum over the items of sigmoid((item - threshold) * scale)

    def gradient(self, weights: Tensor, columns: Tensor, addend: Tensor, out: Tensor) -> Tensor:
        """Compute the gradient of sum(weights * counts) with respect to items and thresholds, divided by `scale`.

        Call this method only once, because it reuses memory.

        Args:
            weights: Weights of the counts, of shape (T, P).
            columns: Columns of the gradient that belong to the thresholds, of shape (T, P).
            addend: Values to add to the gradient in these columns, of shape (T, P).
            out: Buffer of shape (T, N) for a dense result.

        Returns:
            Gradient of shape (T, N): `out`, or a CSR matrix.
        """
        ...


def sigmoid_or_zero(x: Tensor, items: int) -> Tensor:
    """Compute the sigmoid in place, with exactly 0 where it is negligible in a sum over `items` terms."""
    return torch.threshold_(x, -flat_from(items, x.dtype), -torch.inf).sigmoid_()


def soft_steps(
    items: Tensor,
    thresholds: Tensor,
    scale: float,
    slope: Tensor,
    tail: LinearTail | None = None,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the counts and the derivative of every sigmoid.

    Args:
        items: Items of shape (T, N).
        thresholds: Thresholds of shape (T, P).
        scale: Inverse temperature of the sigmoid.
        slope: Output of shape (T, P, N): the derivative of each sigmoid, divided by `scale`.
        tail: Upper bound that takes the place of the sigmoid, if any.
        own: Item that is not counted for each threshold, of shape (T, P).

    Returns:
        The counts and the sums of the derivatives over the items, both of shape (T, P).
    """
    gap = torch.sub(items.unsqueeze(1), thresholds.unsqueeze(2), out=slope)
    unscaled = gap if tail is None else gap.clone()
    soft = sigmoid_or_zero(gap.mul_(scale), items.shape[1])
    if own is not None:
        soft.scatter_(2, own.unsqueeze(2), 0)
    counts = soft.sum(2)
    if tail is not None:
        counts += tail.excess(unscaled, soft, scale)
    slope = soft.addcmul_(soft, soft, value=-1)
    if tail is not None:
        slope = tail.slopes(unscaled, slope, scale)
    return counts, slope.sum(2)


class DenseCounts:
    """Counts from one sigmoid per pair of item and threshold. No shape depends on the data, as GPUs require.

    Args:
        steps: `soft_steps`, or `compiled_steps` for the same computation fused by torch.compile.
        own: Item that is not counted for each threshold, of shape (T, P).
    """

    def __init__(self, compared: Comparison, steps: Steps, own: Tensor | None = None):
        items, thresholds, _, scale, scratch, tail = compared
        self._slope = scratch("slope", *thresholds.shape, items.shape[1])
        self.counts, self._slope_sums = steps(items, thresholds, scale, self._slope, tail, own)

    def gradient(self, weights: Tensor, columns: Tensor, addend: Tensor, out: Tensor) -> Tensor:
        torch.bmm(weights.unsqueeze(1), self._slope, out=out.unsqueeze(1))
        return out.scatter_add_(1, columns, addend - weights * self._slope_sums)


class FactoredCounts:
    """Counts of all items for the active thresholds, from one exponential per item instead of one per pair.

    For any anchor a, sigmoid((s - t) * scale) = E / (E + f), where E = exp((s - a) * scale) depends on the item s and
    f = exp((t - a) * scale) on the threshold t. Active thresholds of a row form a *group* with a common anchor if they
    are close enough together for both factors to stay within the range of exponents.

    The sigmoids are computed for a block of groups at a time, which stays in the CPU's caches. They are discarded
    after counting and computed again for the gradient, which is faster than writing them to memory.

    Args:
        lengths: Number of leading items to consider in each row, of shape (T,), for rows whose remaining items do not
            count. Default: all items.
    """

    def __init__(self, compared: Comparison, lengths: Tensor | None = None):
        items, thresholds, active, scale, scratch, tail = compared
        self._items, self._scale, self._scratch, self._tail = items, scale, scratch, tail
        self._width = flat_from(items.shape[1], items.dtype)
        self._span = exponent_range(items.dtype) - self._width  # largest extent of a group, in temperatures
        self._active = active.reshape(-1).nonzero().squeeze(1)  # (M,) flat indices
        row = self._active // thresholds.shape[1]
        threshold = thresholds.reshape(-1)[self._active]
        lowest = thresholds.masked_fill(~active, torch.inf).amin(1)
        _, level = torch.unique(((threshold - lowest[row]) * (scale / self._span)).floor_(), return_inverse=True)
        key, group, sizes = torch.unique(row * len(threshold) + level, return_inverse=True, return_counts=True)
        sizes, order = sizes.sort(stable=True)  # groups of equal size are processed together
        new_number = torch.arange(len(order), device=threshold.device)
        group = torch.empty_like(order).index_copy_(0, order, new_number)[group]
        self._rows = key[order] // max(len(threshold), 1)  # (G,) row of each group
        self._anchor = torch.full_like(key, torch.inf, dtype=threshold.dtype)
        self._anchor.scatter_reduce_(0, group, threshold, "amin")
        self._shape = len(key), int(sizes[-1]) if len(key) else 0
        self._slot = self._slots(group, sizes)
        self._factor = self._to_groups(((threshold - self._anchor[group]) * scale).exp_(), torch.inf)
        self._threshold = None if tail is None else self._to_groups(threshold, torch.inf)
        length = [items.shape[1]] * len(key) if lengths is None else lengths[self._rows].tolist()
        self._blocks = list(_blocks(sizes.tolist(), length))
        counts = torch.zeros_like(self._factor)
        for block in self._blocks:
            _, soft = self._sigmoids(*block)
            counts[block.groups, : block.width] = soft.sum(2)
            if tail is not None:
                counts[block.groups, : block.width] += tail.excess(self._gaps(*block), soft, scale)
        self.counts = self._to_thresholds(counts, thresholds)

    def _sigmoids(self, groups: slice, width: int, length: int) -> tuple[Tensor, Tensor]:
        """Compute the factors of the items, (R, length), and the sigmoids, (R, width, length), of R groups."""
        rows, anchor = self._rows[groups], self._anchor[groups].unsqueeze(1)
        item = self._scratch("item", len(rows), length)
        torch.index_select(self._items[:, :length], 0, rows, out=item).sub_(anchor).mul_(self._scale)
        item.clamp_(-self._width, self._span + self._width).exp_()
        item = torch.threshold_(item, 1.01 * math.exp(-self._width), 0)
        factor = self._factor[groups, :width].unsqueeze(2)
        soft = torch.add(item.unsqueeze(1), factor, out=self._scratch("soft", len(rows), width, length))
        soft = torch.div(item.unsqueeze(1), soft, out=soft)
        return item, torch.threshold_(soft, math.exp(-self._width), 0)

    def _gaps(self, groups: slice, width: int, length: int) -> Tensor:
        """Compute the differences of items and thresholds, (R, width, length), of R groups."""
        assert self._threshold is not None
        items = self._items[:, :length].index_select(0, self._rows[groups])
        return items.unsqueeze(1) - self._threshold[groups, :width].unsqueeze(2)

    def _slots(self, group: Tensor, sizes: Tensor) -> Tensor:
        """Return the flat index of each active threshold in a matrix with one row per group, (M,)."""
        order = group.argsort(stable=True)
        column = torch.empty_like(group)
        column[order] = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group[order]]
        return group * self._shape[1] + column

    def _to_groups(self, values: Tensor, padding: float) -> Tensor:
        """Arrange values of the active thresholds, (M,), as a padded matrix with one row per group, (G, W)."""
        padded = values.new_full((math.prod(self._shape),), padding)
        return padded.index_copy_(0, self._slot, values).view(self._shape)

    def _to_thresholds(self, values: Tensor, like: Tensor) -> Tensor:
        """Arrange values with one row per group, (G, W), as the thresholds are, (T, P), with 0 for inactive ones."""
        return torch.zeros_like(like).view(-1).index_copy_(0, self._active, values.view(-1)[self._slot]).view_as(like)

    def item_gradient(self, weights: Tensor, out: Tensor) -> Tensor:
        """Write the gradient of sum(weights * counts) with respect to the items, divided by `scale`, to `out`.

        Returns:
            The sums of the sigmoids' derivatives over the items, (T, P).
        """
        grouped = self._to_groups(weights.reshape(-1)[self._active], 0)
        slope_sums = torch.zeros_like(grouped)
        out.zero_()
        for block in self._blocks:
            item, soft = self._sigmoids(*block)
            slope = soft.addcmul_(soft, soft, value=-1)
            if self._tail is not None:
                slope = self._tail.slopes(self._gaps(*block), slope, self._scale)
            slope_sums[block.groups, : block.width] = slope.sum(2)
            torch.bmm(grouped[block.groups, : block.width].unsqueeze(1), slope, out=item.unsqueeze(1))
            out[:, : block.length].index_add_(0, self._rows[block.groups], item)
        return self._to_thresholds(slope_sums, weights)

    def gradient(self, weights: Tensor, columns: Tensor, addend: Tensor, out: Tensor) -> Tensor:
        slope_sums = self.item_gradient(weights, out)
        return out.scatter_add_(1, columns, addend - weights * slope_sums)


class _Block(NamedTuple):
    """Groups of thresholds that are processed at a time."""

    groups: slice
    width: int  # number of thresholds in the largest group
    length: int  # number of items in the longest row


def _blocks(widths: list[int], lengths: list[int]) -> Iterator[_Block]:
    """Divide groups into blocks that fit into the CPU's caches, given their widths, in ascending order, and lengths."""
    start = 0
    while start < len(widths):
        stop = len(widths)
        while True:
            width, length = widths[stop - 1], max(lengths[start:stop])
            fitting = max(_CACHE_ELEMENTS // max((width + 1) * length, 1), 1)
            if stop - start <= fitting:
                break
            stop = start + max(fitting, (stop - start) // 2)
        yield _Block(slice(start, stop), width, length)
        start = stop


class BandCounts:
    """Counts of the items at or above a lower bound. The other items are too far below every threshold to count.

    The items of the band are moved to the front of their row, and the rows are sorted by the size of their band.

    Args:
        floor: Lower bound of each row, of shape (T, 1).
    """

    def __init__(self, compared: Comparison, floor: Tensor):
        items, thresholds, active, _, scratch, _ = compared
        rows, self._size = items.shape
        device = items.device
        in_band = torch.ge(items, floor, out=scratch("in band", rows, self._size, dtype=torch.bool))
        self.entry = in_band.view(-1).nonzero().squeeze(1)  # (E,) flat index of each item of the band
        starts = torch.searchsorted(self.entry, self._size * torch.arange(rows + 1, device=device))
        self._number = starts.diff()  # (T,) items in the band
        self._row = torch.repeat_interleave(self._number)
        self._order = self._number.argsort()
        self._position = torch.empty_like(self._order).index_copy_(0, self._order, torch.arange(rows, device=device))
        self._longest = max(int(self._number.max()), 1)
        self._target = (self._longest * self._position - starts[:-1]).index_select(0, self._row)
        self._target += torch.arange(len(self.entry), device=device)  # (E,) flat index after the move
        band = items.new_full((rows * self._longest,), -torch.inf)
        band.index_copy_(0, self._target, items.view(-1).index_select(0, self.entry))
        band, thresholds, active = band.view(rows, -1), thresholds[self._order], active[self._order]
        moved = compared._replace(items=band, thresholds=thresholds, active=active)
        self._counts = FactoredCounts(moved, lengths=self._number[self._order])
        self.counts = self._counts.counts[self._position]

    def entry_gradient(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of sum(weights * counts) with respect to the band's items, divided by `scale`.

        Returns:
            The gradient at each of `entry`, (E,), and the sums of the sigmoids' derivatives over the items, (T, P).
        """
        out = weights.new_empty(len(weights), self._longest)
        slope_sums = self._counts.item_gradient(weights[self._order], out)
        return out.view(-1).index_select(0, self._target), slope_sums[self._position]

    def gradient(self, weights: Tensor, columns: Tensor, addend: Tensor, out: Tensor) -> Tensor:
        """Return the gradient as a CSR matrix. In each row, the columns of the thresholds come first."""
        rows, count = columns.shape
        at_items, slope_sums = self.entry_gradient(weights)
        starts = torch.zeros(rows + 1, dtype=torch.int64, device=columns.device)
        torch.cumsum(self._number + count, 0, out=starts[1:])
        first = starts[:-1, None] + torch.arange(count, device=columns.device)
        others = torch.arange(len(self.entry), device=columns.device) + count * (self._row + 1)
        indices, values = (each.new_empty(first.numel() + len(others)) for each in (columns, addend))
        indices[first], values[first] = columns, addend - weights * slope_sums
        indices[others], values[others] = self.entry - self._size * self._row, at_items
        return _sparse_rows(starts, indices, values, torch.Size((rows, self._size)))


class SeriesCounts:
    """Counts that treat items near or above the lowest active threshold individually and sum the others by a series.

    For an item far enough below a threshold, sigmoid((item - threshold) * scale) is a short polynomial in
    y = exp((item - threshold) * scale), and each power of y is the product of a factor of the item and a factor of the
    threshold. Hence the powers of these items are summed once per row instead of once per threshold.
    """

    def __init__(self, compared: Comparison):
        items, thresholds, active, scale, scratch, _ = compared
        depth, coefficients = series(items.shape[1], items.dtype)
        width = flat_from(items.shape[1], items.dtype)
        lowest = thresholds.masked_fill(~active, torch.inf).amin(1, keepdim=True)
        floor = lowest - depth / scale
        self._near = BandCounts(compared, floor)
        gap = torch.sub(items, floor, out=scratch("gap", *items.shape)).mul_(scale)
        item = torch.threshold_(gap.clamp_(depth - width - 1, 0).exp_(), math.exp(depth - width), 0)
        item.view(-1).index_fill_(0, self._near.entry, 0)
        below = ((lowest - thresholds) * scale - depth).masked_fill_(~active, -torch.inf)
        threshold = torch.threshold_(below, -width, -torch.inf).exp_()

        self.counts, self._item = self._near.counts, item
        self._derivatives, self._slope_sums = [], torch.zeros_like(threshold)
        power, factor = item, threshold
        for exponent, coefficient in enumerate(coefficients, start=1):
            if exponent > 1:
                power = torch.mul(power, item, out=scratch("power", *item.shape))
                factor = torch.threshold_(factor * threshold, math.exp(-width), 0)
            total = torch.threshold_(power.sum(1, keepdim=True), torch.finfo(power.dtype).eps, 0)
            self.counts = self.counts + coefficient * factor * total
            self._derivatives.append(exponent * coefficient * factor)
            self._slope_sums += self._derivatives[-1] * total

    def gradient(self, weights: Tensor, columns: Tensor, addend: Tensor, out: Tensor) -> Tensor:
        *lower, inner = ((weights * each).sum(1, keepdim=True) for each in self._derivatives)
        for coefficient in reversed(lower):  # Horner's method
            inner = torch.addcmul(coefficient, self._item, inner, out=out)
        torch.mul(inner, self._item, out=out)
        at_near, slope_sums = self._near.entry_gradient(weights)
        out.view(-1).index_add_(0, self._near.entry, at_near)
        return out.scatter_add_(1, columns, addend - weights * (slope_sums + self._slope_sums))


class PositiveCounts:
    """Smooth number of positives above each positive of its row, without itself and without padding.

    Args:
        positives: Similarities of the positives, of shape (T, P).
        present: Boolean mask of shape (T, P) that is False for padding.
        scale: Inverse temperature of the sigmoid.
        exact: Whether to count exactly, including ties. Exact counts have no gradient.
    """

    def __init__(self, positives: Tensor, present: Tensor, scale: float, scratch: Scratch, exact: bool = False):
        items = positives.masked_fill(~present, -torch.inf)
        gap = scratch("positive pairs", *positives.shape, positives.shape[1])
        torch.sub(items.unsqueeze(1), positives.unsqueeze(2), out=gap).mul_(scale)
        soft = (gap >= 0).to(gap.dtype) if exact else sigmoid_or_zero(gap, positives.shape[1])
        soft.diagonal(dim1=1, dim2=2).zero_()
        self.counts = soft.sum(2)
        self._slope = soft.addcmul_(soft, soft, value=-1)  # 0 for exact counts

    def gradient(self, weights: Tensor) -> Tensor:
        """Compute the gradient of sum(weights * counts) with respect to the positives, divided by `scale`, (T, P)."""
        return torch.bmm(weights.unsqueeze(1), self._slope).squeeze(1) - weights * self._slope.sum(2)


def _sparse_rows(starts: Tensor, columns: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a CSR matrix, or a dense one where torch has no fast sparse product."""
    with warnings.catch_warnings():  # torch warns once per process that CSR is in beta; only basic features are used
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        matrix = torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)
    fast: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return matrix if fast else matrix.to_dense()


class _Compiled:
    """`soft_steps` fused by torch.compile on first use. If compilation fails, warn once and run it uncompiled."""

    def __init__(self) -> None:
        self._steps: Steps | None = None
        self._worked = False

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        if self._steps is None:
            self._steps = torch.compile(soft_steps, dynamic=True)
        try:
            result = self._steps(*arguments)
        except Exception as error:  # a missing or broken compiler can raise anything
            if self._worked or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"torch.compile failed; continuing without it: {reason}", stacklevel=2)
            self._steps = soft_steps
            result = soft_steps(*arguments)
        self._worked = True
        return result


compiled_steps = _Compiled()  # shared by the whole process, so that a failing compiler is tried and reported only once
