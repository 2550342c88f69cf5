"""Smooth counting: how many items stand ahead of a threshold when the step function is a sigmoid.

This is where the time of a ranking loss goes. There are three ways to the same numbers. `DenseCounts` takes one sigmoid
per pair of item and threshold, with shapes that do not depend on the data, as GPUs need it. `FactoredCounts` takes one
exponential per item. `BandCounts` looks only at the items for which the sigmoid is not yet flat.

All of them set a sigmoid to exactly 0 where it is flat (see `pruning.flat_from`). Otherwise sigmoids far from their
middle, and products with them, would be subnormal numbers, on which some processors are a hundred times slower.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shortlist.ranking.pruning import flat_from, half_range
from shortlist.ranking.scratch import Scratch

Steps = Callable[[Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]


class RankCounts(Protocol):
    """How many of the N items of each row are ahead of each of its P thresholds, smoothly.

    `members`, (T, P), says which thresholds of a row are counted for; the others get 0.
    """

    counts: Tensor  # (T, P) sum over the items of sigmoid((item - threshold) * scale)
    slopes: Tensor  # (T, P) sum over the items of the derivative of that sigmoid with respect to its argument

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Gradient of sum(weights * counts) at the items but for the factor `scale`, (T, N), plus values at places.

        It is dense, in `out`, or CSR. Call it once: it reuses memory.
        """
        ...


def sigmoid_or_zero(x: Tensor, items: int) -> Tensor:
    """Sigmoid in place, exactly 0 where it is flat for a sum over so many items."""
    return torch.threshold_(x, -flat_from(items, x.dtype), -torch.inf).sigmoid_()


