"""Positives and competitors of each query, as indices. Similarities are not known here."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_labels

CountQuery = bool | Literal["positive"]  # how a query counts in its own ranking; see `SameLabel`
HIDDEN = -torch.inf  # similarity assigned to an item that is not a competitor, so that it does not affect any rank


class Relevance(Protocol):
    """The positives P_q and the competitors of every query q."""

    queries: Tensor  # (Q,) indices of the queries that have a positive, in ascending order of their number of positives
    counts: list[int]  # |P_q| for each of `queries`

    def positives(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the database indices of the positives of some queries.

        Args:
            rows: Query indices of shape (T,).
            width: Largest number of positives among these queries.

        Returns:
            Database indices of shape (T, width), and a boolean mask of the same shape that is False for padding.
        """
        ...

    def hide(self, similarities: Tensor, rows: Tensor, positives: Tensor) -> None:
        """Set all similarities of a tile to HIDDEN, in place, except those of the competitors of the positives.

        Args:
            similarities: Similarities of shape (T, N).
            rows: Query indices of shape (T,).
            positives: Database indices of the positives, of shape (T, P).
        """
        ...


class SameLabel:
    """Items with equal labels are positives of each other; all other items are negatives.

    Args:
        labels: Labels of the queries, of shape (Q,).
        database_labels: Labels of a separate database, of shape (N,). If None, the queries are the database, and a
            query is not a positive of itself.
        count_query: Whether a query competes in its own ranking, as in the authors' released code. "positive": it is
            also one of its own positives, as in the released code of Smooth-AP.
    """

    def __init__(self, labels: Tensor, database_labels: Tensor | None = None, count_query: CountQuery = False):
        self._own_database = database_labels is None and count_query != "positive"
        self._hide_query = self._own_database and not count_query
        database_labels = labels if database_labels is None else database_labels
        self._by_label = database_labels.argsort(stable=True)  # database indices, class by class
        sorted_labels = database_labels[self._by_label]
        self._first = torch.searchsorted(sorted_labels, labels)
        self._count = torch.searchsorted(sorted_labels, labels, right=True) - self._first - int(self._own_database)
        if self._own_database:  # position of each query in `_by_label`, where it is skipped
            self._position = torch.empty_like(self._by_label)
            self._position[self._by_label] = torch.arange(len(database_labels), device=labels.device)
        self.queries, self.counts = few_positives_first(labels.argsort(stable=True), self._count)

    def positives(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        offsets = torch.arange(width, device=rows.device)
        present = offsets < self._count[rows, None]
        position = self._first[rows, None] + offsets * present
        if self._own_database:
            position += position >= self._position[rows, None]
        return self._by_label[position], present

    def hide(self, similarities: Tensor, rows: Tensor, positives: Tensor) -> None:
        similarities.scatter_(1, positives, HIDDEN)
        if self._hide_query:
            similarities.scatter_(1, rows[:, None], HIDDEN)


class _ListedPositives:
    """Positives that are listed as pairs of queries and items; repeated pairs count once."""

    def __init__(self, anchors: Tensor, positives: Tensor, shape: tuple[int, int]):
        self._positive, self._first, self._count = _group_by_anchor(anchors, positives, shape)
        self.queries, self.counts = few_positives_first(torch.arange(shape[0], device=anchors.device), self._count)

    def positives(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        offsets = torch.arange(width, device=rows.device)
        present = offsets < self._count[rows, None]
        return self._positive[self._first[rows, None] + offsets * present], present


class SharedLabel(_ListedPositives):
    """Items that share any label are positives of each other; all other items are negatives.

    Args:
        labels: Labels of the queries, of shape (Q, L). Negative numbers are padding.
        database_labels: Labels of a separate database, of shape (N, M). If None, the queries are the database, and a
            query is not a positive of itself.
        count_query: See `SameLabel`.
    """

    def __init__(self, labels: Tensor, database_labels: Tensor | None = None, count_query: CountQuery = False):
        self._hide_query = database_labels is None and not count_query
        without_itself = database_labels is None and count_query != "positive"
        database_labels = labels if database_labels is None else database_labels
        query, place = (labels >= 0).nonzero(as_tuple=True)
        item, column = (database_labels >= 0).nonzero(as_tuple=True)
        own, others = labels[query, place], database_labels[item, column]
        by_label = others.argsort(stable=True)
        first, end = (torch.searchsorted(others[by_label], own, right=right) for right in (False, True))
        occurrence, position = _enumerate(first, end - first)
        anchors, positives = query[occurrence], item[by_label[position]]
        if without_itself:
            anchors, positives = (each[anchors != positives] for each in (anchors, positives))
        super().__init__(anchors, positives, (len(labels), len(database_labels)))

    def hide(self, similarities: Tensor, rows: Tensor, positives: Tensor) -> None:
        similarities.scatter_(1, positives, HIDDEN)
        if self._hide_query:
            similarities.scatter_(1, rows[:, None], HIDDEN)


def label_relevance(
    labels: Tensor, database_labels: Tensor | None = None, count_query: CountQuery = False
) -> SameLabel | SharedLabel:
    """Return the relevance of labels of shape (Q,), or (Q, L) for items with several labels; see `SharedLabel`."""
    if labels.ndim == 1 and (database_labels is None or database_labels.ndim == 1):
        return SameLabel(labels, database_labels, count_query)
    database = None if database_labels is None else database_labels.reshape(len(database_labels), -1)
    return SharedLabel(labels.reshape(len(labels), -1), database, count_query)


class ListedPairs(_ListedPositives):
    """Positive and negative pairs as returned by a miner. Pairs that are not listed are ignored.

    Args:
        indices: Tuple as in pytorch-metric-learning: pairs (anchors, positives, anchors, negatives) or triplets
            (anchors, positives, negatives). Repeated pairs count once.
        queries: Queries, which the anchors index.
        database: Database, which the positives and negatives index.
    """

    def __init__(self, indices: tuple[Tensor, ...], queries: Tensor, database: Tensor):
        for index in indices:
            check_labels(index, "indices_tuple")
            if index.device != queries.device:
                raise ValueError(
                    f"indices_tuple is on {index.device} but the embeddings on {queries.device}: move one of them "
                    "with .to()"
                )
        shape = len(queries), len(database)
        if len(indices) not in (3, 4):
            raise ValueError(f"indices_tuple must hold 3 tensors (triplets) or 4 (pairs), got {len(indices)}")
        anchors, positives, *rest = indices
        negative_anchors, negatives = rest if len(rest) == 2 else (anchors, *rest)
        super().__init__(anchors, positives, shape)
        self._negative, self._first_negative, self._count_negative = _group_by_anchor(
            negative_anchors, negatives, shape
        )

    def hide(self, similarities: Tensor, rows: Tensor, positives: Tensor) -> None:
        tile_row, place = _enumerate(self._first_negative[rows], self._count_negative[rows])
        hidden = torch.ones_like(similarities, dtype=torch.bool)
        hidden[tile_row, self._negative[place]] = False
        similarities.masked_fill_(hidden, HIDDEN)


def _enumerate(first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Enumerate ranges of positions: return the range that each position belongs to, and all positions."""
    owner = torch.repeat_interleave(count)
    return owner, torch.arange(len(owner), device=count.device) - (count.cumsum(0) - count - first)[owner]


def few_positives_first(queries: Tensor, count: Tensor) -> tuple[Tensor, list[int]]:
    """Sort the queries that have a positive by their number of positives, so that tiles need little padding.

    Args:
        queries: Query indices of shape (Q,).
        count: Number of positives of each query.

    Returns:
        The sorted indices, and the number of positives of each.
    """
    count = count[queries]
    order = count.argsort(stable=True)
    order = order[count[order] > 0]
    return queries[order], count[order].tolist()


def _group_by_anchor(anchors: Tensor, others: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Group distinct pairs by their anchor.

    Returns:
        The other items, anchor by anchor; and for each query the start and the length of its group.
    """
    if anchors.shape != others.shape:
        raise ValueError(
            f"indices_tuple has {len(anchors)} anchors but {len(others)} positives or negatives for them: each pair "
            "needs one of both"
        )
    for name, index, size in (("query", anchors, shape[0]), ("database", others, shape[1])):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(f"indices_tuple contains a {name} index outside 0..{size - 1}")
    key = torch.unique(anchors.long() * shape[1] + others.long())
    count = torch.bincount(key // max(shape[1], 1), minlength=shape[0])
    return key % max(shape[1], 1), count.cumsum(0) - count, count
