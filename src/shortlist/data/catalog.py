"""The catalog: one table of paths, labels, splits and roles, which every dataset is converted to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shortlist.errors import DataError
from shortlist.locations import join

SPLITS = ("train", "validation", "test")
ROLES = ("query", "gallery")


@dataclass(frozen=True, eq=False)
class Judgement:
    """Ground truth of one query, as row indices of the catalog.

    Args:
        positives: (p,) images that the query should find.
        junk: (j,) images that count as neither right nor wrong; they are removed from the ranking.
    """

    positives: NDArray[np.int64]
    junk: NDArray[np.int64]


Judgements = Mapping[str, tuple[Judgement, ...]]  # setup (easy, medium, ...) -> one judgement per query, in query order


@dataclass(frozen=True, eq=False)
class Catalog:
    """Table of n labelled images. It is validated once, on construction, and its arrays are read-only.

    Args:
        name: Name used in messages: the name of the benchmark, folder or table.
        root: Folder that the paths are relative to; see `locations` for folders in object stores.
        paths: (n,) POSIX paths or URLs, in an object array so that one long path does not widen all others.
        labels: (n,) indices into `class_names`.
        class_names: Names of all classes, including classes without an image in this catalog.
        splits: (n,) values of SPLITS, or "" for images that have not been assigned to a split.
        roles: (n,) values of ROLES or "". None if the data does not distinguish queries and gallery.
        boxes: (n, 4) region of interest of each image as left, top, right, bottom in pixels of the upright image, and
            NaN for a whole image. None if all images are used whole.
        judgements: Ground truth of each query. None if the positives of a query are the images of its class.
        protocol: Name of the evaluation protocol, if roles and judgements do not determine it.
        label_sets: (n,) tuples of all labels of each image; the first one is that in `labels`. Images that share any
            label are positives of each other. None if every image has one label.
        fields: Other values of the images, such as prices, by the name of their column: (n,) each.
        missing: Files that the source lists but that do not exist, and that were skipped on request.
        ignored: Files found next to the images whose extension is not that of an image.
        remarks: Notes for the user, such as counts that differ from those of the benchmark.

    Raises:
        ValueError: If shapes disagree, or a label, split, role, class name or judgement is invalid.
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
    label_sets: NDArray[np.object_] | None = None
    fields: Mapping[str, NDArray[np.object_]] | None = None
    missing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def from_classes(
        cls,
        name: str,
        root: Path,
        paths: Sequence[str],
        classes: Sequence[str | int] | Sequence[tuple[str, ...]],
        splits: ArrayLike = "",
        **others: Any,
    ) -> Catalog:
        """Return a catalog whose class names are the sorted classes of its images.

        Args:
            name: See `Catalog`.
            root: See `Catalog`.
            paths: (n,) paths or URLs.
            classes: (n,) class of each image, as text or as an integer, or the tuple of all its classes.
            splits: (n,) values of SPLITS, or one for all images.
            others: Other arguments of `Catalog`.
        """
        tuples = [each if isinstance(each, tuple) else (each,) for each in classes]
        known = sorted({each for several in tuples for each in several})
        label_of = {each: label for label, each in enumerate(known)}
        sets = [tuple(label_of[each] for each in several) for several in tuples]
        return cls(
            name=name,
            root=root,
            paths=object_array(paths),
            labels=np.array([several[0] for several in sets], dtype=np.int64),
            class_names=tuple(map(str, known)),
            splits=np.full(len(paths), splits),
            label_sets=object_array(sets) if any(len(several) > 1 for several in sets) else None,
            **others,
        )

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
        if self.label_sets is not None:
            fields["label_sets"] = self.label_sets
        for field, values in fields.items():
            if values.shape != (len(fields["paths"]), *((4,) if field == "boxes" else ())):
                raise ValueError(f"{field} has shape {values.shape}, but there are {len(fields['paths'])} paths")
            values.flags.writeable = False
            object.__setattr__(self, field, values)
        object.__setattr__(self, "root", Path(self.root))
        object.__setattr__(self, "class_names", tuple(self.class_names))
        self._check_values()

    def _check_values(self) -> None:
        if any(len(values) != len(self) for values in (self.fields or {}).values()):
            raise ValueError(f"Each of the fields needs {len(self)} values, one per path.")
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("Two classes have the same name.")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < len(self.class_names):
            raise ValueError(f"labels must be indices of the {len(self.class_names)} class names")
        _check_values("splits", self.splits, SPLITS)
        if self.roles is not None:
            _check_values("roles", self.roles, ROLES)
        if self.judgements is not None:
            self._check_judgements(self.judgements)
        if self.label_sets is not None:
            self._check_label_sets(self.label_sets)

    def _check_label_sets(self, label_sets: NDArray[np.object_]) -> None:
        known = range(len(self.class_names))
        for first, each in zip(self.labels.tolist(), label_sets, strict=True):
            if each[0] != first or len(set(each)) < len(each) or min(each) not in known or max(each) not in known:
                raise ValueError("label_sets must be tuples of distinct labels, the first of which is that in labels")

    def _check_judgements(self, judgements: Judgements) -> None:
        queries = 0 if self.roles is None else int((self.roles == "query").sum())
        for setup, per_query in judgements.items():
            if len(per_query) != queries:
                raise ValueError(f"{setup} judges {len(per_query)} queries, but {queries} images have the role query")
            for judgement in per_query:
                rows = np.concatenate((judgement.positives, judgement.junk))
                in_range = not len(rows) or (rows.min() >= 0 and rows.max() < len(self))
                if not in_range or (len(rows) and (self.roles[rows] != "gallery").any()):  # type: ignore[index]
                    raise ValueError(f"The judgements of {setup} must be rows of the gallery.")

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, index: int) -> Path:
        """Return the path of image `index`, including the root."""
        path: str = self.paths[index]
        return join(self.root, path)

    def box(self, index: int) -> list[float] | None:
        """Return the region of interest of image `index`; None if the image is used whole."""
        box: list[float] | None = None if self.boxes is None else self.boxes[index].tolist()
        return None if box is None or isnan(box[0]) else box

    def label_names(self, index: int) -> tuple[str, ...]:
        """Return the names of all labels of image `index`."""
        labels = (int(self.labels[index]),) if self.label_sets is None else self.label_sets[index]
        return tuple(self.class_names[label] for label in labels)

    @cached_property
    def relevance_labels(self) -> NDArray[np.int64]:
        """Labels that losses and metrics compare: (n,) or, if images have several, (n, L) padded with -1."""
        if self.label_sets is None:
            return self.labels
        width = max(map(len, self.label_sets), default=1)
        if width == 1:
            return self.labels
        return np.array([(*each, *(-1,) * (width - len(each))) for each in self.label_sets]).reshape(-1, width)

    def share_label(self, one: ArrayLike, other: ArrayLike) -> NDArray[np.bool_]:
        """Return whether the images `one[i]` and `other[i]` share a label, (m,), for two arrays of rows (m,)."""
        labels = self.relevance_labels.reshape(len(self), -1)
        left, right = labels[np.asarray(one)], labels[np.asarray(other)]
        shared: NDArray[np.bool_] = ((left[:, :, None] == right[:, None]) & (left[:, :, None] >= 0)).any((1, 2))
        return shared

    def subset(self, which: ArrayLike) -> Catalog:
        """Return the selected images as a catalog. Labels remain indices into the same class names.

        Args:
            which: Boolean mask (n,), or row indices in the desired order.
        """
        chosen = np.asarray(which)
        if not chosen.size:  # np.asarray([]) has a float dtype, which cannot index
            chosen = chosen.astype(np.int64)
        return replace(
            self,
            paths=self.paths[chosen],
            labels=self.labels[chosen],
            splits=self.splits[chosen],
            roles=None if self.roles is None else self.roles[chosen],
            boxes=None if self.boxes is None else self.boxes[chosen],
            label_sets=None if self.label_sets is None else self.label_sets[chosen],
            fields=None if self.fields is None else {name: each[chosen] for name, each in self.fields.items()},
            judgements=None if self.judgements is None else self._judgements_of(np.arange(len(self))[chosen]),
        )

    def _judgements_of(self, rows: NDArray[np.int64]) -> Judgements:
        """Return the judgements of a catalog that keeps only these rows, in this order."""
        assert self.judgements is not None
        assert self.roles is not None
        new_row = np.full(len(self), -1)
        new_row[rows] = np.arange(len(rows))
        query_number = np.cumsum(self.roles == "query") - 1  # (n,) valid where the role is query
        queries = [int(query_number[row]) for row in rows if self.roles[row] == "query"]

        def remaining(judged: NDArray[np.int64]) -> NDArray[np.int64]:
            moved = new_row[judged]
            return moved[moved >= 0]

        return {
            setup: tuple(
                Judgement(remaining(per_query[query].positives), remaining(per_query[query].junk)) for query in queries
            )
            for setup, per_query in self.judgements.items()
        }

    def split(self, name: str) -> Catalog:
        """Return the images of one split.

        Raises:
            DataError: If the split has no images.
            ValueError: If `name` is not one of SPLITS.
        """
        if name not in SPLITS:
            raise ValueError(f"A split is one of {', '.join(SPLITS)}, not {name!r}.")
        part = self.subset(self.splits == name)
        if not len(part):
            available = ", ".join(split for split in SPLITS if (self.splits == split).any()) or "none"
            raise DataError(f"{self.name} has no {name} images (available splits: {available}).")
        return part

    def classes(self) -> NDArray[np.int64]:
        """Return the labels that have at least one image in this catalog, in ascending order."""
        return np.unique(self.labels)

    def class_sizes(self) -> NDArray[np.int64]:
        """Return the number of images of each class in `classes()`, in the same order."""
        return np.unique(self.labels, return_counts=True)[1]

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of the table's content and order; the root folder is not part of it."""
        digest = hashlib.sha256()
        for part in (self.paths, self.labels, np.array(self.class_names, dtype=object), self.splits, self.roles):
            digest.update(json.dumps(None if part is None else part.tolist()).encode())
        if self.boxes is not None:
            digest.update(self.boxes.tobytes())
        if self.label_sets is not None:
            digest.update(json.dumps(self.label_sets.tolist()).encode())
        for setup, per_query in (self.judgements or {}).items():
            judged = [(judgement.positives.tolist(), judgement.junk.tolist()) for judgement in per_query]
            digest.update(json.dumps([setup, judged]).encode())
        return digest.hexdigest()


def object_array(values: Sequence[Any]) -> NDArray[np.object_]:
    """Return an array of objects, which may be tuples."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _check_values(field: str, values: NDArray[np.str_], known: tuple[str, ...]) -> None:
    unknown = ~np.isin(values, [*known, ""])
    if unknown.any():
        raise ValueError(f"{field} contains {str(values[unknown][0])!r}; valid values are {', '.join(known)}")
