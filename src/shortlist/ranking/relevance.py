"""Who is positive to whom, for a tile of queries at a time. Indices only: no similarity is known here."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_labels

HIDDEN = -torch.inf  # the similarity of an item that is no competitor: infinitely far, so it moves no rank


class Relevance(Protocol):
    """The positives P_q and the competitors of every query."""

    queries: Tensor  # (Q,) the queries that have a positive, those with few positives first
    counts: list[int]  # |P_q| for each of `queries`, ascending

    def positives(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Database indices of the positives of `rows`, (T, width), and which of them are real and not padding."""
        ...

    def hide(self, similarities: Tensor, rows: Tensor, positives: Tensor) -> None:
        """Leave in a (T, N) tile only what competes with the positives of its query; in place."""
        ...


class SameLabel:
    """Items of one label are positive to each other; every item but the query itself is in its database.

    Args:
        labels: (Q,) of the queries.
        database_labels: (N,) of another database. None: the queries rank each other.
        count_query: whether a query competes in its own ranking, as in the authors' release.
    """

    def __init__(self, labels: Tensor, database_labels: Tensor | None = None, count_query: bool = False):
        self._itself = database_labels is None
        self._hide_itself = self._itself and not count_query
        database_labels = labels if database_labels is None else database_labels
        self._members = database_labels.argsort(stable=True)
        by_label = database_labels[self._members]
        self._first = torch.searchsorted(by_label, labels)
        self._count = torch.searchsorted(by_label, labels, right=True) - self._first - int(self._itself)
        if self._itself:  # where each query stands among the members of its class: skipped there
            self._place = torch.empty_like(self._members)
            self._place[self._members] = torch.arange(len(labels), device=labels.device)
        self.queries, self.counts = few_positives_first(
            self._members if self._itself else labels.argsort(stable=True), self._count
        )

    def positives(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        offsets = torch.arange(width, device=rows.device)
        present = offsets < self._count[rows, None]
        place = self._first[rows, None] + offsets * present
        if self._itself:
            place += place >= self._place[rows, None]
        return self._members[place], present

    def hide(self, similarities: Tensor, rows: Tensor, positives: Tensor) -> None:
        similarities.scatter_(1, positives, HIDDEN)
        if self._hide_itself:
            similarities.scatter_(1, rows[:, None], HIDDEN)


class ListedPairs:
    """Positives and negatives as a miner lists them; a pair that is not listed takes no part.

    Args:
        indices: pytorch-metric-learning's tuple: pairs (anchors, positives, anchors, negatives) or triplets
            (anchors, positives, negatives). A pair listed twice counts once.
        queries, database: what the indices index.
    """

    def __init__(self, indices: tuple[Tensor, ...], queries: Tensor, database: Tensor):
        for index in indices:
            check_labels(index, "indices_tuple")
            if index.device != queries.device:
                raise ValueError(f"indices_tuple is on {index.device} but the embeddings on {queries.device}")
        shape = len(queries), len(database)
        if len(indices) not in (3, 4):
            raise ValueError(f"indices_tuple must hold 3 tensors (triplets) or 4 (pairs), got {len(indices)}")
        anchors, positives, *negative = indices
        rivals, negatives = negative if len(negative) == 2 else (anchors, *negative)
        self._positive, self._first, self._count = _rows_of_pairs(anchors, positives, shape)
        self._negative, self._first_negative, self._count_negative = _rows_of_pairs(rivals, negatives, shape)
        everyone = torch.arange(shape[0], device=anchors.device)
        self.queries, self.counts = few_positives_first(everyone, self._count)

    def positives(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        offsets = torch.arange(width, device=rows.device)
        present = offsets < self._count[rows, None]
        return self._positive[self._first[rows, None] + offsets * present], present

    def hide(self, similarities: Tensor, rows: Tensor, positives: Tensor) -> None:
        count = self._count_negative[rows]
        tile_row = torch.repeat_interleave(count)
        step = torch.arange(len(tile_row), device=rows.device) - (count.cumsum(0) - count)[tile_row]
        hidden = torch.ones_like(similarities, dtype=torch.bool)
        hidden[tile_row, self._negative[self._first_negative[rows][tile_row] + step]] = False
        similarities.masked_fill_(hidden, HIDDEN)


def few_positives_first(queries: Tensor, count: Tensor) -> tuple[Tensor, list[int]]:
    """Queries that have a positive, by number of positives, so that a tile holds rows of about one width."""
    count = count[queries]
    order = count.argsort(stable=True)
    order = order[count[order] > 0]
    return queries[order], count[order].tolist()


def _rows_of_pairs(anchors: Tensor, others: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct pairs grouped by anchor: the others, and for each anchor where its group starts and how long it is."""
    if anchors.shape != others.shape:
        raise ValueError(f"indices_tuple has {len(anchors)} anchors for {len(others)} others: they go in pairs")
    for name, index, size in (("query", anchors, shape[0]), ("database", others, shape[1])):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(f"indices_tuple names a {name} item outside 0..{size - 1}")
    key = torch.unique(anchors.long() * shape[1] + others.long())
    count = torch.bincount(key // max(shape[1], 1), minlength=shape[0])
    return key % max(shape[1], 1), count.cumsum(0) - count, count
