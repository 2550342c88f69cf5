"""Protocols: leave-one-out, queries against a gallery, and judged queries; every figure with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shortlist.data import ROLES, Catalog
from shortlist.errors import ConfigError, DataError
from shortlist.ranking.metrics import query_scores
from shortlist.ranking.precision import computed_dtype
from shortlist.retrieval.estimates import Estimate, estimates
from shortlist.retrieval.judged import judged_scores
from shortlist.retrieval.vectors import Vectors, take

K, JUDGED_K = (1, 2, 4, 8), (1, 5, 10)  # cut-offs where nobody gives others


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and how.

    Args:
        data: what was tested on; also the name of its figures in a recipe, such as "roxford5k+r1m".
        split: of the catalog.
        protocol: leave-one-out: every image queries all others. query/gallery: as the catalog's roles say. revisited:
            answers judged in several setups; judged: in one. Or what the catalog itself calls it.
        queries, gallery: how many; distractors count as gallery.
        left_out: queries without anything to find (in any setup).
        metrics: means over queries; those by which the benchmark is known come first.
        setups: of judged queries, how many have a positive in each setup.
        paper: what the paper reports, in %.
        remarks: what a person should know of the images, such as counts that are not the benchmark's.
    """

    data: str
    split: str
    protocol: str
    queries: int
    gallery: int
    left_out: int
    metrics: Mapping[str, Estimate]
    setups: Mapping[str, int] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, float]:
        """The metrics without their intervals."""
        return {name: estimate.value for name, estimate in self.metrics.items()}

    @property
    def headline(self) -> dict[str, Estimate]:
        """The metrics by which the benchmark is known: r@k, or the mAP of each setup."""
        families = groupby(self.metrics, key=lambda name: name.partition("@")[0].partition(" ")[0])
        names = list(next(families, ("", iter(())))[1])
        return {name: self.metrics[name] for name in names}

    @property
    def difference(self) -> dict[str, float]:
        """Measured - paper in percentage points, where both are known."""
        both = [name for name in self.paper if name in self.metrics]
        return {name: 100 * self.metrics[name].value - self.paper[name] for name in both}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "remarks": list(self.remarks), "difference": self.difference}


def evaluate(
    embeddings: Vectors,
    catalog: Catalog,
    *,
    k: Sequence[int] | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    distractors: Mapping[str, Vectors] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Every exact metric of a catalog's embeddings, by the protocol that the catalog asks for.

    Judgements ask for the judged protocol, roles for queries against a gallery; with neither, every image queries all
    others. Judged queries stream over the embeddings in blocks, so that these may be memory maps of any length.

    Args:
        embeddings: (n, d), in the order of the catalog.
        catalog: labels, and roles and judgements where there are any.
        k: cut-offs. None: 1, 2, 4, 8, and 1, 5, 10 of judged queries.
        bootstrap: resamples of the queries behind the intervals; 0 for no intervals.
        seed: of the resamples.
        distractors: by name, more (m, d) of the gallery that are right for no query; for judged queries only.
        progress: called with the number of gallery rows done and of all; by judged queries only.

    Raises:
        DataError: no query has a positive, or the embeddings are not those of the catalog.
        ConfigError: distractors without judgements.
    """
    if len(embeddings) != len(catalog):
        raise DataError(f"{len(embeddings)} embeddings for the {len(catalog)} images of {catalog.name}")
    if catalog.judgements:
        return _judged(embeddings, catalog, k or JUDGED_K, bootstrap, seed, distractors or {}, progress)
    if distractors:
        raise ConfigError(
            f"{catalog.name} cannot be tested with distractors: they go with judged queries, as of roxford5k."
        )
    return _labelled(embeddings, catalog, k or K, bootstrap, seed)


def _labelled(embeddings: Vectors, catalog: Catalog, k: Sequence[int], bootstrap: int, seed: int) -> Evaluation:
    """By class: leave-one-out, or queries against a gallery."""
    if not isinstance(embeddings, Tensor):
        embeddings = torch.from_numpy(np.array(embeddings))
    labels = torch.from_numpy(catalog.labels.copy()).to(embeddings.device)
    if catalog.roles is None or not catalog.roles.any():  # In-shop's training images have no roles
        protocol, asked, gallery = "leave-one-out", len(catalog), len(catalog) - 1
        scores = query_scores(embeddings, labels, k)
    else:
        protocol = "query/gallery"
        queries, database = (torch.from_numpy(catalog.roles == role).to(labels.device) for role in ROLES)
        asked, gallery = int(queries.sum()), int(database.sum())
        scores = query_scores(embeddings[queries], labels[queries], k, embeddings[database], labels[database])
    if not len(scores.queries):
        raise DataError(
            f"{catalog.name}: no query has another image of its class to find, so there is nothing to measure."
        )
    names = [*(f"r@{cut}" for cut in k), *(f"recall@{cut}" for cut in k), "mAP", "mAP@R", "R-precision"]
    table = torch.cat([column.reshape(len(scores.queries), -1) for column in scores[1:]], dim=1)
    return Evaluation(
        catalog.name,
        _split(catalog),
        catalog.protocol or protocol,
        asked,
        gallery,
        asked - len(scores.queries),
        estimates(names, table, bootstrap, seed),
        remarks=catalog.remarks,
    )


def _judged(
    embeddings: Vectors,
    catalog: Catalog,
    k: Sequence[int],
    bootstrap: int,
    seed: int,
    distractors: Mapping[str, Vectors],
    progress: Callable[[int, int], None] | None,
) -> Evaluation:
    assert catalog.judgements is not None
    assert catalog.roles is not None
    like = embeddings[:0] if isinstance(embeddings, Tensor) else torch.from_numpy(np.array(embeddings[:0]))
    like = like.to(computed_dtype(like))
    asking = np.flatnonzero(catalog.roles == "query")
    gallery = catalog.roles == "gallery"
    scores = judged_scores(
        take([embeddings], asking, like),
        [embeddings, *distractors.values()],
        catalog.judgements,
        k,
        competes=gallery,
        progress=progress,
    )
    measured: dict[str, Estimate] = {}
    for setup, found in scores.items():
        if len(found.queries):
            of = f" {setup}" if setup else ""
            names = [f"mAP{of}", *(f"mP@{cut}{of}" for cut in k)]
            table = torch.from_numpy(np.column_stack((found.average_precision, found.precision_at_k)))
            measured |= estimates(names, table, bootstrap, seed)
    if not measured:
        raise DataError(f"{catalog.name}: no query has anything to find, so there is nothing to measure.")
    answered = np.unique(np.concatenate([found.queries for found in scores.values()]))
    return Evaluation(
        "+".join((catalog.name, *distractors)),
        _split(catalog),
        catalog.protocol or ("revisited" if len(scores) > 1 else "judged"),
        len(asking),
        int(gallery.sum()) + sum(len(each) for each in distractors.values()),
        len(asking) - len(answered),
        {name: measured[name] for name in sorted(measured, key=lambda name: not name.startswith("mAP"))},
        setups={setup: len(found.queries) for setup, found in scores.items() if setup},
        remarks=catalog.remarks,
    )


def _split(catalog: Catalog) -> str:
    return "+".join(dict.fromkeys(catalog.splits.tolist()))
