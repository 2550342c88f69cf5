"""The formulas of the paper, slow and literal: one query, one positive, one rival at a time. Autograd differentiates.

Equation numbers are those of the paper (CVPR 2022, Recall@k Surrogate Loss with Large Batches and Similarity Mixup).
"""

from __future__ import annotations

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


def rank(similarity: Tensor, x: int, database: Sequence[int], step: Step) -> Tensor:
    """r(q, x) = 1 + sum over z in the database, z != x, of step(s_qz - s_qx), equation 2."""
    return 1 + sum((step(similarity[z] - similarity[x]) for z in database if z != x), 0 * similarity[x])


def databases(labels: Tensor, count_query: bool = False) -> list[tuple[list[int], list[int]]]:
    """For each query of a batch: its database (the batch without it, or with it) and its positives."""
    items = range(len(labels))
    return [
        ([z for z in items if z != q or count_query], [x for x in items if x != q and labels[x] == labels[q]])
        for q in items
    ]


def mean_over_queries(losses: list[Tensor], vectors: Tensor) -> Tensor:
    """A query without a positive is left out; nothing left is 0."""
    return torch.stack(losses).mean() if losses else vectors.sum() * 0


def recall_at_k_loss(
    embeddings: Tensor,
    labels: Tensor,
    k: Sequence[int],
    rank_temperature: float = 1.0,
    similarity_temperature: float = 0.01,
    count_query: bool = False,
    clip: bool = True,
) -> Tensor:
    """Equations 5 to 7, with the division by min(k, |P|) and the clip at k that the text below them adds."""
    step, inside = sigmoid(similarity_temperature), sigmoid(rank_temperature)
    losses = []
    for q, (database, positives) in enumerate(databases(labels, count_query)):
        if not positives:
            continue
        similarity = torch.stack([embeddings[q] @ embeddings[z] for z in range(len(labels))])
        by_k = []
        for cut in k:
            found = sum(inside(cut - rank(similarity, x, database, step)) for x in positives)
            found = torch.clamp(found, max=cut) if clip else found
            by_k.append(1 - found / min(cut, len(positives)))
        losses.append(sum(by_k) / len(k))
    return mean_over_queries(losses, embeddings)


def smooth_ap_loss(embeddings: Tensor, labels: Tensor, similarity_temperature: float = 0.01) -> Tensor:
    """1 - mean over positives of (rank among the positives) / (rank in the database), both smooth."""
    step = sigmoid(similarity_temperature)
    losses = []
    for q, (database, positives) in enumerate(databases(labels)):
        if not positives:
            continue
        similarity = torch.stack([embeddings[q] @ embeddings[z] for z in range(len(labels))])
        precision = [rank(similarity, x, positives, step) / rank(similarity, x, database, step) for x in positives]
        losses.append(1 - sum(precision) / len(positives))
    return mean_over_queries(losses, embeddings)


def with_virtual(embeddings: Tensor, labels: Tensor, pairs: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor]:
    """The batch with its virtual examples built for real: v = alpha x + (1 - alpha) z, equation 8."""
    built = [alpha * embeddings[x] + (1 - alpha) * embeddings[z] for (x, z), alpha in zip(pairs, alphas, strict=True)]
    return torch.stack([*embeddings, *built]), torch.cat((labels, labels[pairs[:, 0]]))


def all_pairs_of_positives(labels: Tensor) -> set[tuple[int, int]]:
    items = range(len(labels))
    return {(x, z) for x in items for z in items if x < z and labels[x] == labels[z]}
