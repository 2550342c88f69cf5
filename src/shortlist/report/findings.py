"""Findings of an analysis: queries to show, confused classes, distributions and duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shortlist.data import Catalog
from shortlist.data.images import ImageError
from shortlist.progress import Progress
from shortlist.report.analysis import Analysis
from shortlist.report.pages import load_pixels
from shortlist.search import nearest

MIN_SIMILARITY = 1 - 1e-4  # of two images with equal pixels: their vectors are equal except for rounding
NEAR_SIMILARITY = 0.98  # of two images that a model hardly distinguishes
MAX_COMPARED = 2000  # maximum number of pairs whose pixels are compared; only collapsed embeddings have more


def choose_queries(
    analysis: Analysis, catalog: Catalog, group_size: int = 12, max_classes: int = 150
) -> dict[str, list[int]]:
    """Choose queries to show: a random sample, the worst, the best, and one per class.

    The worst queries have the highest rank of their first correct result, the best queries the largest margin. At most
    two queries per class are among the worst and the best, unless there are only one or two classes.

    Args:
        analysis: The analysis.
        catalog: The images.
        group_size: Number of queries in each of the first three groups.
        max_classes: Maximum number of classes in the last group.

    Returns:
        Indices of queries by group: "random", "worst", "best" and "every class".
    """
    answerable = analysis.answerable
    labels = catalog.labels[analysis.queries]
    shuffled = np.random.default_rng(0).permutation(answerable)
    by_margin = answerable[np.argsort(-analysis.margin[answerable], kind="stable")]
    by_rank = by_margin[::-1][np.argsort(-analysis.first_rank[by_margin[::-1]], kind="stable")]
    per_class = 2 if len(np.unique(labels)) > 2 else len(labels)
    ranked = {
        name: _limit_per_class(queries.tolist(), labels, per_class)[:group_size]
        for name, queries in {"worst": by_rank, "best": by_margin}.items()
    }
    every = shuffled.tolist() if catalog.judgements else _limit_per_class(shuffled.tolist(), labels, 1)
    every = sorted(every[:max_classes], key=lambda query: (catalog.class_names[labels[query]], query))
    return {"random": shuffled[:group_size].tolist(), **ranked, "every class": every}


def _limit_per_class(queries: Sequence[int], labels: NDArray[np.int64], limit: int) -> list[int]:
    """Return the first `limit` queries of each class, in the given order."""
    counts: dict[int, int] = {}
    kept = []
    for query in queries:
        label = int(labels[query])
        counts[label] = counts.get(label, 0) + 1
        if counts[label] <= limit:
            kept.append(query)
    return kept


@dataclass(frozen=True)
class Confusion:
    """Queries of one class whose first result is of another class.

    Args:
        query_label: Label of the queries.
        result_label: Label of their first results.
        count: Number of such queries.
        total: Number of queries of the class.
        examples: Indices of some of the queries, the largest negative margin first.
    """

    query_label: int
    result_label: int
    count: int
    total: int
    examples: list[int]


def confusions(analysis: Analysis, catalog: Catalog, limit: int = 12, num_examples: int = 4) -> list[Confusion]:
    """Return the pairs of classes that are confused most often; none for judged queries."""
    if catalog.judgements:
        return []
    answerable = analysis.answerable
    labels = catalog.labels[analysis.queries]
    totals = np.bincount(labels[answerable], minlength=len(catalog.class_names))
    wrong = answerable[~analysis.correct[answerable, 0]]
    result_labels = catalog.labels[analysis.results[wrong, 0]]
    pairs, pair_of, counts = np.unique(
        np.column_stack((labels[wrong], result_labels)), axis=0, return_inverse=True, return_counts=True
    )
    by_margin = np.argsort(analysis.margin[wrong], kind="stable")
    found = []
    for pair in np.argsort(-counts, kind="stable")[:limit].tolist():
        query_label, result_label = (int(label) for label in pairs[pair])
        examples = wrong[by_margin[pair_of.reshape(-1)[by_margin] == pair]][:num_examples].tolist()
        found.append(Confusion(query_label, result_label, int(counts[pair]), int(totals[query_label]), examples))
    return found


@dataclass(frozen=True)
class Bin:
    """Queries with a number from `low` to `high`.

    Args:
        low: Smallest number.
        high: Largest number.
        queries: Number of queries.
        r_at_k: Their r@k for each cut-off.
    """

    low: int
    high: int
    queries: int
    r_at_k: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The range as text."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} - {self.high:,}"


def recall_by_class_size(analysis: Analysis, k: Sequence[int]) -> list[Bin]:
    """Return r@k by the number of positives of a query, in bins 1, 2, 3 - 4, 5 - 8, ... without empty ones."""
    ranks = analysis.first_rank[analysis.answerable]
    sizes = analysis.num_positives[analysis.answerable]
    return [
        Bin(
            int(sizes[inside].min()),
            int(sizes[inside].max()),
            int(inside.sum()),
            tuple(float((ranks[inside] <= cutoff).mean()) for cutoff in k),
        )
        for _, _, inside in _doubling_bins(sizes)
        if inside.any()
    ]


def first_rank_histogram(analysis: Analysis) -> list[Bin]:
    """Return the number of queries by the rank of their first correct result, in bins 1, 2, 3 - 4, 5 - 8, ..."""
    ranks = analysis.first_rank[analysis.answerable]
    return [Bin(low, high, int(inside.sum())) for low, high, inside in _doubling_bins(ranks)]


def _doubling_bins(numbers: NDArray[np.int64]) -> list[tuple[int, int, NDArray[np.bool_]]]:
    """Return the first and last number of each bin, and a mask of the numbers inside it."""
    bins, low, high = [], 1, 1
    while low <= numbers.max(initial=0):
        bins.append((low, high, (numbers >= low) & (numbers <= high)))
        low, high = high + 1, 2 * high
    return bins


def separation(analysis: Analysis) -> float | None:
    """Return how often a positive pair is more similar than a negative pair of any query (AUC; ties count half)."""
    positives, negatives = analysis.positive_pairs.astype(float), analysis.negative_pairs.astype(float)
    if not positives.sum() or not negatives.sum():
        return None
    below = np.cumsum(negatives) - negatives / 2
    return float((positives * below).sum() / positives.sum() / negatives.sum())


@dataclass(frozen=True)
class IdenticalPairs:
    """Images with equal pixels and different labels.

    Args:
        pairs: Pairs of rows of the catalog.
        num_unchecked: Number of candidate pairs whose pixels were not compared.
    """

    pairs: list[tuple[int, int]]
    num_unchecked: int


def identical_pairs(analysis: Analysis, catalog: Catalog, progress: Progress | None = None) -> IdenticalPairs:
    """Find images with equal pixels and different labels among the results: at least one label is wrong.

    Equal pixels give equal vectors, so only the pixels of pairs with equal vectors are compared. Judged queries have no
    duplicates.
    """
    if catalog.judgements:
        return IdenticalPairs([], 0)
    query, rank = np.nonzero((analysis.similarities >= MIN_SIMILARITY) & (analysis.results >= 0))
    pairs = np.column_stack((analysis.queries[query], analysis.results[query, rank]))
    pairs = np.unique(np.sort(pairs[~catalog.share_label(pairs[:, 0], pairs[:, 1])], axis=1), axis=0)
    found = []
    for number, (one, other) in enumerate(pairs[:MAX_COMPARED].tolist()):
        if _have_equal_pixels(catalog, one, other):
            found.append((one, other))
        if progress is not None:
            progress(number + 1, min(len(pairs), MAX_COMPARED))
    return IdenticalPairs(found, max(0, len(pairs) - MAX_COMPARED))


def similar_pairs_across_classes(analysis: Analysis, catalog: Catalog) -> list[tuple[int, int]]:
    """Find wrong results whose vector is nearly that of the query: pairs of rows, the most similar first.

    Judged queries have none. Only the first results of each query are compared.
    """
    if catalog.judgements:
        return []
    near = (analysis.similarities >= NEAR_SIMILARITY) & ~analysis.correct & (analysis.results >= 0)
    query, rank = np.nonzero(near)
    pairs = np.sort(np.column_stack((analysis.queries[query], analysis.results[query, rank])), axis=1)
    pairs = pairs[np.argsort(-analysis.similarities[query, rank], kind="stable")]
    return list(dict.fromkeys((one, other) for one, other in pairs.tolist()))


def near_training_images(trained: Tensor, tested: Tensor) -> list[tuple[int, int]]:
    """Find test images whose vector is nearly that of a training image.

    Args:
        trained: Vectors of the training images, (n, d).
        tested: Vectors of the test images, (m, d).

    Returns:
        Rows of the nearest training image and of the test image, the most similar pair first.
    """
    scores, rows = (each[:, 0].numpy() for each in nearest(tested.cpu(), trained.cpu(), 1))
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= NEAR_SIMILARITY]
    return list(zip(rows[order].tolist(), order.tolist(), strict=True))


def _have_equal_pixels(catalog: Catalog, one: int, other: int) -> bool:
    try:
        return load_pixels(catalog, one).equal(load_pixels(catalog, other))
    except ImageError:
        return False
