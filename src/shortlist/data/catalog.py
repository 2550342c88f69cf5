"""The table that every dataset becomes: path, label, split, and role where there are queries. All else reads this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shortlist.errors import DataError

SPLITS = ("train", "validation", "test")
ROLES = ("query", "gallery")


@dataclass(frozen=True, eq=False)
class Judgement:
    """What one query should find, and what is neither right nor wrong: rows of the catalog."""

    positives: NDArray[np.int64]
    junk: NDArray[np.int64]


Judgements = Mapping[str, tuple[Judgement, ...]]  # by setup (easy, medium, ...): one for each query, in their order


@dataclass(frozen=True, eq=False)
class Catalog:
    """n labelled images. Checked once, when it is made; its arrays cannot be written to.

    Args:
        name: what messages call it: a benchmark's name, or the name of the folder or table.
        root: the folder that the paths are relative to.
        paths: (n,) POSIX strings (an object array: one long path must not widen all the others).
        labels: (n,) indices into `class_names`.
        class_names: every class, also those without an image here.
        splits: (n,) each one of SPLITS, or "" where nobody has decided yet.
        roles: (n,) each one of ROLES or "", or None where the data knows no roles.
        boxes: (n, 4) the part of each image that counts, left, top, right, bottom in its upright pixels, and NaN for
            the whole image; None where all are whole.
        judgements: what each query should find, where that is not "the images of its class".
        protocol: what its results are to be called, where roles and judgements do not say enough.
        missing: what the source names and does not have, left out because someone said so.
        ignored: files beside the images that are no images by their ending.
        remarks: what a person should know of it, such as counts that are not those of the benchmark.
    """

    name: str
    root: Path
    paths: NDArray[np.object_]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    splits: NDArray[np.str_]
    roles: NDArray[np.str_] | None = None
    boxes: NDArray[np.float64] | None = None
    judgements: Judgements | None = None
    protocol: str | None = None
    missing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fields: dict[str, NDArray[Any]] = {
            "paths": np.array(self.paths, dtype=object),
            "labels": np.array(self.labels, dtype=np.int64),
            "splits": np.array(self.splits, dtype=np.str_),
        }
        if self.roles is not None:
            fields["roles"] = np.array(self.roles, dtype=np.str_)
        if self.boxes is not None:
            fields["boxes"] = np.array(self.boxes, dtype=np.float64)
        for field, values in fields.items():
            if values.shape != (len(fields["paths"]), *((4,) if field == "boxes" else ())):
                raise ValueError(f"{field} has shape {values.shape}, but there are {len(fields['paths'])} paths")
            values.flags.writeable = False
            object.__setattr__(self, field, values)
        object.__setattr__(self, "root", Path(self.root))
        object.__setattr__(self, "class_names", tuple(self.class_names))
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("two classes have the same name")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < len(self.class_names):
            raise ValueError(f"labels must be indices of the {len(self.class_names)} class names")
        _check_values("splits", self.splits, SPLITS)
        if self.roles is not None:
            _check_values("roles", self.roles, ROLES)
        if self.judgements is not None:
            self._check_judgements(self.judgements)

    def _check_judgements(self, judgements: Judgements) -> None:
        queries = 0 if self.roles is None else int((self.roles == "query").sum())
        for setup, each in judgements.items():
            if len(each) != queries:
                raise ValueError(f"{setup} judges {len(each)} queries, but {queries} images have the role of a query")
            for judgement in each:
                rows = np.concatenate((judgement.positives, judgement.junk))
                inside = not len(rows) or (rows.min() >= 0 and rows.max() < len(self))
                if not inside or (len(rows) and (self.roles[rows] != "gallery").any()):  # type: ignore[index]
                    raise ValueError(f"the judgements of {setup} must be rows of the gallery")

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, index: int) -> Path:
        """Where image `index` is."""
        path: str = self.paths[index]
        return self.root / path

    def subset(self, which: ArrayLike) -> Catalog:
        """Some of the images, by a mask or by indices. Labels stay indices into the same class names."""
        chosen = np.asarray(which)
        if not chosen.size:  # an empty list is an array of floats
            chosen = chosen.astype(np.int64)
        return replace(
            self,
            paths=self.paths[chosen],
            labels=self.labels[chosen],
            splits=self.splits[chosen],
            roles=None if self.roles is None else self.roles[chosen],
            boxes=None if self.boxes is None else self.boxes[chosen],
            judgements=None if self.judgements is None else self._judgements_of(np.arange(len(self))[chosen]),
        )

    def _judgements_of(self, rows: NDArray[np.int64]) -> Judgements:
        """The judgements when only these rows are left, in this order."""
        assert self.judgements is not None
        assert self.roles is not None
        now = np.full(len(self), -1)
        now[rows] = np.arange(len(rows))
        number = np.cumsum(self.roles == "query") - 1  # of each query among the queries
        queries = [int(number[row]) for row in rows if self.roles[row] == "query"]

        def left(judged: NDArray[np.int64]) -> NDArray[np.int64]:
            moved = now[judged]
            return moved[moved >= 0]

        return {
            setup: tuple(Judgement(left(each[query].positives), left(each[query].junk)) for query in queries)
            for setup, each in self.judgements.items()
        }

    def split(self, name: str) -> Catalog:
        """The images of one split.

        Raises:
            DataError: there are none.
        """
        if name not in SPLITS:
            raise ValueError(f"a split is one of {', '.join(SPLITS)}, not {name!r}")
        part = self.subset(self.splits == name)
        if not len(part):
            there = ", ".join(split for split in SPLITS if (self.splits == split).any()) or "none"
            raise DataError(f"{self.name} has no {name} images (splits that it has: {there})")
        return part

    def classes(self) -> NDArray[np.int64]:
        """The labels that have at least one image here, ascending."""
        return np.flatnonzero(np.bincount(self.labels, minlength=len(self.class_names))).astype(np.int64)

    def class_sizes(self) -> NDArray[np.int64]:
        """Images of each of `classes()`, in the same order."""
        sizes = np.bincount(self.labels, minlength=len(self.class_names))
        return sizes[sizes > 0].astype(np.int64)

    def fingerprint(self) -> str:
        """SHA-256 of which image has which class, split and role, in which order; not of where the root is."""
        digest = hashlib.sha256()
        for part in (self.paths, self.labels, np.array(self.class_names, dtype=object), self.splits, self.roles):
            digest.update(json.dumps(None if part is None else part.tolist()).encode())
        if self.boxes is not None:
            digest.update(self.boxes.tobytes())
        for setup, each in (self.judgements or {}).items():
            judged = [(one.positives.tolist(), one.junk.tolist()) for one in each]
            digest.update(json.dumps([setup, judged]).encode())
        return digest.hexdigest()


def _check_values(field: str, values: NDArray[np.str_], known: tuple[str, ...]) -> None:
    bad = ~np.isin(values, [*known, ""])
    if bad.any():
        raise ValueError(f"{field} holds {str(values[bad][0])!r}; it may hold {', '.join(known)}")
