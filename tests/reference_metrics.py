"""Slow, literal versions of the exact metrics: one query at a time, directly from their definitions."""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    similarity: float
    positive: bool


Ranking = list[Item]  # the database of one query, in any order


def rank(x: Item, database: Ranking) -> int:
    """Equation 2: 1 + the number of other items at least as similar. Ties count against x."""
    return 1 + sum(z is not x and z.similarity >= x.similarity for z in database)


def positives(database: Ranking) -> Ranking:
    return [x for x in database if x.positive]


def r_at_k(database: Ranking, k: int) -> float:
    """1 if a positive is among the first k, with every tie decided in favour of the negatives."""
    best = max(x.similarity for x in positives(database))
    ahead = sum(not z.positive and z.similarity >= best for z in database)
    return float(1 + ahead <= k)


def recall_at_k(database: Ranking, k: int) -> float:
    """Equation 1: the share of the positives whose rank is at most k."""
    found = [rank(x, database) <= k for x in positives(database)]
    return sum(found) / len(found)


def precision_at(x: Item, database: Ranking) -> float:
    """The share of positives among all items down to the positive x."""
    return rank(x, positives(database)) / rank(x, database)


def average_precision(database: Ranking) -> float:
    found = positives(database)
    return sum(precision_at(x, database) for x in found) / len(found)


def map_at_r(database: Ranking) -> float:
    """Average precision of the first R results, where R is the number of positives."""
    found = positives(database)
    return sum(precision_at(x, database) for x in found if rank(x, database) <= len(found)) / len(found)


def r_precision(database: Ranking) -> float:
    return recall_at_k(database, len(positives(database)))


def rankings(
    queries: list[list[float]],
    labels: list[int] | list[set[int]],
    gallery: list[list[float]] | None = None,
    gallery_labels: list[int] | list[set[int]] | None = None,
) -> dict[int, Ranking]:
    """The database of each query that has a positive. Without a gallery that is the other queries, by index.

    Items with several labels, as a set, are positives if they share any of them.
    """
    vectors = queries if gallery is None else gallery
    others = labels if gallery_labels is None else gallery_labels
    found = {}
    for q, (query, label) in enumerate(zip(queries, labels, strict=True)):
        database = [
            Item(sum(a * b for a, b in zip(query, vector, strict=True)), _relevant(other, label))
            for index, (vector, other) in enumerate(zip(vectors, others, strict=True))
            if gallery is not None or index != q
        ]
        if positives(database):
            found[q] = database
    return found


def _relevant(other: int | set[int], label: int | set[int]) -> bool:
    return bool(other & label) if isinstance(label, set) else other == label


# Judged queries (Revisited Oxford and Paris), as the protocol's words say


def ranks_of_positives(similarities: list[float], positives: list[int], junk: list[int]) -> list[int]:
    """Ranks from 0 in the sorted gallery without junk; among ties, wrong images come first."""
    right, neither = set(positives), set(junk)
    order = sorted(range(len(similarities)), key=lambda image: (-similarities[image], image in right))
    ranked = [image for image in order if image not in neither]
    return [rank for rank, image in enumerate(ranked) if image in right]


def trapezoidal_ap(ranks: list[int]) -> float:
    """The j-th positive (from 0) at rank r adds the mean of j / r (1 if r is 0) and (j + 1) / (r + 1)."""
    area = 0.0
    for j, r in enumerate(ranks):
        before = 1.0 if r == 0 else j / r
        area += (before + (j + 1) / (r + 1)) / 2 / len(ranks)
    return area


def precision_at_k(ranks: list[int], k: int) -> float:
    """Precision of the first min(k, rank of the last positive) results, with ranks from 1."""
    shown = min(k, max(ranks) + 1)
    return sum(r < shown for r in ranks) / shown
