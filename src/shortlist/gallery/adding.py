"""Which images of a catalog a gallery does not have yet, and how they come into it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.data import Catalog
from shortlist.encoding.embed import NoReadableImageError, encode_to_file
from shortlist.encoding.encoder import Encoder
from shortlist.encoding.vector_file import left_out_images
from shortlist.errors import DataError
from shortlist.files import absolute_path, size_and_mtime
from shortlist.gallery.store import Known, Row, Store
from shortlist.progress import Progress
from shortlist.search.vectors import open_vectors


@dataclass
class Added:
    """What became of the images that were to be added."""

    added: int = 0
    replaced: int = 0  # of them: in place of images whose files have changed
    unchanged: int = 0
    relabelled: int = 0  # of the unchanged
    unreadable: list[str] = field(default_factory=list)  # or not there


@dataclass
class _Plan:
    """What is to be done."""

    rows: dict[int, Row] = field(default_factory=dict)  # to be embedded, by their place in the catalog
    replaced: dict[str, list[int]] = field(default_factory=dict)  # ids of what is known of a path, and out of date
    labels: dict[int, str | None] = field(default_factory=dict)  # id -> its new label
    left_over: list[int] = field(default_factory=list)  # ids that someone who was killed did not come to remove


class Adding:
    """Brings a catalog's images into a store."""

    def __init__(self, store: Store, encoder: Encoder, catalog: Catalog) -> None:
        self.store, self.encoder = store, encoder
        self.catalog = _whole_images(catalog)
        self.done = Added(unreadable=[absolute_path(catalog.root / path) for path in catalog.missing])

    def run(self, workers: int, progress: Progress, indexing: Progress) -> Added:
        with self.store.changing() as work:
            plan = self._plan()
            places = list(plan.rows)
            step = self.store.at_once or max(len(places), 1)
            for start in range(0, len(places), step):
                shifted = _shifted(progress, start, len(places))
                self._add(plan, places[start : start + step], work, workers, shifted, indexing)
            if plan.labels or plan.left_over:
                self.store.change(removed=plan.left_over, labels=plan.labels, progress=indexing)
        if not self.done.added and not self.done.unchanged:
            raise DataError(f"{self.catalog.name}: none of its {len(self.done.unreadable):,} images can be read")
        return self.done

    def _plan(self) -> _Plan:
        rows, plan = dict(rows_of(self.catalog, self.done.unreadable)), _Plan()
        known = self.store.known([row.path for row in rows.values()])
        for place, row in rows.items():
            before: Sequence[Known] = known.get(row.path, ())
            same = [each for each in before if each.row[2:] == row[2:]]
            others = [each.id for each in before if each not in same[:1]]
            if not same:
                plan.rows[place], plan.replaced[row.path] = row, others
                continue
            plan.left_over += others
            self.done.unchanged += 1
            if row.label not in (None, same[0].row.label):
                plan.labels[same[0].id] = row.label
                self.done.relabelled += 1
        return plan

    def _add(
        self,
        plan: _Plan,
        places: list[int],
        work: Path,
        workers: int,
        progress: Progress,
        indexing: Progress,
    ) -> None:
        file = work / "vectors.npy"
        try:
            encode_to_file(self.encoder, self.catalog.subset(places), file, workers=workers, progress=progress)
        except NoReadableImageError:
            self.done.unreadable += [plan.rows[place].path for place in places]
            return
        bad = {absolute_path(path) for path in left_out_images(file)}
        rows = [plan.rows[place] for place in places if plan.rows[place].path not in bad]
        replaced = [each for row in rows for each in plan.replaced[row.path]]
        self.store.change(rows, open_vectors(file), removed=replaced, progress=indexing)
        self.done.unreadable += sorted(bad)
        self.done.added += len(rows)
        self.done.replaced += sum(bool(plan.replaced[row.path]) for row in rows)


def rows_of(catalog: Catalog, missing: list[str]) -> Iterable[tuple[int, Row]]:
    """The place in the catalog and the row of each image; a file that is listed twice counts once.

    Args:
        catalog: the images.
        missing: files that are not there are put into this.
    """
    seen = set()
    for place in range(len(catalog)):
        path = absolute_path(catalog.file(place))
        if path in seen:
            continue
        seen.add(path)
        found = size_and_mtime(Path(path))
        if found is None:
            missing.append(path)
        else:
            yield place, Row(path, catalog.class_names[catalog.labels[place]] or None, *found)


def _whole_images(catalog: Catalog) -> Catalog:
    if catalog.roles is not None:
        catalog = catalog.subset(catalog.roles != "query")
    boxed: NDArray[np.bool_] | None = None if catalog.boxes is None else ~np.isnan(catalog.boxes[:, 0])
    if boxed is not None and boxed.any():
        first = catalog.file(int(boxed.argmax()))
        raise DataError(f"a gallery holds whole images, but of {first} only what is in a box counts in {catalog.name}")
    return catalog


def _shifted(progress: Progress, start: int, total: int) -> Progress:
    return lambda done, _: progress(start + done, total)
