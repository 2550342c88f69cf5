"""Smooth counting: how many items stand ahead of a threshold when the step function is a sigmoid.

This is where the time of a ranking loss goes. There are four ways to the same numbers:

- `DenseCounts` takes one sigmoid per pair of item and threshold, with shapes that do not depend on the data, as GPUs
  need them.
- `FactoredCounts` takes one exponential per item, and works on so few rows at a time that they stay in a CPU's caches.
- `BandCounts` does so for the items that are not far below all thresholds, and leaves out the others.
- `SeriesCounts` does so as well, and sums up the others at once.

All of them set a sigmoid to exactly 0 where it is flat (see `pruning.flat_from`). Otherwise sigmoids far from their
middle, and products with them, would be subnormal numbers, on which some processors are a hundred times slower.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shortlist.ranking.pruning import exponent_range, flat_from, series
from shortlist.ranking.scratch import Scratch

Steps = Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]

_IN_CACHE = 2**19  # elements that a CPU works on at a time


class RankCounts(Protocol):
    """How many of the N items of each row are ahead of each of its P thresholds, smoothly.

    `members`, (T, P), says which thresholds of a row are counted for; the others get 0.
    """

    counts: Tensor  # (T, P) sum over the items of sigmoid((item - threshold) * scale)

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Gradient of sum(weights * counts) at the items and the thresholds, but for the factor `scale`, (T, N).

        The thresholds are at `places`, (T, P), of their row, where `values` are added. The gradient is dense, in `out`,
        or CSR. Call this once: it reuses memory.
        """
        ...


def sigmoid_or_zero(x: Tensor, items: int) -> Tensor:
    """Sigmoid in place, exactly 0 where it is flat for a sum over so many items."""
    return torch.threshold_(x, -flat_from(items, x.dtype), -torch.inf).sigmoid_()


