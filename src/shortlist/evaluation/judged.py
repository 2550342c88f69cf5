"""Queries whose results are judged one by one, as in Revisited Oxford and Paris: positives, junk, and negatives.

Junk is neither right nor wrong: it is removed from a ranking before ranks are counted. The gallery can have any length
(R1M has a million images). It is read in blocks, and of each block only the number of images ahead of each positive is
kept. Ties count as ahead, up to the rounding error of a dot product, as in all metrics (see `ranking.metrics`).
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
from shortlist.ranking.metrics import rounding
from shortlist.ranking.precision import computed_dtype, full_precision
from shortlist.ranking.relevance import HIDDEN
from shortlist.search.vectors import Vectors, blocks, take

_VALUES_PER_BLOCK = 2**22  # of the vectors of a block, and of its similarities

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
        searchable: Mask of the first rows of the gallery: False for rows that are in no ranking, such as the queries of
            a catalog. All rows after those are searched.
        progress: Called with the number of gallery rows done and the total number.

    Raises:
        DataError: The dimensions differ, a value is not finite, or an image is both positive and junk.
    """
    _check(queries, gallery, judgements)
    queries = queries.detach().to(computed_dtype(queries))
    with full_precision(queries.device):
        images = [
            _judged_images(query, gallery, each) for query, each in zip(queries, _by_query(judgements), strict=True)
        ]
        ahead = _count_unjudged_ahead(queries, gallery, images, searchable, progress)
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


def _by_query(judgements: Judgements) -> list[tuple[Judgement, ...]]:
    return list(zip(*judgements.values(), strict=True))


def _judged_images(query: Tensor, gallery: Sequence[Vectors], judged: Sequence[Judgement]) -> _JudgedImages:
    rows = np.unique(np.concatenate([part for each in judged for part in (each.positives, each.junk)]))
    vectors = take(gallery, rows, query)
    similarities = vectors @ query
    error = rounding(len(query), query.dtype) * query.norm() * vectors.norm(dim=1)
    tie_thresholds = (similarities - error).cpu().numpy()
    positive = np.isin(rows, np.concatenate([each.positives for each in judged]))
    return _JudgedImages(rows, similarities.cpu().numpy(), tie_thresholds, np.sort(tie_thresholds[positive]))


def _count_unjudged_ahead(
    queries: Tensor,
    gallery: Sequence[Vectors],
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
    hide = _HideJudged(images, searchable)
    total = sum(len(part) for part in gallery)
    size = max(1, _VALUES_PER_BLOCK // max(queries.shape[1], len(queries), 1))
    for first, block in blocks(gallery, size, queries):
        similarities = queries @ block.T
        if not similarities.isfinite().all():
            bad = first + int((~similarities.isfinite()).any(0).nonzero()[0])
            raise DataError(f"row {bad} of the gallery, or a query, holds values that are not finite or too large")
        hide(similarities, first)
        counts += count_at_least(similarities, thresholds)
        if progress is not None:
            progress(first + len(block), total)
    return [row[: len(each.positive_thresholds)] for row, each in zip(counts.cpu().numpy(), images, strict=True)]


class _HideJudged:
    """Removes judged images, and rows that are not searchable, from blocks of similarities."""

    def __init__(self, images: Sequence[_JudgedImages], searchable: NDArray[np.bool_] | None) -> None:
        rows = np.concatenate([each.rows for each in images]) if images else np.empty(0, dtype=np.int64)
        query = np.repeat(np.arange(len(images)), [len(each.rows) for each in images])
        order = rows.argsort(kind="stable")
        self.rows, self.query = rows[order], query[order]
        self.excluded = np.empty(0, dtype=np.int64) if searchable is None else np.flatnonzero(~searchable)

    def __call__(self, similarities: Tensor, first: int) -> None:
        """Change a block (Q, m), whose column 0 is row `first` of the gallery, in place."""
        device, last = similarities.device, first + similarities.shape[1]
        start, stop = np.searchsorted(self.rows, (first, last))
        positions = torch.from_numpy(np.stack((self.query[start:stop], self.rows[start:stop] - first))).to(device)
        similarities[positions[0], positions[1]] = HIDDEN
        start, stop = np.searchsorted(self.excluded, (first, last))
        similarities[:, torch.from_numpy(self.excluded[start:stop] - first).to(device)] = HIDDEN


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
            raise DataError(f"the queries have {queries.shape[1]} dimensions, but the gallery {tuple(part.shape)}")
    for setup, judged in judgements.items():
        for query, each in enumerate(judged):
            both = np.intersect1d(each.positives, each.junk)
            if len(both):
                raise DataError(f"{setup or 'a judgement'}: row {both[0]} is both positive and junk of query {query}")
