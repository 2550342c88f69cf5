"""The exact metrics: r@k, recall@k, average precision, mAP@R, R-precision. In tiles, in one pass.

All follow from ranks. The rank of a positive x is 1 + the number of other database items at least as similar to the
query: ties count against, so embeddings that have collapsed to one point score as badly as they should. Similarities
that differ by less than the rounding of a dot product are ties, since copies of one vector differ by that much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shortlist.ranking.count_at_least import count_at_least
from shortlist.ranking.inputs import check_database, check_k, check_tile_size, check_vectors
from shortlist.ranking.precision import computed_dtype, full_precision
from shortlist.ranking.relevance import HIDDEN, SameLabel

_TILE = 2**22  # similarities alive at once


class QueryScores(NamedTuple):
    """The metrics of each query that has a positive, (Q,), or (Q, K) for K cut-offs."""

    queries: Tensor  # which ones, ascending
    r_at_k: Tensor  # 1 if any positive is in the first k, whatever the order of ties: what benchmarks call recall@k
    recall_at_k: Tensor  # share of the positives whose rank is at most k: equation 1 of the paper
    average_precision: Tensor
    map_at_r: Tensor  # average precision within the first R results, R = number of positives
    r_precision: Tensor  # share of positives in the first R results


def query_scores(
    embeddings: Tensor,
    labels: Tensor,
    k: int | Sequence[int] = (1, 2, 4, 8),
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    tile_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> QueryScores:
    """Every exact metric of every query that has a positive; queries without one are left out.

    Args:
        embeddings: (B, d) queries, used as given.
        labels: (B,) integers; equal means positive.
        k: one or several cut-offs.
        gallery: (N, d) what is searched. None: the queries search each other, each without itself, by index.
        gallery_labels: (N,) its labels.
        tile_size: queries at a time; the default keeps a tile near 16 MB.
        progress: called with the number of queries that are done, and of all that have a positive.

    Raises:
        ValueError, TypeError: on bad input, with what is wrong and where.
    """
    cut_offs = check_k(k)
    check_tile_size(tile_size)
    check_vectors(embeddings, labels)
    check_database(embeddings, gallery, gallery_labels, "gallery")
    relevance = SameLabel(labels.long(), None if gallery_labels is None else gallery_labels.long())
    dtype = computed_dtype(embeddings, gallery)
    queries = embeddings.detach().to(dtype)
    database = queries if gallery is None else gallery.detach().to(dtype)
    rows = max(_TILE // max(len(database), 1), 1) if tile_size is None else tile_size
    with full_precision(embeddings.device):
        ranks = _exact_ranks(queries, database, relevance, gallery is None, rows)
        tiles, done = [], 0
        for tile in ranks:
            tiles.append(_scores(tile, cut_offs))
            done += len(tiles[-1][0])
            if progress is not None:
                progress(done, len(relevance.queries))
    order = relevance.queries.argsort()
    width = len(cut_offs)
    nothing = [torch.empty(0, *size, device=queries.device) for size in ((width,), (width,), (), (), ())]
    columns = (torch.cat(column)[order] for column in zip(nothing, *tiles, strict=True))
    return QueryScores(relevance.queries[order], *columns)


def retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    k: int | Sequence[int] = (1, 2, 4, 8),
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    tile_size: int | None = None,
) -> dict[str, float]:
    """Means of `query_scores` by name: r@k and recall@k for each k, mAP, mAP@R and R-precision.

    Raises:
        ValueError: as `query_scores`, and if no query has a positive.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> retrieval_metrics(points, torch.tensor([0, 0, 1, 1]), k=1)["r@1"]
        1.0
    """
    scores = query_scores(embeddings, labels, k, gallery, gallery_labels, tile_size)
    if not len(scores.queries):
        raise ValueError("no query has a positive in the gallery: there is nothing to measure")
    r, recall, *others = (column.double().mean(0).tolist() for column in scores[1:])
    named = {f"r@{cut}": value for cut, value in zip(check_k(k), r, strict=True)}
    named |= {f"recall@{cut}": value for cut, value in zip(check_k(k), recall, strict=True)}
    return named | dict(zip(("mAP", "mAP@R", "R-precision"), others, strict=True))


def rounding(dimensions: int, dtype: torch.dtype) -> float:
    """How far roundings can move a dot product of unit vectors: nearer than that is a tie.

    It grows with the number of terms where all are equal, by less than a sixteenth as measured: processors sum in
    several lanes.
    """
    return max(8, dimensions / 16) * torch.finfo(dtype).eps


class _ExactRanks(NamedTuple):
    overall: Tensor  # (T, P)
    among_positives: Tensor  # (T, P)
    present: Tensor  # (T, P) bool: a positive, not padding


def _exact_ranks(
    queries: Tensor, database: Tensor, relevance: SameLabel, without_itself: bool, tile_size: int
) -> Iterator[_ExactRanks]:
    lengths = database.norm(dim=1)
    roundings = rounding(queries.shape[1], queries.dtype)
    for start in range(0, len(relevance.queries), tile_size):
        rows = relevance.queries[start : start + tile_size]
        positives, present = relevance.positives(rows, relevance.counts[start : start + tile_size][-1])
        similarities = queries[rows] @ database.T
        if without_itself:
            similarities.scatter_(1, rows[:, None], HIDDEN)
        at = similarities.gather(1, positives)
        # From `tied` up an item is not behind. A positive counts itself: that is the 1 of its rank.
        tied = at - roundings * queries[rows].norm(dim=1, keepdim=True) * lengths[positives]
        overall = count_at_least(similarities, tied)
        among = count_at_least(at.masked_fill(~present, HIDDEN), tied)
        yield _ExactRanks(overall, among, present)


def _scores(ranks: _ExactRanks, k: tuple[int, ...]) -> tuple[Tensor, ...]:
    overall, among, present = ranks
    count = present.sum(1)
    cut_offs = torch.tensor(k, device=overall.device)
    first = 1 + (overall - among).masked_fill(~present, torch.iinfo(overall.dtype).max - 1).amin(1)
    within = (overall.unsqueeze(2) <= cut_offs) & present.unsqueeze(2)
    precision = (among / overall).masked_fill(~present, 0)
    in_first_r = present & (overall <= count.unsqueeze(1))
    return (
        (first.unsqueeze(1) <= cut_offs).float(),
        within.sum(1) / count.unsqueeze(1),
        precision.sum(1) / count,
        (precision * in_first_r).sum(1) / count,
        in_first_r.sum(1) / count,
    )
