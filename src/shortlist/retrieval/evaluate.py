"""Protocols: leave-one-out, and queries against a gallery; every figure with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shortlist.data import ROLES, Catalog
from shortlist.errors import DataError
from shortlist.ranking.metrics import QueryScores, query_scores

_DRAWS = 2**24  # of the bootstrap, alive at once


@dataclass(frozen=True)
class Estimate:
    """A mean over queries, and its 95 % interval (None where nobody asked for one)."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{100 * self.value:.1f}{interval}"


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and how."""

    data: str
    split: str
    protocol: str  # leave-one-out: every image queries all others; query/gallery: as the catalog's roles say
    queries: int
    gallery: int
    left_out: int  # queries without a positive
    metrics: dict[str, Estimate]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    embeddings: Tensor, catalog: Catalog, *, k: Sequence[int] = (1, 2, 4, 8), bootstrap: int = 1000, seed: int = 0
) -> Evaluation:
    """Every exact metric of a catalog's embeddings, by the protocol that its roles ask for.

    Args:
        embeddings: (n, d), in the order of the catalog.
        catalog: labels, and roles where there are any.
        k: cut-offs of r@k and recall@k.
        bootstrap: resamples of the queries behind the intervals; 0 for no intervals.
        seed: of the resamples.

    Raises:
        DataError: no query has a positive.
    """
    labels = torch.from_numpy(catalog.labels.copy()).to(embeddings.device)
    if catalog.roles is None:
        protocol, asked = "leave-one-out", len(catalog)
        scores = query_scores(embeddings, labels, k)
        gallery = len(catalog) - 1
    else:
        protocol = "query/gallery"
        queries, database = (torch.from_numpy(catalog.roles == role).to(labels.device) for role in ROLES)
        asked, gallery = int(queries.sum()), int(database.sum())
        scores = query_scores(embeddings[queries], labels[queries], k, embeddings[database], labels[database])
    if not len(scores.queries):
        raise DataError(
            f"{catalog.name}: no query has another image of its class to find, so there is nothing to measure."
        )
    split = "+".join(dict.fromkeys(catalog.splits.tolist()))
    left_out = asked - len(scores.queries)
    return Evaluation(catalog.name, split, protocol, asked, gallery, left_out, _estimates(scores, k, bootstrap, seed))


def _estimates(scores: QueryScores, k: Sequence[int], bootstrap: int, seed: int) -> dict[str, Estimate]:
    names = [*(f"r@{cut}" for cut in k), *(f"recall@{cut}" for cut in k), "mAP", "mAP@R", "R-precision"]
    table = torch.cat([column.reshape(len(scores.queries), -1) for column in scores[1:]], dim=1).double().cpu()
    means = table.mean(0).tolist()
    if not bootstrap:
        return {name: Estimate(mean) for name, mean in zip(names, means, strict=True)}
    low, high = _interval(table, bootstrap, seed).tolist()
    return {name: Estimate(*each) for name, *each in zip(names, means, low, high, strict=True)}


def _interval(table: Tensor, resamples: int, seed: int) -> Tensor:
    """The 2.5 and 97.5 % quantiles of the columns' means when rows are drawn with replacement, (2, columns)."""
    random = torch.Generator().manual_seed(seed)
    number = len(table)
    block = max(1, _DRAWS // number)
    means = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = torch.randint(number, (rows, number), generator=random)
        times = torch.zeros(rows, number, dtype=table.dtype).scatter_add_(1, drawn, torch.ones_like(drawn).double())
        means.append(times @ table / number)
    return torch.quantile(torch.cat(means), torch.tensor([0.025, 0.975], dtype=table.dtype), dim=0)