def soft_steps(items: Tensor, thresholds: Tensor, scale: float, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Counts, (T, P), and the sums of their slopes; fills in the slope of each item and threshold, (T, P, N)."""
    gap = torch.sub(items.unsqueeze(1), thresholds.unsqueeze(2), out=slope).mul_(scale)
    soft = sigmoid_or_zero(gap, items.shape[1])
    counts = soft.sum(2)
    slope = soft.addcmul_(soft, soft, value=-1)
    return counts, slope.sum(2)


class DenseCounts:
    """Every item against every threshold. No shape depends on the data, so this is the way for GPUs.

    Args:
        steps: `soft_steps`, or `compiled_steps`, which fuses it.
    """

    def __init__(self, items: Tensor, thresholds: Tensor, scale: float, steps: Steps, scratch: Scratch):
        self._slope = scratch("slope", *thresholds.shape, items.shape[1])
        self.counts, self._slopes = steps(items, thresholds, scale, self._slope)

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        torch.bmm(weights.unsqueeze(1), self._slope, out=out.unsqueeze(1))
        return out.scatter_add_(1, places, values - weights * self._slopes)


class FactoredCounts:
    """Every item against the members among the thresholds, with one exponential per item instead of one per pair.

    For any anchor a, sigmoid((s - t) * scale) = E / (E + f) with E = exp((s - a) * scale) of the item and
    f = exp((t - a) * scale) of the threshold. Members of a row that are close enough together for both to stay in the
    range of exponents share an anchor and form a *group*.

    The sigmoids of a block of groups stay in the CPU's caches. They are forgotten once they are counted, and computed
    again for the gradient, which is faster than writing them to memory.

    Args:
        lengths: how many items to look at in each row, for rows that end in items which count nothing.
    """

    def __init__(
        self,
        items: Tensor,
        thresholds: Tensor,
        members: Tensor,
        scale: float,
        scratch: Scratch,
        lengths: Tensor | None = None,
    ):
        self._items, self._scale, self._scratch = items, scale, scratch
        self._width = flat_from(items.shape[1], items.dtype)
        self._span = exponent_range(items.dtype) - self._width  # of the thresholds of a group, in temperatures
        self._member = members.reshape(-1).nonzero().squeeze(1)
        row = self._member // thresholds.shape[1]
        at = thresholds.reshape(-1)[self._member]
        lowest = thresholds.masked_fill(~members, torch.inf).amin(1)
        _, level = torch.unique(((at - lowest[row]) * (scale / self._span)).floor_(), return_inverse=True)
        key, group, sizes = torch.unique(row * len(at) + level, return_inverse=True, return_counts=True)
        sizes, order = sizes.sort(stable=True)  # groups of one size come together
        group = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=at.device))[group]
        self._rows = key[order] // max(len(at), 1)  # (G,) the row of each group
        self._anchor = torch.full_like(key, torch.inf, dtype=at.dtype).scatter_reduce_(0, group, at, "amin")
        self._shape = len(key), int(sizes[-1]) if len(key) else 0
        self._place = self._places(group, sizes)
        self._factor = self._by_group(((at - self._anchor[group]) * scale).exp_(), torch.inf)
        length = [items.shape[1]] * len(key) if lengths is None else lengths[self._rows].tolist()
        self._blocks = list(_blocks(sizes.tolist(), length))
        counts = torch.zeros_like(self._factor)
        for block in self._blocks:
            _, soft = self._sigmoids(*block)
            counts[block.groups, : block.width] = soft.sum(2)
        self.counts = self._by_threshold(counts, thresholds)

    def _sigmoids(self, groups: slice, width: int, length: int) -> tuple[Tensor, Tensor]:
        """The factors of the items, (R, length), and the sigmoids, (R, width, length), of some groups."""
        rows, anchor = self._rows[groups], self._anchor[groups].unsqueeze(1)
        item = self._scratch("item", len(rows), length)
        torch.index_select(self._items[:, :length], 0, rows, out=item).sub_(anchor).mul_(self._scale)
        item.clamp_(-self._width, self._span + self._width).exp_()
        item = torch.threshold_(item, 1.01 * math.exp(-self._width), 0)
        factor = self._factor[groups, :width].unsqueeze(2)
        soft = torch.add(item.unsqueeze(1), factor, out=self._scratch("soft", len(rows), width, length))
        soft = torch.div(item.unsqueeze(1), soft, out=soft)
        return item, torch.threshold_(soft, math.exp(-self._width), 0)

    def _places(self, group: Tensor, sizes: Tensor) -> Tensor:
        """Where each member goes in a matrix with a row per group, flat."""
        order = group.argsort(stable=True)
        slot = torch.empty_like(group)
        slot[order] = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group[order]]
        return group * self._shape[1] + slot

    def _by_group(self, values: Tensor, padding: float) -> Tensor:
        """Values of the members, (M,), as a padded (G, W) matrix."""
        padded = values.new_full((math.prod(self._shape),), padding)
        return padded.index_copy_(0, self._place, values).view(self._shape)

    def _by_threshold(self, values: Tensor, like: Tensor) -> Tensor:
        """Values of the groups' members, (G, W), where these are among the thresholds."""
        return torch.zeros_like(like).view(-1).index_copy_(0, self._member, values.view(-1)[self._place]).view_as(like)

    def at_items(self, weights: Tensor, out: Tensor) -> Tensor:
        """Gradient of sum(weights * counts) at the items but for the factor `scale`, in `out`; returns the slopes."""
        grouped = self._by_group(weights.reshape(-1)[self._member], 0)
        slopes = torch.zeros_like(grouped)
        out.zero_()
        for block in self._blocks:
            item, soft = self._sigmoids(*block)
            slope = soft.addcmul_(soft, soft, value=-1)
            slopes[block.groups, : block.width] = slope.sum(2)
            torch.bmm(grouped[block.groups, : block.width].unsqueeze(1), slope, out=item.unsqueeze(1))
            out[:, : block.length].index_add_(0, self._rows[block.groups], item)
        return self._by_threshold(slopes, weights)

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        slopes = self.at_items(weights, out)
        return out.scatter_add_(1, places, values - weights * slopes)


class _Block(NamedTuple):
    """Groups of thresholds that are worked on at a time."""

    groups: slice
    width: int  # thresholds of the largest group
    length: int  # items of the longest row


def _blocks(widths: list[int], lengths: list[int]) -> Iterator[_Block]:
    """Blocks of groups, given their widths, which rise, and lengths."""
    start = 0
    while start < len(widths):
        stop = len(widths)
        while True:
            width, length = widths[stop - 1], max(lengths[start:stop])
            fitting = max(_IN_CACHE // max((width + 1) * length, 1), 1)
            if stop - start <= fitting:
                break
            stop = start + max(fitting, (stop - start) // 2)
        yield _Block(slice(start, stop), width, length)
        start = stop


class BandCounts:
    """Only the items that reach a floor, (T, 1): the others are so far below every member that they count nothing.

    The items that reach it are moved to the front of their row, and the rows with few of them to the top.
    """

    def __init__(
        self, items: Tensor, thresholds: Tensor, members: Tensor, scale: float, scratch: Scratch, floor: Tensor
    ):
        rows, self._size = items.shape
        device = items.device
        near = torch.ge(items, floor, out=scratch("near", rows, self._size, dtype=torch.bool))
        self.entry = near.view(-1).nonzero().squeeze(1)  # flat index of each of them
        starts = torch.searchsorted(self.entry, self._size * torch.arange(rows + 1, device=device))
        self._number = starts.diff()
        self._row = torch.repeat_interleave(self._number)
        self._order = self._number.argsort()
        self._rank = torch.empty_like(self._order).index_copy_(0, self._order, torch.arange(rows, device=device))
        self._front = max(int(self._number.max()), 1)
        self._moved = (self._front * self._rank - starts[:-1]).index_select(0, self._row)
        self._moved += torch.arange(len(self.entry), device=device)  # where each of them goes, flat
        front = items.new_full((rows * self._front,), -torch.inf)
        front.index_copy_(0, self._moved, items.view(-1).index_select(0, self.entry))
        self._counts = FactoredCounts(
            front.view(rows, -1),
            thresholds[self._order],
            members[self._order],
            scale,
            scratch,
            lengths=self._number[self._order],
        )
        self.counts = self._counts.counts[self._rank]

    def at_entries(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of sum(weights * counts) at these items but for the factor `scale`, and the slopes."""
        out = weights.new_empty(len(weights), self._front)
        slopes = self._counts.at_items(weights[self._order], out)
        return out.view(-1).index_select(0, self._moved), slopes[self._rank]

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """As a CSR matrix. In each row, the places come first."""
        rows, count = places.shape
        at_items, slopes = self.at_entries(weights)
        starts = torch.zeros(rows + 1, dtype=torch.int64, device=places.device)
        torch.cumsum(self._number + count, 0, out=starts[1:])
        first = starts[:-1, None] + torch.arange(count, device=places.device)
        others = torch.arange(len(self.entry), device=places.device) + count * (self._row + 1)
        columns, entries = (each.new_empty(first.numel() + len(others)) for each in (places, values))
        columns[first], entries[first] = places, values - weights * slopes
        columns[others], entries[others] = self.entry - self._size * self._row, at_items
        return _sparse_rows(starts, columns, entries, torch.Size((rows, self._size)))


class SeriesCounts:
    """The items that are close to the lowest member or above it one by one, and those further down all at once.

    There, sigmoid((item - threshold) * scale) is a short polynomial in y = exp((item - threshold) * scale), and each
    power of y is a power of the item's factor times one of the threshold's. So the powers of the items are added up
    once per row, and not once per threshold.
    """

    def __init__(self, items: Tensor, thresholds: Tensor, members: Tensor, scale: float, scratch: Scratch):
        depth, coefficients = series(items.shape[1], items.dtype)
        width = flat_from(items.shape[1], items.dtype)
        lowest = thresholds.masked_fill(~members, torch.inf).amin(1, keepdim=True)
        floor = lowest - depth / scale
        self._near = BandCounts(items, thresholds, members, scale, scratch, floor)
        gap = torch.sub(items, floor, out=scratch("gap", *items.shape)).mul_(scale)
        item = torch.threshold_(gap.clamp_(depth - width - 1, 0).exp_(), math.exp(depth - width), 0)
        item.view(-1).index_fill_(0, self._near.entry, 0)
        below = ((lowest - thresholds) * scale - depth).masked_fill_(~members, -torch.inf)
        threshold = torch.threshold_(below, -width, -torch.inf).exp_()

        self.counts, self._item = self._near.counts, item
        self._derivatives, self._slopes = [], torch.zeros_like(threshold)
        power, factor = item, threshold
        for exponent, coefficient in enumerate(coefficients, start=1):
            if exponent > 1:
                power = torch.mul(power, item, out=scratch("power", *item.shape))
                factor = torch.threshold_(factor * threshold, math.exp(-width), 0)
            total = torch.threshold_(power.sum(1, keepdim=True), torch.finfo(power.dtype).eps, 0)
            self.counts = self.counts + coefficient * factor * total
            self._derivatives.append(exponent * coefficient * factor)
            self._slopes += self._derivatives[-1] * total

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        *lower, inner = ((weights * each).sum(1, keepdim=True) for each in self._derivatives)
        for coefficient in reversed(lower):
            inner = torch.addcmul(coefficient, self._item, inner, out=out)
        torch.mul(inner, self._item, out=out)
        at_near, slopes = self._near.at_entries(weights)
        out.view(-1).index_add_(0, self._near.entry, at_near)
        return out.scatter_add_(1, places, values - weights * (slopes + self._slopes))


class PositiveCounts:
    """The thresholds of a row against each other, without itself and without padding: ranks among the positives."""

    def __init__(self, thresholds: Tensor, present: Tensor, scale: float):
        items = thresholds.masked_fill(~present, -torch.inf)
        gap = (items.unsqueeze(1) - thresholds.unsqueeze(2)).mul_(scale)
        soft = sigmoid_or_zero(gap, thresholds.shape[1])
        soft.diagonal(dim1=1, dim2=2).zero_()
        self.counts = soft.sum(2)
        self._slope = soft.addcmul_(soft, soft, value=-1)

    def gradient(self, weights: Tensor) -> Tensor:
        """Gradient of sum(weights * counts) at the thresholds but for the factor `scale`, (T, P)."""
        return torch.bmm(weights.unsqueeze(1), self._slope).squeeze(1) - weights * self._slope.sum(2)


def _sparse_rows(starts: Tensor, columns: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """A CSR matrix; dense where torch has no fast product for it."""
    with warnings.catch_warnings():  # torch calls CSR a beta, once a process; we use construction and products only
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        matrix = torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)
    fast: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return matrix if fast else matrix.to_dense()


class _Compiled:
    """`soft_steps` fused by torch.compile at first use; the plain one, with one warning, where that does not work."""

    def __init__(self) -> None:
        self._steps: Steps | None = None
        self._worked = False

    def __call__(self, items: Tensor, thresholds: Tensor, scale: float, slope: Tensor) -> tuple[Tensor, Tensor]:
        if self._steps is None:
            self._steps = torch.compile(soft_steps, dynamic=True)
        try:
            found = self._steps(items, thresholds, scale, slope)
        except Exception as error:  # whatever a missing or broken compiler raises: the plain steps need none
            if self._worked or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"torch.compile does not work here, going on without it: {reason}", stacklevel=2)
            self._steps = soft_steps
            found = soft_steps(items, thresholds, scale, slope)
        self._worked = True
        return found


compiled_steps = _Compiled()  # one for the process: a compiler that does not work is tried, and complained of, once
