"""Slow, literal searches: one query and one image at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from shortlist.data import Catalog


def ranking(vectors: Tensor, catalog: Catalog, query: int) -> list[tuple[float, bool, int]]:
    """Results of a query, best first: similarity, whether it is correct, row. Among ties, wrong results come first."""
    found = []
    for row in range(len(catalog)):
        right = answer(catalog, query, row)
        if right is not None:
            found.append((round(float(vectors[query] @ vectors[row]), 6), right, row))
    return sorted(found, key=lambda each: (-each[0], each[1]))


def answer(catalog: Catalog, query: int, row: int) -> bool | None:
    """Whether an image is a correct result of a query, or None if it is not ranked."""
    roles = catalog.roles
    if row == query or (roles is not None and roles[row] != "gallery"):
        return None
    if catalog.label_sets is not None:
        return bool(set(catalog.label_sets[row]) & set(catalog.label_sets[query]))
    if catalog.judgements is None:
        return bool(catalog.labels[row] == catalog.labels[query])
    number = [index for index, role in enumerate(roles) if role == "query"].index(query)
    judged = [setup[number] for setup in catalog.judgements.values()]
    if any(row in each.positives for each in judged):
        return True
    return None if any(row in each.junk for each in judged) else False


def paired_bootstrap(first: Sequence[float], second: Sequence[float], resamples: int, seed: int) -> tuple[float, ...]:
    """Mean difference, its 2.5 and 97.5 % quantiles, and the two-sided p-value, drawing pairs with replacement."""
    draws = random.Random(seed)
    pairs = list(zip(first, second, strict=True))
    means = []
    for _ in range(resamples):
        drawn = [draws.choice(pairs) for _ in pairs]
        means.append(sum(b for _, b in drawn) / len(drawn) - sum(a for a, _ in drawn) / len(drawn))
    means.sort()
    below, above = sum(mean <= 0 for mean in means), sum(mean >= 0 for mean in means)
    value = sum(b - a for a, b in pairs) / len(pairs)
    at = [means[round(share * (resamples - 1))] for share in (0.025, 0.975)]
    return value, *at, min(1.0, 2 * (min(below, above) + 1) / (resamples + 1))


def group_bootstrap(
    differences: Sequence[Sequence[float]], clusters: Sequence[int], widening: float, resamples: int, seed: int
) -> tuple[float, ...]:
    """The same for differences[seed][query], drawing whole clusters of queries and, independently, S - 1 seeds."""
    draws, seeds = random.Random(seed), range(len(differences))
    members = [[query for query, each in enumerate(clusters) if each == cluster] for cluster in sorted(set(clusters))]
    means = []
    for _ in range(resamples):
        queries = [query for _ in members for query in draws.choice(members)]
        per_seed = [sum(differences[each][query] for query in queries) / len(queries) for each in seeds]
        middle = sum(per_seed) / len(per_seed)
        drawn = [draws.choice(per_seed) for _ in seeds[1:]] or per_seed
        means.append(middle + widening * (sum(drawn) / len(drawn) - middle))
    means.sort()
    below, above = sum(mean <= 0 for mean in means), sum(mean >= 0 for mean in means)
    value = sum(map(sum, differences)) / len(differences) / len(clusters)
    at = [means[round(share * (resamples - 1))] for share in (0.025, 0.975)]
    return value, *at, min(1.0, 2 * (min(below, above) + 1) / (resamples + 1))
