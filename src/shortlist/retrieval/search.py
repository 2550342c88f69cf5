"""The exact nearest neighbours, in a stream: in memory are the answer and one block of similarities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import DataError
from shortlist.ranking.precision import full_precision
from shortlist.retrieval.self_search import candidates
from shortlist.retrieval.vectors import Vectors, blocks

SIDE = 8_192  # queries at a time: wide enough that what must be compared with the best so far is little
NUMBERS = 2**25  # of a block: 128 MB in float32


def nearest(
    queries: Vectors,
    gallery: Vectors,
    k: int,
    *,
    competes: NDArray[np.bool_] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k vectors of a gallery with the largest inner product with each query, computed in float32.

    Where the gallery is the queries, the same object, each product is computed once. Which of several equal
    similarities is the last to be taken is not defined.

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
        raise DataError(f"k is how many to find, 1 or more, not {k}")
    device = queries.device if isinstance(queries, Tensor) else torch.device("cpu")
    k = min(k, len(gallery) if competes is None else int(competes.sum()))
    with full_precision(device):
        if gallery is queries and competes is None and device.type == "cpu" and k:
            return _among_themselves(queries, k, progress)
        best = _Best(len(queries), k, device)
        done, total = 0, len(queries) * len(gallery)
        for rows, columns, similarities in _products(queries, gallery, device):
            if competes is not None:
                aside = torch.from_numpy(~competes[columns : columns + similarities.shape[1]]).to(device)
                similarities[:, aside] = -torch.inf
            best.take(rows, columns, similarities)
            done += similarities.numel()
            if progress is not None:
                progress(done, total)
        return _sorted(best.values, best.rows)


def _among_themselves(vectors: Vectors, k: int, progress: Callable[[int, int], None] | None) -> tuple[Tensor, Tensor]:
    for first, block in blocks([vectors], SIDE, torch.empty(0)):
        _check_finite(block, first, "queries")
    found = candidates(vectors, k, progress)
    values, rows = found.best()
    if len(few := found.few):
        again = torch.from_numpy(np.array(vectors[few])) if not isinstance(vectors, Tensor) else vectors[few]
        values[few], rows[few] = nearest(again, vectors, k)
    return _sorted(values, rows)


Block = tuple[int, int, Tensor]  # the first query, the first vector of the gallery, and their similarities


def _products(queries: Vectors, gallery: Vectors, device: torch.device) -> Iterator[Block]:
    like = torch.empty(0, device=device)
    side = max(1, min(SIDE, len(queries)))
    width = max(1, NUMBERS // max(side, gallery.shape[1], 1))
    for row, some in blocks([queries], side, like):
        _check_finite(some, row, "queries")
        for column, block in blocks([gallery], width, like):
            if not row:
                _check_finite(block, column, "gallery")
            yield row, column, some @ block.T


class _Best:
    """The best k so far of each query."""

    def __init__(self, queries: int, k: int, device: torch.device) -> None:
        self.k = k
        self.values = torch.full((queries, k), -torch.inf, device=device)
        self.rows = torch.full((queries, k), -1, dtype=torch.int64, device=device)
        self.begun = torch.zeros(queries, dtype=torch.bool)

    def take(self, first: int, column: int, similarities: Tensor) -> None:
        """Look at more of the gallery: columns from `column` on, for the queries from `first` on."""
        mine = slice(first, first + len(similarities))
        values, rows = self.values[mine], self.rows[mine]
        if not self.begun[first]:
            found = similarities.topk(min(self.k, similarities.shape[1]), sorted=False)
            values[:, : found.values.shape[1]] = found.values
            rows[:, : found.values.shape[1]] = found.indices + column
            self.begun[mine] = True
            return
        more, places = _above(similarities, values.amin(1))
        if not more.shape[1]:
            return
        joined = torch.cat((values, more), dim=1)
        found = joined.topk(self.k, sorted=False)
        torch.gather(torch.cat((rows, places + column), dim=1), 1, found.indices, out=rows)
        values.copy_(found.values)


def _sorted(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """In place: the best first, equal ones by their rows."""
    for start in range(0, len(values), SIDE):
        some, theirs = values[start : start + SIDE], rows[start : start + SIDE]
        bits = (some + 0.0).contiguous().view(torch.int32)  # + 0.0: there is but one zero
        ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
        order = ((ascending.long() << 32) | (0xFFFFFFFF - theirs)).argsort(dim=1, descending=True)
        some.copy_(some.gather(1, order))
        theirs.copy_(theirs.gather(1, order))
    return values, rows


def _above(similarities: Tensor, bar: Tensor) -> tuple[Tensor, Tensor]:
    """What is above the bar of its row, moved to the left, and which columns that are; -inf where a row has fewer."""
    above = bar < similarities.T if similarities.stride(1) != 1 else (similarities > bar[:, None]).T
    above = above.T.contiguous()
    counts = above.sum(1)
    row, column = above.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    shape = (len(similarities), int(counts.max()))
    more = torch.full(shape, -torch.inf, device=row.device)
    more[row, place] = similarities[row, column]
    columns = torch.zeros(shape, dtype=torch.int64, device=row.device)
    columns[row, place] = column
    return more, columns


def _check_finite(vectors: Tensor, first: int, of: str) -> None:
    bad = ~vectors.isfinite().all(1)
    if bad.any():
        raise DataError(f"row {first + int(bad.nonzero()[0])} of the {of} holds numbers that are not finite")
