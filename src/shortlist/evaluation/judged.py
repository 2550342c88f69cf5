"""Queries whose results are judged one by one, as in Revisited Oxford and Paris: positives, junk, and negatives.

Junk is neither right nor wrong: it is removed from a ranking before ranks are counted. The gallery can have any length
(R1M has a million images). It is read in blocks, and only the number of images ahead of each positive is kept. Ties
count as ahead, up to the rounding error of a dot product, as in all metrics (see `ranking.metrics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.data import Judgement, Judgements
from shortlist.errors import DataError
from shortlist.progress import Progress
from shortlist.ranking.count_at_least import count_at_least
from shortlist.ranking.precision import computed_dtype, full_precision
from shortlist.ranking.ranker import Ranker, TensorSource, rounding
from shortlist.search.vectors import VectorReader, Vectors

Rows = NDArray[np.int64]


class JudgedScores(NamedTuple):
    """The scores of the Q queries that have a positive in a setup, for K cut-offs."""

    queries: Rows  # (Q,) indices of the queries, ascending
    average_precision: NDArray[np.float64]  # (Q,) by the trapezoidal rule
    precision_at_k: NDArray[np.float64]  # (Q, K) of the first k results, or up to the last positive if that is earlier


def judged_scores(
    queries: Tensor,
    gallery: Sequence[Vectors],
    judgements: Judgements,
    k: Sequence[int] = (1, 5, 10),
    *,
    searchable: NDArray[np.bool_] | None = None,
    progress: Progress | None = None,
) -> dict[str, JudgedScores]:
    """Compute the scores of every query in every setup.

    Queries without a positive in a setup are left out of that setup.

    Args:
        queries: (Q, d), used as given. Half precision is compared in float32.
        gallery: Tensors, arrays or memory maps (n, d), which are searched as one.
        judgements: Per setup, one judgement for each query. Its rows refer to the concatenated gallery.
        k: Cut-offs of the precision.
        searchable: Mask of the first rows of the gallery: False for rows that are excluded from all rankings, such as
            the queries of a catalog. All further rows are searched.
        progress: Called with the number of gallery rows done and the total number.

    Raises:
        DataError: The dimensions differ, a value is not finite, or an image is both positive and junk.
    """
    _check(queries, gallery, judgements)
    queries = queries.detach().to(computed_dtype(queries))
    reader = VectorReader(gallery, queries, release=True)
    by_query = zip(*judgements.values(), strict=True)
    with full_precision(queries.device):
        images = [_judged_images(query, reader, each) for query, each in zip(queries, by_query, strict=True)]
    ahead = _count_unjudged_ahead(queries, reader, images, searchable, progress)
    return {
        setup: _scores([_ranks(*each) for each in zip(judged, images, ahead, strict=True)], k)
        for setup, judged in judgements.items()
    }


@dataclass(frozen=True)
class _JudgedImages:
    """The images that are judged for a query in any setup. All other images are negatives in all setups."""

    rows: Rows  # (m,) ascending
    similarities: NDArray[np.floating]  # (m,)
    tie_thresholds: NDArray[np.floating]  # (m,) similarity from which another image counts as ahead of this one
    positive_thresholds: NDArray[np.floating]  # tie thresholds of the positives of any setup, ascending


def _judged_images(query: Tensor, gallery: VectorReader, judged: Sequence[Judgement]) -> _JudgedImages:
    rows = np.unique(np.concatenate([part for each in judged for part in (each.positives, each.junk)]))
    vectors = gallery.take(rows)
    similarities = vectors @ query
    error = rounding(len(query), query.dtype) * query.norm() * vectors.norm(dim=1)
    tie_thresholds = (similarities - error).cpu().numpy()
    positive = np.isin(rows, np.concatenate([each.positives for each in judged]))
    return _JudgedImages(rows, similarities.cpu().numpy(), tie_thresholds, np.sort(tie_thresholds[positive]))


def _count_unjudged_ahead(
    queries: Tensor,
    gallery: VectorReader,
    images: Sequence[_JudgedImages],
    searchable: NDArray[np.bool_] | None,
    progress: Progress | None,
) -> list[Rows]:
    """For each positive threshold of each query, count the unjudged images that reach it."""
    padded = np.full((len(images), max((len(each.positive_thresholds) for each in images), default=0)), np.inf)
    for row, each in zip(padded, images, strict=True):
        row[: len(each.positive_thresholds)] = each.positive_thresholds
    thresholds = torch.from_numpy(padded).to(queries)
    counts = torch.zeros(padded.shape, dtype=torch.int64, device=queries.device)
    judged = pairs([each.rows for each in images], queries.device)
    excluded = torch.zeros(len(gallery), dtype=torch.bool, device=queries.device)
    if searchable is not None:
        excluded[: len(searchable)] = torch.from_numpy(~searchable)
    ranker = Ranker(TensorSource(queries), gallery, judged, excluded, check=_check_finite)
    for tile in ranker.tiles():
        counts += count_at_least(tile.similarities, thresholds)
        if progress is not None:
            progress(tile.items.stop, len(gallery))
    return [row[: len(each.positive_thresholds)] for row, each in zip(counts.cpu().numpy(), images, strict=True)]


def pairs(columns: Sequence[Rows], device: torch.device) -> tuple[Tensor, Tensor]:
    """Convert a list of columns per row to the row and column of every cell."""
    rows = np.repeat(np.arange(len(columns)), [len(each) for each in columns])
    return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate([*columns, rows[:0]])).to(device)


def _check_finite(similarities: Tensor, first: int) -> None:
    if not similarities.isfinite().all():
        bad = first + int((~similarities.isfinite()).any(0).nonzero()[0])
        raise DataError(f"Row {bad} of the gallery, or a query, contains values that are not finite or too large.")


def _ranks(judgement: Judgement, images: _JudgedImages, unjudged_ahead: Rows) -> Rows:
    """Return the ranks of the positives, from 0: the number of negatives and of other positives ahead, without junk."""
    positive, junk = (np.isin(images.rows, rows) for rows in (judgement.positives, judgement.junk))
    thresholds = np.sort(images.tie_thresholds[positive])[::-1]
    negatives = np.sort(images.similarities[~positive & ~junk])  # judged in another setup only
    judged_ahead = len(negatives) - np.searchsorted(negatives, thresholds, side="left")
    positions = np.searchsorted(images.positive_thresholds, thresholds)
    ranks: Rows = unjudged_ahead[positions] + judged_ahead + np.arange(len(thresholds))
    return ranks


def _scores(ranks: Sequence[Rows], k: Sequence[int]) -> JudgedScores:
    queries = [query for query, each in enumerate(ranks) if len(each)]
    precision = [average_precision(ranks[query]) for query in queries]
    at_k = [[_precision_at(ranks[query], cut) for cut in k] for query in queries]
    return JudgedScores(np.array(queries, dtype=np.int64), np.array(precision), np.array(at_k).reshape(-1, len(k)))


def average_precision(ranks: Rows) -> float:
    """Compute the area under precision over recall by the trapezoidal rule.

    Args:
        ranks: Ranks of the positives, from 0, ascending.
    """
    found = np.arange(len(ranks))
    before = np.where(ranks == 0, 1.0, found / np.maximum(ranks, 1))
    after = (found + 1) / (ranks + 1)
    return float((before + after).sum() / 2 / len(ranks))


def _precision_at(ranks: Rows, k: int) -> float:
    """Compute the precision of the first k results, or of those up to the last positive if there are fewer."""
    shown = min(k, int(ranks[-1]) + 1)
    return float((ranks < shown).sum() / shown)


def _check(queries: Tensor, gallery: Sequence[Vectors], judgements: Judgements) -> None:
    for part in gallery:
        if part.ndim != 2 or part.shape[1] != queries.shape[1]:
            raise DataError(f"The queries have {queries.shape[1]} dimensions, but the gallery {tuple(part.shape)}.")
    for setup, judged in judgements.items():
        for query, each in enumerate(judged):
            both = np.intersect1d(each.positives, each.junk)
            if len(both):
                raise DataError(f"{setup or 'A judgement'}: row {both[0]} is both positive and junk of query {query}.")