def soft_steps(items: Tensor, rows: Tensor, thresholds: Tensor, scale: float, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and slopes, (M,), of items[rows], (M, N), against thresholds, (M,); fills in each item's slope, (M, N)."""
    gap = torch.index_select(items, 0, rows, out=slope).sub_(thresholds.unsqueeze(1)).mul_(scale)
    soft = sigmoid_or_zero(gap, items.shape[1])
    counts = soft.sum(1)
    slope = soft.addcmul_(soft, soft, value=-1)
    return counts, slope.sum(1)


class DenseCounts:
    """Every item against every threshold. No shape depends on the data, so this is the way for GPUs.

    Args:
        steps: `soft_steps`, or `compiled_steps`, which fuses it.
    """

    def __init__(self, items: Tensor, thresholds: Tensor, scale: float, steps: Steps, scratch: Scratch):
        rows = torch.arange(len(items), device=items.device).repeat_interleave(thresholds.shape[1])
        self._slope = scratch("slope", len(rows), items.shape[1])
        counts, slopes = steps(items, rows, thresholds.reshape(-1), scale, self._slope)
        self.counts, self.slopes = counts.view_as(thresholds), slopes.view_as(thresholds)

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        torch.bmm(weights.unsqueeze(1), self._slope.view(*weights.shape, -1), out=out.unsqueeze(1))
        return out.scatter_add_(1, places, values)


class FactoredCounts:
    """Every item against the members among the thresholds, with one exponential per item instead of one per pair.

    For any anchor a, sigmoid((s - t) * scale) = E / (E + f) with E = exp((s - a) * scale) of the item and
    f = exp((t - a) * scale) of the threshold. Members of a row whose thresholds are close together share an anchor and
    form a *group*: close enough that no value leaves half of the range of exponents, so that a product with a weight
    stays within the whole.
    """

    def __init__(self, items: Tensor, thresholds: Tensor, members: Tensor, scale: float, scratch: Scratch):
        size = items.shape[1]
        width = flat_from(size, items.dtype)
        span = half_range(items.dtype) - width  # of the thresholds of a group, in temperatures
        self._member = members.reshape(-1).nonzero().squeeze(1)
        row = self._member // thresholds.shape[1]
        at = thresholds.reshape(-1)[self._member]
        lowest = thresholds.masked_fill(~members, torch.inf).amin(1)
        _, level = torch.unique(((at - lowest[row]) * (scale / span)).floor_(), return_inverse=True)
        key, group, self._sizes = torch.unique(row * len(at) + level, return_inverse=True, return_counts=True)
        self._rows = key // len(at)  # (G,) the row of each group
        anchor = torch.full_like(key, torch.inf, dtype=at.dtype).scatter_reduce_(0, group, at, "amin")
        self._place = self._places(group)

        factor = self._by_group(((at - anchor[group]) * scale).exp_(), torch.inf).unsqueeze(2)  # (G, W, 1)
        gap = torch.index_select(items, 0, self._rows, out=scratch("gap", len(key), size))
        gap = gap.sub_(anchor.unsqueeze(1)).mul_(scale).clamp_(-width, span + width).exp_()
        gap = torch.threshold_(gap, 1.01 * math.exp(-width), 0)
        soft = torch.add(gap.unsqueeze(1), factor, out=scratch("slope", len(key), factor.shape[1], size))
        soft = torch.div(gap.unsqueeze(1), soft, out=soft)
        counts = soft.sum(2)
        self._slope = soft.addcmul_(soft, soft, value=-1)
        self._gap = gap  # free to be overwritten
        zeros = torch.zeros_like(thresholds).view(-1)
        self.counts, self.slopes = (
            zeros.index_copy(0, self._member, each.view(-1)[self._place]).view_as(thresholds)
            for each in (counts, self._slope.sum(2))
        )

    def _places(self, group: Tensor) -> Tensor:
        """Where each member goes in a (G, W) matrix with a row per group, flat."""
        order = group.argsort(stable=True)
        starts = self._sizes.cumsum(0) - self._sizes
        slot = torch.empty_like(group)
        slot[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
        return group * int(self._sizes.max()) + slot

    def _by_group(self, values: Tensor, padding: float) -> Tensor:
        """Values of the members, (M,), as a padded (G, W) matrix."""
        width = int(self._sizes.max())
        padded = torch.full((len(self._sizes) * width,), padding, device=values.device, dtype=values.dtype)
        return padded.index_copy_(0, self._place, values).view(-1, width)

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        weights = self._by_group(weights.reshape(-1)[self._member], 0)
        torch.bmm(weights.unsqueeze(1), self._slope, out=self._gap.unsqueeze(1))
        return out.zero_().index_add_(0, self._rows, self._gap).scatter_add_(1, places, values)


class BandCounts:
    """Only the items marked in `near`, (T, N): the others are so far below every member that they count nothing."""

    def __init__(self, items: Tensor, thresholds: Tensor, members: Tensor, scale: float, near: Tensor):
        self._shape, self._members = items.shape, members
        self._entry = near.view(-1).nonzero().squeeze(1)  # flat index of each marked item
        ends = items.shape[1] * torch.arange(len(items) + 1, device=items.device)
        self._starts = torch.searchsorted(self._entry, ends)
        self._row = torch.repeat_interleave(self._starts.diff())
        gap = items.view(-1).index_select(0, self._entry).unsqueeze(1) - thresholds.index_select(0, self._row)
        soft = sigmoid_or_zero(gap.mul_(scale), items.shape[1])
        self.counts = self._sum_rows(soft)
        self._slope = soft.addcmul_(soft, soft, value=-1)
        self.slopes = self._sum_rows(self._slope)

    def _sum_rows(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=self._starts.diff(), axis=0, unsafe=True).mul_(self._members)

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """As a CSR matrix; the places must be marked in `near` as well."""
        rows, columns = self._shape
        entries = self._slope.mul_((weights * self._members).index_select(0, self._row)).sum(1)
        flat = places + columns * torch.arange(rows, device=places.device).unsqueeze(1)
        entries.index_add_(0, torch.searchsorted(self._entry, flat.view(-1)), values.reshape(-1))
        return _sparse_rows(self._starts, self._entry - columns * self._row, entries, self._shape)


class PositiveCounts:
    """The thresholds of a row against each other, without itself and without padding: ranks among the positives."""

    def __init__(self, thresholds: Tensor, present: Tensor, scale: float):
        items = thresholds.masked_fill(~present, -torch.inf)
        soft = sigmoid_or_zero((items.unsqueeze(1) - thresholds.unsqueeze(2)) * scale, thresholds.shape[1])
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

    def __call__(
        self, items: Tensor, rows: Tensor, thresholds: Tensor, scale: float, slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self._steps is None:
            self._steps = torch.compile(soft_steps, dynamic=True)
        try:
            found = self._steps(items, rows, thresholds, scale, slope)
        except Exception as error:  # whatever a missing or broken compiler raises: the plain steps need none
            if self._worked or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"torch.compile does not work here, going on without it: {reason}", stacklevel=2)
            self._steps = soft_steps
            found = soft_steps(items, rows, thresholds, scale, slope)
        self._worked = True
        return found


compiled_steps = _Compiled()  # one for the process: a compiler that does not work is tried, and complained of, once
