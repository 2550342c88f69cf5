"""Slow, literal versions of the losses: one query, positive and competitor at a time, differentiated by autograd.

Equation numbers are those of the paper (CVPR 2022, Recall@k Surrogate Loss with Large Batches and Similarity Mixup).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]


def heaviside(u: Tensor) -> Tensor:
    """H: 0 for negative values, otherwise 1."""
    return (u >= 0).to(u.dtype)


def sigmoid(temperature: float) -> Step:
    """sigma_tau(u) = 1 / (1 + exp(-u / tau)), equation 4, without overflow."""
    return lambda u: torch.sigmoid(u / temperature)


def linear_tail(temperature: float, slope: float = 100.0, start: float = 0.05) -> Step:
    """SupRank's bound of H from above (Ramzi et al. 2021): a raised sigmoid, and a line from where it is flat."""
    soft = sigmoid(temperature)

    def step(u: Tensor) -> Tensor:
        if u < 0:
            return soft(u)
        if u <= start:
            return soft(u) + 0.5
        return slope * (u - start) + soft(torch.full_like(u, start)) + 0.5

    return step


def rank(similarity: Tensor, x: int, database: Sequence[int], step: Step, exact: Sequence[int] = ()) -> Tensor:
    """r(q, x) = 1 + sum over z in the database, z != x, of step(s_qz - s_qx), equation 2; of H for those in `exact`."""
    steps = {z: heaviside if z in exact else step for z in database if z != x}
    return 1 + sum((steps[z](similarity[z] - similarity[x]) for z in steps), 0 * similarity[x])


def databases(labels: Sequence[set[int]] | Tensor, count_query: bool = False) -> list[tuple[list[int], list[int]]]:
    """For each query of a batch: its database (the batch without it, or with it) and its positives.

    An item has one label, or a set of them. Positives share a label.
    """
    items = range(len(labels))
    sets = [each if isinstance(each, set) else {int(each)} for each in labels]
    return [
        ([z for z in items if z != q or count_query], [x for x in items if x != q and sets[x] & sets[q]]) for q in items
    ]


def label_sets_with_virtual(sets: Sequence[set[int]], pairs: Tensor) -> list[set[int]]:
    """A mixture of two items has the labels that both have."""
    return [*sets, *(sets[x] & sets[z] for x, z in pairs.tolist())]


def mean_over_queries(losses: list[Tensor], vectors: Tensor) -> Tensor:
    """The mean over queries with a positive; 0 if there is none."""
    return torch.stack(losses).mean() if losses else vectors.sum() * 0


def recall_at_k_loss(
    embeddings: Tensor,
    labels: Tensor,
    k: Sequence[int],
    rank_temperature: float = 1.0,
    similarity_temperature: float = 0.01,
    count_query: bool = False,
    clip: bool = True,
    tail: Step | None = None,
) -> Tensor:
    """Equations 5 to 7, with the division by min(k, |P|) and the clip at k that the text below them adds."""
    inside = sigmoid(rank_temperature)
    losses = []
    for ranks in ranks_of_positives(embeddings, labels, similarity_temperature, count_query, tail):
        by_k = []
        for cut in k:
            found = sum(inside(cut - each) for each in ranks)
            found = torch.clamp(found, max=cut) if clip else found
            by_k.append(1 - found / min(cut, len(ranks)))
        losses.append(sum(by_k) / len(k))
    return mean_over_queries(losses, embeddings)


def ranks_of_positives(
    embeddings: Tensor,
    labels: Sequence[set[int]] | Tensor,
    similarity_temperature: float = 0.01,
    count_query: bool = False,
    tail: Step | None = None,
    among: bool = False,
    query_is_positive: bool = False,
) -> list[list[Tensor]]:
    """The smooth ranks of the positives of each query that has any, in its database or only `among` the positives."""
    step, found = tail or sigmoid(similarity_temperature), []
    for q, (database, positives) in enumerate(databases(labels, count_query)):
        similarity = torch.stack([embeddings[q] @ each for each in embeddings])
        positives = positives + [q] * query_is_positive
        ranked, exact = positives if among else database, positives if tail else ()
        if positives:
            found.append([rank(similarity, x, ranked, step, exact) for x in positives])
    return found


def median_rank(embeddings: Tensor, labels: Tensor, **options: object) -> float:
    """The lower median, since the number of ranks may be even."""
    ranks = sorted(float(each) for query in ranks_of_positives(embeddings, labels, **options) for each in query)
    return ranks[(len(ranks) - 1) // 2] if ranks else 0.0


def smooth_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    similarity_temperature: float = 0.01,
    count_query: bool = False,
    **options: object,
) -> Tensor:
    """1 - mean over positives of (rank among the positives) / (rank in the database), both smooth.

    In the release of Brown et al., the whole batch is the database, and the positives include the query.
    """
    counted = {"count_query": count_query, "query_is_positive": count_query}
    both = [
        ranks_of_positives(embeddings, labels, similarity_temperature, among=among, **counted, **options)
        for among in (True, False)
    ]
    losses = [
        1 - sum(one / other for one, other in zip(*query, strict=True)) / len(query[0])
        for query in zip(*both, strict=True)
    ]
    return mean_over_queries(losses, embeddings)


