"""Exact retrieval metrics: r@k, recall@k, average precision, mAP@R and R-precision, computed in one pass over tiles.

All metrics follow from ranks. The rank of a positive is 1 + the number of other database items that are at least as
similar to the query. Ties thus count against the positive, so that collapsed embeddings get low scores. Similarities
that differ by less than the rounding error of a dot product are ties, because those of identical vectors can differ by
that much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shortlist.ranking.count_at_least import count_at_least
from shortlist.ranking.inputs import check_database, check_k, check_tile_size, check_vectors
from shortlist.ranking.precision import computed_dtype
from shortlist.ranking.ranker import Ranker, TensorSource, Tile, rounding
from shortlist.ranking.relevance import HIDDEN, Relevance, label_relevance


class QueryScores(NamedTuple):
    """Metrics of each of the Q queries that have a positive, at K cut-offs."""

    queries: Tensor  # (Q,) indices of these queries, ascending
    r_at_k: Tensor  # (Q, K) 1 if a positive is in the first k for any order of ties; called recall@k by benchmarks
    recall_at_k: Tensor  # (Q, K) share of the positives whose rank is at most k: equation 1 of the paper
    average_precision: Tensor  # (Q,)
    map_at_r: Tensor  # (Q,) average precision within the first R results, where R is the number of positives
    r_precision: Tensor  # (Q,) share of positives in the first R results


def query_scores(
    embeddings: Tensor,
    labels: Tensor,
    k: int | Sequence[int] = (1, 2, 4, 8),
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    tile_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> QueryScores:
    """Compute all exact metrics of each query that has a positive. Queries without a positive are omitted.

    Args:
        embeddings: Queries of shape (B, d). They are not normalised here.
        labels: Integer labels of shape (B,). Items with equal labels are positives of each other. If items have several
            labels, of shape (B, L), padded with -1: items that share a label are positives of each other.
        k: One or several cut-offs.
        gallery: Gallery of shape (N, d). Default: the queries are the gallery, and each query is excluded from its own
            results by its index.
        gallery_labels: Labels of the gallery, of shape (N,).
        tile_size: Number of queries per tile. Default: chosen for tiles of about 16 MB.
        progress: Function that is called with the number of finished queries and the number of queries that have a
            positive.

    Raises:
        ValueError: If an input has the wrong shape, device or value.
        TypeError: If an input has the wrong type or dtype.
    """
    cut_offs = check_k(k)
    check_tile_size(tile_size)
    check_vectors(embeddings, labels)
    check_database(embeddings, gallery, gallery_labels, "gallery")
    relevance = label_relevance(labels.long(), None if gallery_labels is None else gallery_labels.long())
    dtype = computed_dtype(embeddings, gallery)
    queries = embeddings.detach().to(dtype)
    database = queries if gallery is None else gallery.detach().to(dtype)
    if gallery is None:
        ranker = Ranker.leave_one_out(database, relevance.queries)
    else:
        ranker = Ranker(TensorSource(queries, relevance.queries), TensorSource(database))
    lengths, tiles = database.norm(dim=1), []
    for tile in ranker.rankings(tile_size):
        tiles.append(_scores(*_exact_ranks(tile, relevance, lengths), cut_offs))
        if progress is not None:
            progress(tile.queries.stop, len(relevance.queries))
    order = relevance.queries.argsort()
    width = len(cut_offs)
    empty = [torch.empty(0, *size, device=queries.device) for size in ((width,), (width,), (), (), ())]
    columns = (torch.cat(column)[order] for column in zip(empty, *tiles, strict=True))
    return QueryScores(relevance.queries[order], *columns)


def retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    k: int | Sequence[int] = (1, 2, 4, 8),
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    tile_size: int | None = None,
) -> dict[str, float]:
    """Compute the means of `query_scores` over all queries that have a positive. See there for the arguments.

    Returns:
        Metrics by name: r@k and recall@k for each k, mAP, mAP@R and R-precision.

    Raises:
        ValueError: If an input has the wrong shape, device or value, or if no query has a positive.
        TypeError: If an input has the wrong type or dtype.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> retrieval_metrics(points, torch.tensor([0, 0, 1, 1]), k=1)["r@1"]
        1.0
    """
    scores = query_scores(embeddings, labels, k, gallery, gallery_labels, tile_size)
    if not len(scores.queries):
        raise ValueError("No query has a positive in the gallery, so the metrics are undefined: check the labels.")
    r, recall, *others = (column.double().mean(0).tolist() for column in scores[1:])
    named = {f"r@{cut}": value for cut, value in zip(check_k(k), r, strict=True)}
    named |= {f"recall@{cut}": value for cut, value in zip(check_k(k), recall, strict=True)}
    return named | dict(zip(("mAP", "mAP@R", "R-precision"), others, strict=True))


def _exact_ranks(tile: Tile, relevance: Relevance, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rank the positives of a tile's queries. Return the arguments of `_scores`, (T, P) each.

    `lengths` are those of all items.
    """
    columns, present = relevance.positives(relevance.queries[tile.queries], relevance.counts[tile.queries][-1])
    positives = tile.similarities.gather(1, columns)
    # Items at or above `tied` are not behind the positive. A positive counts itself, which is the 1 of its rank.
    tolerance = rounding(tile.vectors.shape[1], tile.vectors.dtype)
    tied = positives - tolerance * tile.vectors.norm(dim=1, keepdim=True) * lengths[columns]
    among = count_at_least(positives.masked_fill(~present, HIDDEN), tied)
    return count_at_least(tile.similarities, tied), among, present


def _scores(overall: Tensor, among: Tensor, present: Tensor, k: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Compute the fields of `QueryScores` after `queries` from ranks among all items and among the positives."""
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
