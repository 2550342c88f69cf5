"""Add the images of a catalog to a gallery: find the new and changed images, and embed them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.data import Catalog
from shortlist.encoding.embed import NoReadableImageError
from shortlist.encoding.encoder import Encoder
from shortlist.encoding.shards import Parts, encode_readable, existing_files
from shortlist.errors import ConfigError, DataError
from shortlist.gallery.change_log import ChangeLog
from shortlist.gallery.store import Floats, GalleryError, Row, Store, StoredRow, join_labels
from shortlist.locations import absolute_path, as_url
from shortlist.progress import Progress


@dataclass
class Added:
    """Numbers of added, replaced, unchanged and removed images, and the unreadable images.

    Args:
        added: New images.
        replaced: Images whose files have changed.
        unchanged: Images that the gallery already had.
        relabelled: Unchanged images with new labels or fields.
        removed: Images that the source no longer lists.
        unreadable: Paths of images that are missing or cannot be read, and the reasons.
    """

    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    relabelled: int = 0
    removed: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)


@dataclass
class _Plan:
    """The changes to make."""

    rows: dict[int, Row] = field(default_factory=dict)  # images to embed, by their index in the catalog
    replaced: dict[str, list[int]] = field(default_factory=dict)  # ids of outdated images, by path
    labels: dict[int, str | None] = field(default_factory=dict)  # new labels, by id
    fields: dict[int, str | None] = field(default_factory=dict)  # new fields, by id
    leftover: list[int] = field(default_factory=list)  # ids of duplicates that a killed process did not remove
    relabelled: list[str] = field(default_factory=list)  # paths of the images with new labels
    unlisted: dict[int, str] = field(default_factory=dict)  # images that are no longer in the catalog: path by id


class ImageAdder:
    """Adds the images of a catalog to a store; see `Gallery.add`."""

    def __init__(
        self,
        store: Store,
        encoder: Encoder,
        catalog: Catalog,
        *,
        parts: Path | str | None,
        ids: Mapping[str, int] | None,
        prune: str | None,
        min_score: float | None,
        log: Path | str | None,
    ) -> None:
        self.store, self.encoder, self.ids, self.prune, self.min_score = store, encoder, ids, prune, min_score
        self.log = ChangeLog(log, store.name)
        self.catalog = whole_images(catalog)
        self.parts = None if parts is None else Parts(parts, encoder, self.catalog)
        self.result = Added()

    def run(self, workers: int | None, embedding: Progress, indexing: Progress) -> Added:
        with self.store.changing() as work:
            if self.encoder.fingerprint != self.store.fingerprint:
                raise GalleryError(f"{self.store.name} was replaced by a gallery of another model: open it again.")
            plan = self._plan()
            indices = list(plan.rows)
            step = self.store.images_per_change or max(len(indices), 1)
            for start in range(0, max(len(indices), 1), step):
                progress = _shifted(embedding, start, len(indices))
                rows, vectors = self._embed(plan, indices[start : start + step], work, workers, progress)
                self._change(plan, rows, vectors, indexing, last=start + step >= len(indices))
            self.log.write("unreadable", self.result.unreadable, reasons=self.result.unreadable)
        if not (self.result.added or self.result.replaced or self.result.unchanged):
            raise NoReadableImageError(self.catalog.name, self.result.unreadable)
        if self.min_score not in (None, self.store.min_score):  # no image was changed
            self.store.set_min_score(self.min_score)
        if self.parts is not None:
            self.parts.remove()
        return self.result

    def _plan(self) -> _Plan:
        rows, plan = dict(_rows_of(self.catalog, self.result.unreadable)), _Plan()
        stored_rows = self.store.stored_rows([row.path for row in rows.values()])
        for index, row in rows.items():
            stored: Sequence[StoredRow] = stored_rows.get(row.path, ())
            same = [each for each in stored if each.row[2:4] == row[2:4]]  # size and modification time
            others = [each.id for each in stored if each not in same[:1]]
            if not same:
                plan.rows[index], plan.replaced[row.path] = row, others
                continue
            plan.leftover += others
            self.result.unchanged += 1
            known = same[0]
            if row.label not in (None, known.row.label):
                plan.labels[known.id] = row.label
            if row.fields not in (None, known.row.fields):
                plan.fields[known.id] = row.fields
            if known.id in plan.labels or known.id in plan.fields:
                plan.relabelled.append(row.path)
                self.result.relabelled += 1
        if self.prune is not None:
            plan.unlisted = self._unlisted(self.prune, {row.path for row in rows.values()})
        return plan

    def _unlisted(self, folder: str, listed: Set[str]) -> dict[int, str]:
        items = self.store.items(None, 0, len(self.store))
        return {item.id: path for item in items if _is_in(path := as_url(item.path), folder) and path not in listed}

    def _embed(
        self, plan: _Plan, indices: list[int], work: Path, workers: int | None, progress: Progress
    ) -> tuple[list[Row], Floats]:
        """Embed images, and return the rows and the vectors of those that can be read."""
        settings: dict[str, Any] = {"parts": self.parts, "workers": workers, "progress": progress}
        unreadable = self.result.unreadable
        vectors = encode_readable(self.encoder, self.catalog, work / "vectors.npy", indices, unreadable, **settings)
        return [plan.rows[index] for index in indices if plan.rows[index].path not in unreadable], vectors

    def _change(self, plan: _Plan, rows: list[Row], vectors: Floats, indexing: Progress, last: bool) -> None:
        """Add images and, in the last change, make all other changes of the plan."""
        rest = plan if last else _Plan()
        replaced = [each for row in rows for each in plan.replaced[row.path]]
        removed = [*replaced, *rest.leftover, *rest.unlisted]
        if not (rows or removed or rest.labels or rest.fields):
            return
        self.store.change(
            rows,
            vectors,
            ids=None if self.ids is None else [self.ids[row.path] for row in rows],
            removed=removed,
            labels=rest.labels,
            fields=rest.fields,
            min_score=self.min_score,
            progress=indexing,
        )
        changed = [row.path for row in rows if plan.replaced[row.path]]
        new = [row.path for row in rows if not plan.replaced[row.path]]
        self.result.added += len(new)
        self.result.replaced += len(changed)
        self.result.removed += len(rest.unlisted)
        self.log.write("added", new)
        self.log.write("replaced", changed)
        self.log.write("relabelled", rest.relabelled)
        self.log.write("removed", rest.unlisted.values())


def _rows_of(catalog: Catalog, unreadable: dict[str, str]) -> Iterable[tuple[int, Row]]:
    """Yield the index in the catalog and the row of each existing file, once per file; see `existing_files`."""
    seen = set()
    for index, path, stamp in existing_files(catalog, unreadable):
        if path not in seen:
            seen.add(path)
            yield index, Row(path, join_labels(catalog.label_names(index)), *stamp, _fields(catalog, index))


def _fields(catalog: Catalog, index: int) -> str | None:
    """Return the fields of an image as JSON."""
    if not catalog.fields:
        return None
    return json.dumps({name: values[index] for name, values in catalog.fields.items()}, ensure_ascii=False)


def whole_images(catalog: Catalog) -> Catalog:
    """Leave out queries, and raise a DataError if any other image is cropped to a box."""
    if catalog.roles is not None:
        catalog = catalog.subset(catalog.roles != "query")
    boxed: NDArray[np.bool_] | None = None if catalog.boxes is None else ~np.isnan(catalog.boxes[:, 0])
    if boxed is not None and boxed.any():
        first = catalog.file(int(boxed.argmax()))
        raise DataError(f"A gallery contains whole images, but {catalog.name} crops {first} to a box.")
    return catalog


def folder_to_prune(catalog: Catalog, source: Path | str) -> str:
    """Return the folder whose images are removed from a gallery if the catalog does not list them.

    Args:
        catalog: The images.
        source: What the catalog was opened from.

    Raises:
        ConfigError: The source is an image file.
    """
    if len(catalog) == 1 and absolute_path(catalog.file(0)) == absolute_path(source):
        raise ConfigError("`prune` is for folders and tables, not for a single image.")
    return absolute_path(catalog.root)


def _is_in(path: str, folder: str) -> bool:
    """Return whether a path is in a folder, at any depth. Every path is in "".

    >>> _is_in("/a/b/c.png", "/a"), _is_in("/ab/c.png", "/a"), _is_in("s3://a/c.png", "")
    (True, False, True)
    """
    return not folder or path.startswith(folder.rstrip("/") + "/")


def _shifted(progress: Progress, start: int, total: int) -> Progress:
    return lambda done, _: progress(start + done, total)