def calibration_loss(embeddings: Tensor, labels: Tensor, above: float = 0.9, below: float = 0.6) -> Tensor:
    """Ramzi et al. 2021: means over the positives of [above - s]+ and over the negatives of [s - below]+."""
    losses = []
    for q, (database, positives) in enumerate(databases(labels)):
        negatives = [z for z in database if z not in positives]
        if not positives:
            continue
        missing = [torch.relu(above - embeddings[q] @ embeddings[x]) for x in positives]
        excess = [torch.relu(embeddings[q] @ embeddings[z] - below) for z in negatives]
        losses.append(sum(missing) / len(missing) + (sum(excess) / len(excess) if excess else 0))
    return mean_over_queries(losses, embeddings)


def schedule(start: float, end: float, until: float, progress: float) -> float:
    """Linear interpolation of the logarithm."""
    way = min(progress / until, 1)
    return math.exp((1 - way) * math.log(start) + way * math.log(end))


def binned_ap_loss(embeddings: Tensor, labels: Tensor, bins: int = 20) -> Tensor:
    """Revaud et al. 2019: soft assignment of similarities to bins, precision and recall's increments by bins.

    b_m = 1 - (m - 1) Delta with Delta = 2 / (M - 1); delta(s, m) = max(1 - |s - b_m| / Delta, 0);
    AP = sum over m of (sum over m' <= m of positives in m' / of items in m') (positives in m / |P|).
    """
    width = 2 / (bins - 1)
    centres = [1 - m * width for m in range(bins)]
    losses = []
    for q, (database, positives) in enumerate(databases(labels)):
        if not positives:
            continue
        similarity = {z: (embeddings[q] @ embeddings[z]).clamp(-1, 1) for z in database}
        share = {
            (z, m): torch.relu(1 - (s - b).abs() / width) for z, s in similarity.items() for m, b in enumerate(centres)
        }
        average_precision = 0 * embeddings[q].sum()
        for m in range(bins):
            found = sum(share[x, n] for x in positives for n in range(m + 1))
            seen = sum(share[z, n] for z in database for n in range(m + 1))
            if seen > 0:
                average_precision = average_precision + found / seen * sum(share[x, m] for x in positives) / len(
                    positives
                )
        losses.append(1 - average_precision)
    return mean_over_queries(losses, embeddings)


def blackbox_ap(scores: list[float], positives: set[int], blackbox_lambda: float, margin: float) -> tuple[float, list]:
    """1 - AP of one query's list, and its gradient at the scores, after Rolinek et al. 2020.

    y has the margin in it: y_i = s_i - margin / 2 for a positive, s_i + margin / 2 otherwise. rank(y)_i counts i and
    all at or above it; L = 1 - mean over positives of rank among the positives / rank. The gradient is
    -(rank(y) - rank(y')) / lambda with y' = y + lambda dL/drank, and dL/drank_i = rank among positives / rank^2 / |P|.
    """
    items = range(len(scores))

    def ranks(y: list[float], among: Sequence[int]) -> list[int]:
        return [1 + sum(y[z] >= y[x] for z in among if z != x) for x in items]

    y = [s - margin / 2 if i in positives else s + margin / 2 for i, s in enumerate(scores)]
    rank, rank_among = ranks(y, items), ranks(y, sorted(positives))
    loss = 1 - sum(rank_among[i] / rank[i] for i in positives) / len(positives)
    by_rank = [rank_among[i] / rank[i] ** 2 / len(positives) if i in positives else 0.0 for i in items]
    moved = ranks([y[i] + blackbox_lambda * by_rank[i] for i in items], items)
    return loss, [-(rank[i] - moved[i]) / blackbox_lambda for i in items]


def blackbox_ap_loss(
    embeddings: Tensor, labels: Tensor, blackbox_lambda: float = 4.0, margin: float = 0.02
) -> tuple[Tensor, Tensor]:
    """The mean over the queries, and its gradient at the embeddings by the product rule on q . z."""
    losses, gradients = [], []
    for q, (database, positives) in enumerate(databases(labels)):
        if not positives:
            continue
        scores = [float(embeddings[q] @ embeddings[z]) for z in database]
        places = {place for place, z in enumerate(database) if z in positives}
        loss, by_score = blackbox_ap(scores, places, blackbox_lambda, margin)
        gradient = torch.zeros_like(embeddings)
        for slope, z in zip(by_score, database, strict=True):
            gradient[q] += slope * embeddings[z]
            gradient[z] += slope * embeddings[q]
        losses.append(torch.tensor(loss, dtype=embeddings.dtype))
        gradients.append(gradient)
    if not losses:
        return embeddings.new_zeros(()), torch.zeros_like(embeddings)
    return torch.stack(losses).mean(), torch.stack(gradients).mean(0)


def with_virtual(embeddings: Tensor, labels: Tensor, pairs: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor]:
    """The batch and its virtual examples, which are computed: v = alpha x + (1 - alpha) z, equation 8."""
    built = [alpha * embeddings[x] + (1 - alpha) * embeddings[z] for (x, z), alpha in zip(pairs, alphas, strict=True)]
    return torch.stack([*embeddings, *built]), torch.cat((labels, labels[pairs[:, 0]]))


def all_pairs_of_positives(labels: Tensor) -> set[tuple[int, int]]:
    items = range(len(labels))
    return {(x, z) for x in items for z in items if x < z and labels[x] == labels[z]}


def min_score(wrong: Sequence[float], rate: float) -> float:
    """The lowest score with three decimals that at most this share of the wrong scores reach, or 1."""
    for thousandths in range(-1000, 1000):
        if sum(score >= thousandths / 1000 for score in wrong) <= rate * len(wrong):
            return thousandths / 1000
    return 1.0
