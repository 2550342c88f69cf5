"""Evaluation protocols: leave-one-out, queries against a gallery, and judged queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.data import ROLES, Catalog
from shortlist.errors import ConfigError, DataError
from shortlist.evaluation.intervals import Estimate, estimates
from shortlist.evaluation.judged import judged_scores
from shortlist.evaluation.result import Evaluation
from shortlist.progress import Progress
from shortlist.ranking.metrics import query_scores
from shortlist.search.vectors import Vectors

DEFAULT_K, DEFAULT_JUDGED_K = (1, 2, 4, 8), (1, 5, 10)


class QueryTable(NamedTuple):
    """The metrics of each query that has a positive in the gallery."""

    queries: NDArray[np.int64]  # rows of the catalog, ascending
    names: tuple[str, ...]
    values: Tensor  # (queries, names)


def evaluate(
    embeddings: Vectors,
    catalog: Catalog,
    *,
    k: Sequence[int] | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    distractors: Mapping[str, Vectors] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Compute all exact metrics of embeddings, by the protocol that their catalog defines.

    A catalog with judgements is evaluated by the judged protocol, and one with roles by queries against a gallery.
    Otherwise, every image is a query for all others. Judged queries read the embeddings in blocks, so that memory maps
    of any length can be evaluated.

    Args:
        embeddings: (n, d), in the order of the catalog.
        catalog: Labels, and roles and judgements if there are any.
        k: Cut-offs. None: 1, 2, 4, 8, or 1, 5, 10 for judged queries.
        bootstrap: Number of resamples of the queries for the confidence intervals; 0 for no intervals.
        seed: Seed of the resamples.
        distractors: Further gallery vectors (m, d) by name, which are negatives of all queries. For judged queries
            only.
        progress: Called with the number of queries (gallery rows for judged queries) done and the total number.

    Raises:
        DataError: No query has a positive, or the number of embeddings differs from the number of images.
        ConfigError: There are distractors, but no judgements.
    """
    distractors = distractors or {}
    k = k or (DEFAULT_JUDGED_K if catalog.judgements else DEFAULT_K)
    tables = score_queries(embeddings, catalog, k, distractors=distractors, progress=progress)
    metrics: dict[str, Estimate] = {}
    for table in tables.values():
        if len(table.queries):
            metrics |= estimates(table.names, table.values, bootstrap, seed)
    if catalog.judgements:
        metrics = {name: metrics[name] for name in sorted(metrics, key=lambda name: not name.startswith("mAP"))}
    queries = len(query_rows(catalog))
    gallery = len(gallery_rows(catalog)) - leave_one_out(catalog)  # a query is not in its own gallery
    return Evaluation(
        data="+".join((catalog.name, *distractors)),
        split="+".join(dict.fromkeys(catalog.splits.tolist())),
        protocol=catalog.protocol or _protocol(catalog),
        queries=queries,
        gallery=gallery + sum(len(vectors) for vectors in distractors.values()),
        left_out=queries - len(np.unique(np.concatenate([table.queries for table in tables.values()]))),
        metrics=metrics,
        setups={setup: len(table.queries) for setup, table in tables.items() if setup},
        remarks=catalog.remarks,
    )


def _protocol(catalog: Catalog) -> str:
    if catalog.judgements:
        return "revisited" if len(catalog.judgements) > 1 else "judged"
    return "leave-one-out" if leave_one_out(catalog) else "query/gallery"


def score_queries(
    embeddings: Vectors,
    catalog: Catalog,
    k: Sequence[int],
    *,
    distractors: Mapping[str, Vectors] | None = None,
    progress: Progress | None = None,
) -> dict[str, QueryTable]:
    """Compute the metrics of each query.

    Args:
        embeddings: (n, d), in the order of the catalog.
        catalog: Labels, and roles and judgements if there are any.
        k: Cut-offs.
        distractors: See `evaluate`.
        progress: See `evaluate`.

    Returns:
        One table per setup for judged queries; otherwise one table, named "".

    Raises:
        DataError: No query has a positive, or the number of embeddings differs from the number of images.
        ConfigError: There are distractors, but no judgements.
    """
    if len(embeddings) != len(catalog):
        raise DataError(f"{len(embeddings)} embeddings for the {len(catalog)} images of {catalog.name}.")
    if catalog.judgements:
        return _score_judged(embeddings, catalog, k, distractors or {}, progress)
    if distractors:
        raise ConfigError(
            f"{catalog.name} cannot be tested with distractors: they require judged queries, as in roxford5k."
        )
    return {"": _score_labelled(embeddings, catalog, k, progress)}


def query_rows(catalog: Catalog) -> NDArray[np.int64]:
    """Return the rows of the queries: the images with that role or, without roles, all images."""
    return np.arange(len(catalog)) if leave_one_out(catalog) else np.flatnonzero(catalog.roles == "query")


def gallery_rows(catalog: Catalog) -> NDArray[np.int64]:
    """Return the rows of the images that are searched."""
    return np.arange(len(catalog)) if leave_one_out(catalog) else np.flatnonzero(catalog.roles == "gallery")


def leave_one_out(catalog: Catalog) -> bool:
    """Return whether every image is a query for all others."""
    return catalog.roles is None or not catalog.roles.any()  # all roles of In-shop's training images are empty


def _score_labelled(embeddings: Vectors, catalog: Catalog, k: Sequence[int], progress: Progress | None) -> QueryTable:
    """Score queries whose positives are the images of their class, or those that share a label."""
    if not isinstance(embeddings, Tensor):
        embeddings = torch.from_numpy(np.array(embeddings))
    labels = torch.from_numpy(catalog.relevance_labels.copy()).to(embeddings.device)
    if leave_one_out(catalog):
        scores = query_scores(embeddings, labels, k, progress=progress)
    else:
        queries, database = (torch.from_numpy(catalog.roles == role).to(labels.device) for role in ROLES)
        gallery, gallery_labels = embeddings[database], labels[database]
        scores = query_scores(embeddings[queries], labels[queries], k, gallery, gallery_labels, progress=progress)
    if not len(scores.queries):
        raise DataError(f"{catalog.name}: no query has another image of its class in the gallery; nothing to evaluate.")
    names = (*(f"r@{cut}" for cut in k), *(f"recall@{cut}" for cut in k), "mAP", "mAP@R", "R-precision")
    values = torch.cat([column.reshape(len(scores.queries), -1) for column in scores[1:]], dim=1)
    return QueryTable(query_rows(catalog)[scores.queries.cpu().numpy()], names, values)


def _score_judged(
    embeddings: Vectors,
    catalog: Catalog,
    k: Sequence[int],
    distractors: Mapping[str, Vectors],
    progress: Progress | None,
) -> dict[str, QueryTable]:
    """Score queries whose positives are judged one by one."""
    assert catalog.judgements is not None
    assert catalog.roles is not None
    rows = query_rows(catalog)
    scores = judged_scores(
        torch.as_tensor(embeddings[rows]),
        [embeddings, *distractors.values()],
        catalog.judgements,
        k,
        searchable=catalog.roles == "gallery",
        progress=progress,
    )
    if not any(len(found.queries) for found in scores.values()):
        raise DataError(f"{catalog.name}: no query has a positive in the gallery; nothing to evaluate.")
    tables = {}
    for setup, found in scores.items():
        suffix = f" {setup}" if setup else ""
        names = (f"mAP{suffix}", *(f"mP@{cut}{suffix}" for cut in k))
        values = torch.from_numpy(np.column_stack((found.average_precision, found.precision_at_k)))
        tables[setup] = QueryTable(rows[found.queries], names, values)
    return tables
