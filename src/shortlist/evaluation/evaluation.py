"""Protocols: leave-one-out, queries against a gallery, and judged queries; every figure with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from shortlist.data import Catalog
from shortlist.evaluation.intervals import Estimate, estimates
from shortlist.evaluation.protocols import gallery_rows, leave_one_out, query_rows, score_queries
from shortlist.progress import Progress
from shortlist.search.vectors import Vectors

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

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Evaluation:
        """What `to_dict` gave, as evaluation.json has it."""
        known = {name: found[name] for name in cls.__dataclass_fields__}
        metrics = {name: Estimate(**each) for name, each in found["metrics"].items()}
        return cls(**{**known, "metrics": metrics, "remarks": tuple(found["remarks"])})


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
        progress: called with the number of queries (of gallery rows, for judged queries) done, and of all.

    Raises:
        DataError: no query has a positive, or the embeddings are not those of the catalog.
        ConfigError: distractors without judgements.
    """
    distractors = distractors or {}
    k = k or (JUDGED_K if catalog.judgements else K)
    tables = score_queries(embeddings, catalog, k, distractors=distractors, progress=progress)
    measured: dict[str, Estimate] = {}
    for table in tables.values():
        if len(table.queries):
            measured |= estimates(table.names, table.values, bootstrap, seed)
    if catalog.judgements:
        measured = {name: measured[name] for name in sorted(measured, key=lambda name: not name.startswith("mAP"))}
    asked = len(query_rows(catalog))
    own = len(gallery_rows(catalog)) - leave_one_out(catalog)  # an image is not searched for itself
    return Evaluation(
        "+".join((catalog.name, *distractors)),
        "+".join(dict.fromkeys(catalog.splits.tolist())),
        catalog.protocol or _protocol(catalog),
        asked,
        own + sum(len(each) for each in distractors.values()),
        asked - len(np.unique(np.concatenate([table.queries for table in tables.values()]))),
        measured,
        setups={setup: len(table.queries) for setup, table in tables.items() if setup},
        remarks=catalog.remarks,
    )


def _protocol(catalog: Catalog) -> str:
    if catalog.judgements:
        return "revisited" if len(catalog.judgements) > 1 else "judged"
    return "leave-one-out" if leave_one_out(catalog) else "query/gallery"
