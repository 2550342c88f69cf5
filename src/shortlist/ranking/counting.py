"""Smooth counting: how many items stand ahead of a threshold when the step function is a sigmoid.

This is where the time of a ranking loss goes. Two ways to the same numbers: every sigmoid, or only those in the band
where a sigmoid is not yet flat. `members`, (T, P), says which thresholds of a row are counted for at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shortlist.ranking.scratch import Scratch

Steps = Callable[[Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]


class Ahead(Protocol):
    """How many of the N items of each row stand ahead of each of its P thresholds, smoothly."""

    counts: Tensor  # (T, P) sum over the items of sigmoid((item - threshold) * scale), 0 for those not members
    slopes: Tensor  # (T, P) sum over the items of that sigmoid's derivative by its argument

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Gradient of sum(weights * counts) at the items but for the factor `scale`, (T, N), plus values at places.

        Dense, in `out`, or CSR. To be called once: it reuses memory.
        """
        ...


def soft_steps(items: Tensor, rows: Tensor, thresholds: Tensor, scale: float, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and slopes, (M,), of items[rows], (M, N), against thresholds, (M,); fills in each item's slope, (M, N)."""
    soft = torch.index_select(items, 0, rows, out=slope).sub_(thresholds.unsqueeze(1)).mul_(scale).sigmoid_()
    counts = soft.sum(1)
    slope = soft.addcmul_(soft, soft, value=-1)
    return counts, slope.sum(1)


class Everything:
    """Every item against every member: without `members` no shape depends on the data, so this is the way of GPUs.

    Args:
        steps: `soft_steps`, or what `compiled_steps` makes of it.
    """

    def __init__(
        self, items: Tensor, thresholds: Tensor, members: Tensor | None, scale: float, steps: Steps, scratch: Scratch
    ):
        self._all = members is None
        if members is None:
            rows = torch.arange(len(items), device=items.device).unsqueeze(1).expand_as(thresholds).reshape(-1)
            flat = torch.arange(thresholds.numel(), device=items.device)
        else:
            flat = members.view(-1).nonzero().squeeze(1)
            rows = flat // thresholds.shape[1]
        self._rows, self._flat = rows, flat
        self._slope = scratch("slope", len(rows), items.shape[1])
        counts, slopes = steps(items, rows, thresholds.reshape(-1)[flat], scale, self._slope)
        zeros = torch.zeros_like(thresholds).view(-1)
        self.counts, self.slopes = (zeros.index_copy(0, flat, each).view_as(thresholds) for each in (counts, slopes))

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        if self._all:
            torch.bmm(weights.unsqueeze(1), self._slope.view(*weights.shape, -1), out=out.unsqueeze(1))
        else:
            self._slope.mul_(weights.reshape(-1)[self._flat].unsqueeze(1))
            out.zero_().index_add_(0, self._rows, self._slope)
        return out.scatter_add_(1, places, values)


class Band:
    """Only the items marked in `near`, (T, N): the others are so far below every member that they count nothing."""

    def __init__(self, items: Tensor, thresholds: Tensor, members: Tensor, scale: float, near: Tensor):
        self._shape, self._members = items.shape, members
        self._entry = near.view(-1).nonzero().squeeze(1)  # flat index of each marked item
        ends = items.shape[1] * torch.arange(len(items) + 1, device=items.device)
        self._starts = torch.searchsorted(self._entry, ends)
        self._row = torch.repeat_interleave(self._starts.diff())
        gap = items.view(-1).index_select(0, self._entry).unsqueeze(1) - thresholds.index_select(0, self._row)
        soft = gap.mul_(scale).sigmoid_()
        self.counts = self._sum_rows(soft)
        self._slope = soft.addcmul_(soft, soft, value=-1)
        self.slopes = self._sum_rows(self._slope)

    def _sum_rows(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=self._starts.diff(), axis=0, unsafe=True).mul_(self._members)

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Sparse (CSR); the places must be marked in `near` as well."""
        rows, columns = self._shape
        entries = self._entries(weights)
        flat = places + columns * torch.arange(rows, device=places.device).unsqueeze(1)
        entries.index_add_(0, torch.searchsorted(self._entry, flat.view(-1)), values.reshape(-1))
        return _sparse_rows(self._starts, self._entry - columns * self._row, entries, self._shape)

    def add_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        """Add to a dense gradient, (T, N)."""
        gradient.view(-1).index_add_(0, self._entry, self._entries(weights))

    def _entries(self, weights: Tensor) -> Tensor:
        return self._slope.mul_((weights * self._members).index_select(0, self._row)).sum(1)


class Both:
    """Members near the top by their band, the others by everything."""

    def __init__(self, band: Band, everything: Everything):
        self._band, self._everything = band, everything
        self.counts, self.slopes = band.counts + everything.counts, band.slopes + everything.slopes

    def gradient(self, weights: Tensor, places: Tensor, values: Tensor, out: Tensor) -> Tensor:
        self._band.add_gradient(self._everything.gradient(weights, places, values, out), weights)
        return out


class EachOther:
    """The thresholds of a row against each other, itself and padding left out: ranks among the positives alone."""

    def __init__(self, thresholds: Tensor, present: Tensor, scale: float):
        items = thresholds.masked_fill(~present, -torch.inf)
        soft = ((items.unsqueeze(1) - thresholds.unsqueeze(2)) * scale).sigmoid_()
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
