"""What an analysis says to a person: which queries to look at, and why a search fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shortlist.data import Catalog
from shortlist.data.images import ImageError
from shortlist.report.analysis import Analysis
from shortlist.report.thumbnails import pixels

EQUAL = 1 - 1e-4  # similarity from which two images may be one: the same pixels give the same vector but for roundings
CHECKED = 2000  # pairs of that kind that are looked at: all, unless the embeddings have collapsed


def choose(analysis: Analysis, catalog: Catalog, each: int = 12, classes: int = 150) -> dict[str, list[int]]:
    """Numbers of queries to show: a random sample, the worst, the best, and one of every class (of at most `classes`).

    The worst have their first right result farthest behind, the best the widest margin before the first wrong one; at
    most two of a class, so that they show more than one thing, unless there are only one or two classes.
    """
    answerable = analysis.answerable
    labels = catalog.labels[analysis.queries]
    order = np.random.default_rng(0).permutation(answerable)
    by_margin = answerable[np.argsort(-analysis.margin[answerable], kind="stable")]
    by_rank = by_margin[::-1][np.argsort(-analysis.first[by_margin[::-1]], kind="stable")]
    ranked = {"worst": by_rank, "best": by_margin}
    most = 2 if len(np.unique(labels)) > 2 else len(labels)
    few = {name: _at_most(queries.tolist(), labels, most)[:each] for name, queries in ranked.items()}
    every = _at_most(order.tolist(), labels, 1) if not catalog.judgements else order.tolist()
    every = sorted(every[:classes], key=lambda query: (catalog.class_names[labels[query]], query))
    return {"random": order[:each].tolist(), **few, "every class": every}


def _at_most(queries: Sequence[int], labels: NDArray[np.int64], number: int) -> list[int]:
    """The queries without those of a class that has had so many."""
    seen: dict[int, int] = {}
    kept = []
    for query in queries:
        label = int(labels[query])
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= number:
            kept.append(query)
    return kept


@dataclass(frozen=True)
class Confusion:
    """A class whose queries find another class first: labels, how many queries of how many, and some of them."""

    asked: int
    found: int
    times: int
    queries: int
    examples: list[int]  # numbers of queries, the most certain mistakes first


def confusions(analysis: Analysis, catalog: Catalog, most: int = 12, examples: int = 4) -> list[Confusion]:
    """The pairs of classes confused most, by the first results of queries; none where answers are judged."""
    if catalog.judgements:
        return []
    answerable = analysis.answerable
    labels = catalog.labels[analysis.queries]
    of_class = np.bincount(labels[answerable], minlength=len(catalog.class_names))
    wrong = answerable[~analysis.right[answerable, 0]]
    found = catalog.labels[analysis.results[wrong, 0]]
    pairs, which, times = np.unique(
        np.column_stack((labels[wrong], found)), axis=0, return_inverse=True, return_counts=True
    )
    certain = np.argsort(analysis.margin[wrong], kind="stable")
    confused = []
    for number in np.argsort(-times, kind="stable")[:most].tolist():
        asked, instead = (int(label) for label in pairs[number])
        mine = wrong[certain[which.reshape(-1)[certain] == number]]
        confused.append(Confusion(asked, instead, int(times[number]), int(of_class[asked]), mine[:examples].tolist()))
    return confused


@dataclass(frozen=True)
class Share:
    """Some of the queries: from one number to another, how many, and which share of them each cut-off satisfies."""

    low: int
    high: int
    queries: int
    r_at_k: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} - {self.high:,}"


def by_size(analysis: Analysis, k: Sequence[int]) -> list[Share]:
    """r@k by the number of images that a query should find, in bins that double, as far as they are filled."""
    first = analysis.first[analysis.answerable]
    numbers = analysis.to_find[analysis.answerable]
    return [
        Share(int(numbers[mine].min()), int(numbers[mine].max()), int(mine.sum()), _r_at_k(first[mine], k))
        for _, _, mine in _doubling(numbers)
    ]


def _r_at_k(first: NDArray[np.int64], k: Sequence[int]) -> tuple[float, ...]:
    return tuple(float((first <= cut).mean()) for cut in k)


def first_ranks(analysis: Analysis) -> list[Share]:
    """How many queries have their first right result at which rank, in bins that double."""
    ranks = analysis.first[analysis.answerable]
    return [Share(low, high, int(mine.sum())) for low, high, mine in _doubling(ranks, gaps=True)]


def _doubling(numbers: NDArray[np.int64], gaps: bool = False) -> list[tuple[int, int, NDArray[np.bool_]]]:
    """Bins 1, 2, 3 - 4, 5 - 8, ...: their ends, and which of the numbers are inside; empty ones where `gaps`."""
    bins, low, high = [], 1, 1
    while low <= numbers.max(initial=0):
        inside = (numbers >= low) & (numbers <= high)
        if gaps or inside.any():
            bins.append((low, high, inside))
        low, high = high + 1, 2 * high
    return bins


def separation(analysis: Analysis) -> float | None:
    """How often a right pair is more similar than a wrong one, whatever their queries (ties half)."""
    right, wrong = analysis.right_pairs.astype(float), analysis.wrong_pairs.astype(float)
    if not right.sum() or not wrong.sum():
        return None
    below = np.cumsum(wrong) - wrong / 2
    return float((right * below).sum() / right.sum() / wrong.sum())


@dataclass(frozen=True)
class Duplicates:
    """Pairs of rows of the catalog with equal pixels and different classes, and how many pairs were not looked at."""

    pairs: list[tuple[int, int]]
    unchecked: int


def duplicates(analysis: Analysis, catalog: Catalog, progress: Callable[[int, int], None] | None = None) -> Duplicates:
    """The same picture in two classes: at least one label is wrong, and no embedder can tell which.

    Equal pixels give equal vectors, so only pairs of equal vectors are opened and compared. Judged answers have none.
    """
    if catalog.judgements:
        return Duplicates([], 0)
    query, place = np.nonzero((analysis.similarities >= EQUAL) & (analysis.results >= 0))
    pairs = np.column_stack((analysis.queries[query], analysis.results[query, place]))
    pairs = np.unique(np.sort(pairs[catalog.labels[pairs[:, 0]] != catalog.labels[pairs[:, 1]]], axis=1), axis=0)
    found = []
    for number, (one, other) in enumerate(pairs[:CHECKED].tolist()):
        if _same(catalog, one, other):
            found.append((one, other))
        if progress is not None:
            progress(number + 1, min(len(pairs), CHECKED))
    return Duplicates(found, max(0, len(pairs) - CHECKED))


def _same(catalog: Catalog, one: int, other: int) -> bool:
    try:
        return pixels(catalog, one).equal(pixels(catalog, other))
    except ImageError:
        return False
