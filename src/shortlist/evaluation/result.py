"""The result of an evaluation: metrics with confidence intervals, and how they were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from shortlist.evaluation.intervals import Estimate
from shortlist.files import read_json, validated, verified, with_checksum


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a set of images, and the protocol by which they were measured.

    Args:
        data: Name of the images, under which a recipe lists the paper's results, such as "roxford5k+r1m".
        split: Split of the catalog, or "all" for all images of a source without splits.
        protocol: "leave-one-out" (every image is a query for all others), "query/gallery" (by the roles of the
            catalog), "revisited" (judged queries with several setups), "judged" (with one setup), or the name that
            the catalog itself gives to its protocol.
        queries: Number of queries.
        gallery: Number of images that are searched, including distractors.
        left_out: Number of queries without a positive in the gallery (in any setup).
        metrics: Means over queries. The metrics by which the benchmark is known come first.
        setups: Number of queries with a positive, per setup of judged queries.
        paper: Results of the paper in %.
        remarks: Notes about the images, such as counts that differ from the benchmark's.
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
        """Measured value minus the paper's in percentage points, for the metrics that have both."""
        both = [name for name in self.paper if name in self.metrics]
        return {name: 100 * self.metrics[name].value - self.paper[name] for name in both}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable values, as in evaluation.json, and their digest."""
        return with_checksum({**asdict(self), "remarks": list(self.remarks), "difference": self.difference})


def read_evaluations(file: Path) -> list[Evaluation]:
    """Read the evaluations that were written with `Evaluation.to_dict`.

    Raises:
        RunError: The file is missing or damaged.
    """
    found = read_json(file, list[dict[str, Any]])
    return [validated(verified(each, file), file, Evaluation) for each in found]
