"""What each query scores, by the protocol that its catalog asks for: what means, intervals and comparisons rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.data import ROLES, Catalog
from shortlist.errors import ConfigError, DataError
from shortlist.evaluation.judged import judged_scores
from shortlist.progress import Progress
from shortlist.ranking.metrics import query_scores
from shortlist.ranking.precision import computed_dtype
from shortlist.search.vectors import Vectors, take


class QueryTable(NamedTuple):
    """The metrics of the queries that have anything to find."""

    queries: NDArray[np.int64]  # rows of the catalog, ascending
    names: tuple[str, ...]
    values: Tensor  # (queries, names)


def score_queries(
    embeddings: Vectors,
    catalog: Catalog,
    k: Sequence[int],
    *,
    distractors: Mapping[str, Vectors] | None = None,
    progress: Progress | None = None,
) -> dict[str, QueryTable]:
    """The metrics of every query: by setup where answers are judged, else one table named "".

    Args:
        embeddings: (n, d), in the order of the catalog.
        catalog: labels, and roles and judgements where there are any.
        k: cut-offs.
        distractors: as of `evaluate`.
        progress: as of `evaluate`.

    Raises:
        DataError: no query has a positive, or the embeddings are not those of the catalog.
        ConfigError: distractors without judgements.
    """
    if len(embeddings) != len(catalog):
        raise DataError(f"{len(embeddings)} embeddings for the {len(catalog)} images of {catalog.name}")
    if catalog.judgements:
        return _judged(embeddings, catalog, k, distractors or {}, progress)
    if distractors:
        raise ConfigError(
            f"{catalog.name} cannot be tested with distractors: they go with judged queries, as of roxford5k."
        )
    return {"": _labelled(embeddings, catalog, k, progress)}


def query_rows(catalog: Catalog) -> NDArray[np.int64]:
    """The images that query: those of that role or, without roles, all."""
    return np.arange(len(catalog)) if leave_one_out(catalog) else np.flatnonzero(catalog.roles == "query")


def gallery_rows(catalog: Catalog) -> NDArray[np.int64]:
    """The images that are searched."""
    return np.arange(len(catalog)) if leave_one_out(catalog) else np.flatnonzero(catalog.roles == "gallery")


def leave_one_out(catalog: Catalog) -> bool:
    """Whether every image queries all others."""
    return catalog.roles is None or not catalog.roles.any()  # In-shop's training images have no roles


def _labelled(embeddings: Vectors, catalog: Catalog, k: Sequence[int], progress: Progress | None) -> QueryTable:
    """By class: leave-one-out, or queries against a gallery."""
    if not isinstance(embeddings, Tensor):
        embeddings = torch.from_numpy(np.array(embeddings))
    labels = torch.from_numpy(catalog.labels.copy()).to(embeddings.device)
    if leave_one_out(catalog):
        scores = query_scores(embeddings, labels, k, progress=progress)
    else:
        queries, database = (torch.from_numpy(catalog.roles == role).to(labels.device) for role in ROLES)
        gallery, gallery_labels = embeddings[database], labels[database]
        scores = query_scores(embeddings[queries], labels[queries], k, gallery, gallery_labels, progress=progress)
    if not len(scores.queries):
        raise DataError(
            f"{catalog.name}: no query has another image of its class to find, so there is nothing to measure."
        )
    names = (*(f"r@{cut}" for cut in k), *(f"recall@{cut}" for cut in k), "mAP", "mAP@R", "R-precision")
    values = torch.cat([column.reshape(len(scores.queries), -1) for column in scores[1:]], dim=1)
    return QueryTable(query_rows(catalog)[scores.queries.cpu().numpy()], names, values)


def _judged(
    embeddings: Vectors,
    catalog: Catalog,
    k: Sequence[int],
    distractors: Mapping[str, Vectors],
    progress: Progress | None,
) -> dict[str, QueryTable]:
    assert catalog.judgements is not None
    assert catalog.roles is not None
    like = embeddings[:0] if isinstance(embeddings, Tensor) else torch.from_numpy(np.array(embeddings[:0]))
    asking = query_rows(catalog)
    scores = judged_scores(
        take([embeddings], asking, like.to(computed_dtype(like))),
        [embeddings, *distractors.values()],
        catalog.judgements,
        k,
        competes=catalog.roles == "gallery",
        progress=progress,
    )
    if not any(len(found.queries) for found in scores.values()):
        raise DataError(f"{catalog.name}: no query has anything to find, so there is nothing to measure.")
    tables = {}
    for setup, found in scores.items():
        of = f" {setup}" if setup else ""
        names = (f"mAP{of}", *(f"mP@{cut}{of}" for cut in k))
        values = torch.from_numpy(np.column_stack((found.average_precision, found.precision_at_k)))
        tables[setup] = QueryTable(asking[found.queries], names, values)
    return tables
