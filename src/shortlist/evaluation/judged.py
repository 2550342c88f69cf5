"""Queries whose answers are judged one by one, as in Revisited Oxford and Paris: positives, junk, and all the rest.

Junk is neither right nor wrong: it is taken out of a ranking before ranks are counted. The gallery may be of any length
(R1M has a million images): it is read in blocks, and all that is kept of a block is how many of its images are ahead of
each positive. Ties count against, within the rounding of a dot product, as everywhere (see `ranking.metrics`).
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

_NUMBERS = 2**22  # of the vectors of a block, and of its similarities

Rows = NDArray[np.int64]


class JudgedScores(NamedTuple):
    """The scores of the queries that have a positive in a setup: (Q,), or (Q, K) for K cut-offs."""

    queries: Rows  # which ones, ascending
    average_precision: NDArray[np.float64]  # by trapezoids
    precision_at_k: NDArray[np.float64]  # of the first k, or of all down to the last positive where they are fewer


def judged_scores(
    queries: Tensor,
    gallery: Sequence[Vectors],
    judgements: Judgements,
    k: Sequence[int] = (1, 5, 10),
    *,
    competes: NDArray[np.bool_] | None = None,
    progress: Progress | None = None,
) -> dict[str, JudgedScores]:
    """The scores of every query in every setup; queries without a positive in a setup are left out of it.

    Args:
        queries: (Q, d), used as given. What is of half precision is compared in float32.
        gallery: (n, d) each, one after another; tensors, arrays or memory maps.
        judgements: by setup, one for each query: rows of the gallery, counted over its parts.
        k: cut-offs of the precision.
        competes: (first rows of the gallery) False for rows that are in no ranking, such as a catalog's queries; rows
            after them compete.
        progress: called with the number of rows done and of all rows.

    Raises:
        DataError: dimensions that differ, numbers that are not finite, or an image that is both positive and junk.
    """
    _check(queries, gallery, judgements)
    queries = queries.detach().to(computed_dtype(queries))
    with full_precision(queries.device):
        known = [_known(query, gallery, judged) for query, judged in zip(queries, _by_query(judgements), strict=True)]
        ahead = _unjudged_ahead(queries, gallery, known, competes, progress)
    return {
        setup: _scores([_ranks(*each) for each in zip(judged, known, ahead, strict=True)], k)
        for setup, judged in judgements.items()
    }


@dataclass(frozen=True)
class _Known:
    """What a query's judgements name in any setup: the rest of the gallery is wrong in all of them."""

    rows: Rows  # ascending
    similarities: NDArray[np.floating]
    tied: NDArray[np.floating]  # from here up an item is not behind
    bars: NDArray[np.floating]  # those of `tied` that are a positive's in some setup, ascending


def _by_query(judgements: Judgements) -> list[tuple[Judgement, ...]]:
    return list(zip(*judgements.values(), strict=True))


def _known(query: Tensor, gallery: Sequence[Vectors], judged: Sequence[Judgement]) -> _Known:
    rows = np.unique(np.concatenate([part for each in judged for part in (each.positives, each.junk)]))
    vectors = take(gallery, rows, query)
    similarities = vectors @ query
    tied = similarities - rounding(len(query), query.dtype) * query.norm() * vectors.norm(dim=1)
    bars = tied.cpu().numpy()[np.isin(rows, np.concatenate([each.positives for each in judged]))]
    return _Known(rows, similarities.cpu().numpy(), tied.cpu().numpy(), np.sort(bars))


def _unjudged_ahead(
    queries: Tensor,
    gallery: Sequence[Vectors],
    known: Sequence[_Known],
    competes: NDArray[np.bool_] | None,
    progress: Progress | None,
) -> list[Rows]:
    """For each bar of each query, the images that nobody has judged and that are not behind it."""
    bars = np.full((len(known), max((len(each.bars) for each in known), default=0)), np.inf)
    for row, each in zip(bars, known, strict=True):
        row[: len(each.bars)] = each.bars
    reached = torch.from_numpy(bars).to(queries)
    counts = torch.zeros(bars.shape, dtype=torch.int64, device=queries.device)
    hide = _Hidden(known, competes)
    total = sum(len(part) for part in gallery)
    size = max(1, _NUMBERS // max(queries.shape[1], len(queries), 1))
    for first, block in blocks(gallery, size, queries):
        similarities = queries @ block.T
        if not similarities.isfinite().all():
            bad = first + int((~similarities.isfinite()).any(0).nonzero()[0])
            raise DataError(f"row {bad} of the gallery, or a query, holds numbers that are not finite, or too large")
        hide(similarities, first)
        counts += count_at_least(similarities, reached)
        if progress is not None:
            progress(first + len(block), total)
    return [row[: len(each.bars)] for row, each in zip(counts.cpu().numpy(), known, strict=True)]


class _Hidden:
    """Takes out of a block of similarities what is judged, and what does not compete."""

    def __init__(self, known: Sequence[_Known], competes: NDArray[np.bool_] | None) -> None:
        rows = np.concatenate([each.rows for each in known]) if known else np.empty(0, dtype=np.int64)
        query = np.repeat(np.arange(len(known)), [len(each.rows) for each in known])
        order = rows.argsort(kind="stable")
        self.rows, self.query = rows[order], query[order]
        self.aside = np.empty(0, dtype=np.int64) if competes is None else np.flatnonzero(~competes)

    def __call__(self, similarities: Tensor, first: int) -> None:
        device, last = similarities.device, first + similarities.shape[1]
        start, stop = np.searchsorted(self.rows, (first, last))
        places = torch.from_numpy(np.stack((self.query[start:stop], self.rows[start:stop] - first))).to(device)
        similarities[places[0], places[1]] = HIDDEN
        start, stop = np.searchsorted(self.aside, (first, last))
        similarities[:, torch.from_numpy(self.aside[start:stop] - first).to(device)] = HIDDEN


def _ranks(judgement: Judgement, known: _Known, ahead: Rows) -> Rows:
    """Ranks of the positives, from 0, without junk: what is wrong and not behind, and the positives before."""
    positive, junk = (np.isin(known.rows, rows) for rows in (judgement.positives, judgement.junk))
    bars = np.sort(known.tied[positive])[::-1]
    wrong = np.sort(known.similarities[~positive & ~junk])  # right, or junk, in another setup
    judged = len(wrong) - np.searchsorted(wrong, bars, side="left")
    ranks: Rows = ahead[np.searchsorted(known.bars, bars)] + judged + np.arange(len(bars))
    return ranks


def _scores(ranks: Sequence[Rows], k: Sequence[int]) -> JudgedScores:
    having = [query for query, each in enumerate(ranks) if len(each)]
    precision = [average_precision(ranks[query]) for query in having]
    at_k = [[_precision_at(ranks[query], cut) for cut in k] for query in having]
    return JudgedScores(np.array(having, dtype=np.int64), np.array(precision), np.array(at_k).reshape(-1, len(k)))


def average_precision(ranks: Rows) -> float:
    """The area under precision over recall by trapezoids, for the ascending ranks of the positives, from 0."""
    found = np.arange(len(ranks))
    before = np.where(ranks == 0, 1.0, found / np.maximum(ranks, 1))
    after = (found + 1) / (ranks + 1)
    return float((before + after).sum() / 2 / len(ranks))


def _precision_at(ranks: Rows, k: int) -> float:
    """The share of positives in the first k, or down to the last positive where that comes first."""
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
