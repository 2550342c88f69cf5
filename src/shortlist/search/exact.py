"""The exact nearest neighbours, in a stream: in memory are the answer and a few blocks.

What a product must reach to count is known before: by a sample of the gallery, a little more than k of its vectors
reach that bar. Only those are looked at again. A query whose bar was too high is done over without one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import ConfigError, DataError
from shortlist.ranking.precision import full_precision
from shortlist.search.among_themselves import candidates
from shortlist.search.vectors import Progress, Vectors, blocks, take

QUERIES, NUMBERS = 4_096, 2**23  # of a block of products: 32 MB
WIDEST = 65_536  # vectors of the gallery at a time, however few the queries are
SAMPLE = 2_048  # vectors of the gallery that the bars come from
AT_ONCE = 1_024  # answers that are put in order
LOWEST = torch.finfo(torch.float32).min


def nearest(
    queries: Vectors,
    gallery: Vectors,
    k: int,
    *,
    competes: NDArray[np.bool_] | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """The k vectors of a gallery with the largest inner product with each query, computed in float32.

    Which of several equal similarities is the last to be taken is not defined. Where the gallery is the queries, the
    same object, each product is computed once, and the two tensors are views of one memory.

    Args:
        queries: (q, d); a tensor's device is where the work is done.
        gallery: (n, d), maybe memory-mapped and of half precision.
        k: how many; fewer if there are fewer.
        competes: (n,) which rows of the gallery can be found; None for all.
        progress: called with the number of products done, and of all.

    Returns:
        Similarities, the best first, and rows, equal ones in their order: (q, k) each.

    Raises:
        DataError: dimensions that differ, or numbers that are not finite.

    Example:
        >>> nearest(torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]]), k=1)[1]
        tensor([[0],
                [1]])
    """
    if queries.ndim != 2 or gallery.ndim != 2 or queries.shape[1] != gallery.shape[1]:
        raise DataError(f"the queries are {tuple(queries.shape)}, but the gallery is {tuple(gallery.shape)}")
    if k < 1:
        raise ConfigError(f"`k` is how many to find, 1 or more, not {k}")
    like = torch.empty(0, device=queries.device if isinstance(queries, Tensor) else "cpu")
    rows = np.arange(len(gallery)) if competes is None else np.flatnonzero(competes)
    k = min(k, len(rows))
    values = torch.empty(len(queries), k, device=like.device)
    found = torch.empty(len(queries), k, dtype=torch.int64, device=like.device)
    with full_precision(like.device):
        if gallery is queries and competes is None and like.device.type == "cpu" and k:
            return _among_themselves(queries, k, progress)
        search = _Search(gallery, k, rows, like) if len(rows) else None
        for start, some in blocks([queries], QUERIES, like):
            _check_finite(some, start, "queries")
            mine = slice(start, start + len(some))
            if search is not None:
                values[mine], found[mine] = search.nearest(some)
            if progress is not None:
                progress(mine.stop * len(gallery), len(queries) * len(gallery))
    return values, found


def _among_themselves(vectors: Vectors, k: int, progress: Progress | None) -> tuple[Tensor, Tensor]:
    for first, block in blocks([vectors], QUERIES, torch.empty(0)):
        _check_finite(block, first, "queries")
    found = candidates(vectors, k, progress)
    values, rows = found.best()
    if len(few := found.few):
        values[few], rows[few] = nearest(take([vectors], few, values), vectors, k)
    return _sorted(values, rows)


class _Search:
    """One gallery, for a block of queries at a time."""

    def __init__(self, gallery: Vectors, k: int, rows: NDArray[np.int64], like: Tensor) -> None:
        self.gallery, self.k, self.like = gallery, k, like
        everything = len(rows) == len(gallery)
        self.aside = None if everything else torch.ones(len(gallery), dtype=torch.bool, device=like.device)
        if self.aside is not None:
            self.aside[torch.from_numpy(rows).to(like.device)] = False
        chosen = rows[np.linspace(0, len(rows) - 1, SAMPLE).astype(np.int64)] if len(rows) > SAMPLE else rows[:0]
        self.sample = take([gallery], chosen, like)
        reach = k * len(self.sample) / len(rows)  # of the sample, if it is like the whole
        self.rank = int(np.ceil(reach + 2 * reach**0.5 + 1))  # two standard deviations more: rather more than fewer
        self.products = torch.empty(0, device=like.device)

    def nearest(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        lowest = torch.full((len(queries),), LOWEST, device=queries.device)
        sampled = self.rank <= len(self.sample)
        bars = (queries @ self.sample.T).topk(self.rank, sorted=False).values.amin(1) if sampled else lowest
        values, rows = self._reaching(queries, bars)
        few = values.isinf().any(1)
        if few.any():
            values[few], rows[few] = self._reaching(queries[few], lowest[few])
        return _sorted(values, rows)

    def _reaching(self, queries: Tensor, bars: Tensor) -> tuple[Tensor, Tensor]:
        """The best k of what reaches the bars, in no order; -inf where fewer do."""
        width = min(WIDEST, max(1, NUMBERS // len(queries)))
        best = _Best(bars, self.k, width)
        for first, block in blocks([self.gallery], width, self.like):
            if self.products.shape != (len(queries), len(block)):
                self.products = torch.empty(len(queries), len(block), device=queries.device)
            similarities = torch.mm(queries, block.T, out=self.products)  # not into new memory, which costs time
            _check_finite(similarities[0, :, None], first, "gallery")  # one query tells
            if self.aside is not None:
                similarities[:, self.aside[first : first + len(block)]] = -torch.inf
            best.take(first, similarities)
        return best.kept()


class _Best:
    """What reaches the bars of some queries: the best k of each, and room for a block's more."""

    def __init__(self, bars: Tensor, k: int, width: int) -> None:
        self.bars, self.k = bars, k
        self.values = torch.full((len(bars), k + width), -torch.inf, device=bars.device)
        self.rows = torch.zeros_like(self.values, dtype=torch.int64)
        self.counts = torch.zeros(len(bars), dtype=torch.int64, device=bars.device)

    def take(self, first: int, similarities: Tensor) -> None:
        """Look at a block of the gallery, whose first row is `first`."""
        (place,) = (similarities >= self.bars[:, None]).view(-1).nonzero(as_tuple=True)
        query = place.div(similarities.shape[1], rounding_mode="floor")
        more = torch.bincount(query, minlength=len(self.bars))
        if (self.counts + more).amax() > self.values.shape[1]:
            self.kept()
        free = torch.arange(len(self.bars), device=query.device) * self.values.shape[1] + self.counts
        to = torch.arange(len(query), device=query.device) + (free - more.cumsum(0) + more)[query]
        self.values.view(-1)[to] = similarities.view(-1)[place]
        self.rows.view(-1)[to] = place - query * similarities.shape[1] + first
        self.counts += more

    def kept(self) -> tuple[Tensor, Tensor]:
        """Drop all but the best k, which are the new bars."""
        best = self.values.topk(self.k, sorted=False)
        self.rows[:, : self.k] = self.rows.gather(1, best.indices)
        self.values[:, : self.k], self.values[:, self.k :] = best.values, -torch.inf
        self.counts.fill_(self.k)
        self.bars = torch.maximum(self.bars, best.values.amin(1))
        return self.values[:, : self.k], self.rows[:, : self.k]


def _sorted(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """In place: the best first, equal ones by their rows."""
    for start in range(0, len(values), AT_ONCE):
        some, theirs = values[start : start + AT_ONCE], rows[start : start + AT_ONCE]
        bits = (some + 0.0).view(torch.int32)  # + 0.0: there is but one zero
        ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
        order = ((ascending.long() << 32) | (0xFFFFFFFF - theirs)).argsort(dim=1, descending=True)
        some.copy_(some.gather(1, order))
        theirs.copy_(theirs.gather(1, order))
    return values, rows


def _check_finite(vectors: Tensor, first: int, of: str) -> None:
    bad = ~vectors.isfinite().all(1)
    if bad.any():
        raise DataError(f"row {first + int(bad.nonzero()[0])} of the {of} holds numbers that are not finite")
