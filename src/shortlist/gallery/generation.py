"""One immutable state of a gallery's folder, which a process keeps while others change the gallery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shortlist.errors import DataError
from shortlist.files import file_digest
from shortlist.gallery.manifest import INDEX, Manifest, read_manifest
from shortlist.gallery.segment import SCHEMA, Segment, check_digest, read_segment, with_updates
from shortlist.gallery.store import GalleryError, Ids, Item, NoSuchItem, count_labels, labels_of
from shortlist.search import faiss_index
from shortlist.search.vectors import StackedVectors


@dataclass(frozen=True, eq=False)
class Generation:
    """A state of a gallery. The table and the vectors have one row per image, in the order of the ids.

    Args:
        manifest: The contents of gallery.json.
        segments: Segments, whose vectors together are those of the gallery.
        table: The newest record of each image, in one chunk.
        index: FAISS index of the first rows, or None.
    """

    manifest: Manifest
    segments: tuple[Segment, ...]
    table: pa.Table
    index: Any

    @cached_property
    def vectors(self) -> StackedVectors:
        """Vectors of all rows, (n, d), memory-mapped."""
        return StackedVectors([each.vectors for each in self.segments], self.manifest.dim)

    @cached_property
    def ids(self) -> Ids:
        found: Ids = self.table["id"].to_numpy()
        return found

    @cached_property
    def searchable(self) -> NDArray[np.bool_]:
        """Mask of the images that are not removed, (n,)."""
        removed: NDArray[np.bool_] = self.table["removed"].to_numpy()
        return ~removed

    @cached_property
    def rows(self) -> Ids:
        """Rows of the images that are not removed."""
        return np.flatnonzero(self.searchable)

    @cached_property
    def _label_codes(self) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
        """All sets of labels, and the position of each row's labels among them, (n,); -1 for no label."""
        coded = pc.dictionary_encode(self.table["label"].combine_chunks())
        sets = [labels_of(each) for each in coded.dictionary.to_pylist()]
        return sets, coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)

    def rows_with_label(self, label: str | None) -> Ids:
        """Return the rows of the images with a label, or of all images if it is None."""
        if label is None:
            return self.rows
        sets, codes = self._label_codes
        matching = [number for number, each in enumerate(sets) if label in each]
        return np.flatnonzero(np.isin(codes, matching) & self.searchable)

    def labels(self) -> dict[str, int]:
        """Return the number of images per label, sorted by label."""
        sets, codes = self._label_codes
        counts = np.bincount(codes[(codes >= 0) & self.searchable], minlength=len(sets)).tolist()
        return count_labels(dict(zip(sets, counts, strict=True)))

    def rows_of(self, ids: Sequence[int]) -> Ids:
        """Return the rows of images, or raise NoSuchItem."""
        wanted = np.asarray(ids, dtype=np.int64)
        rows = np.searchsorted(self.ids, wanted)
        known = rows < len(self.ids)
        known[known] = (self.ids[rows[known]] == wanted[known]) & self.searchable[rows[known]]
        if not known.all():
            raise NoSuchItem(f"The gallery has no image {wanted[~known][0]}.")
        return rows

    def items(self, rows: Sequence[int] | Ids) -> list[Item]:
        names = ["id", "path", "label", "fields"]
        found = self.table.select(names).take(np.asarray(rows, dtype=np.int64))
        return [Item.of(*each) for each in zip(*(found[name].to_pylist() for name in names), strict=True)]


def empty(manifest: Manifest) -> Generation:
    """Return the state of a gallery without files."""
    return Generation(manifest, (), SCHEMA.empty_table(), None)


def read(folder: Path, known: Generation | None = None) -> Generation:
    """Read the current state of a gallery.

    Args:
        folder: The gallery's folder.
        known: An earlier state. Its files that are still in use are not read again.

    Raises:
        GalleryError: The folder contains no gallery, or it is damaged.
    """
    while True:
        manifest = read_manifest(folder)
        if known is None or known.manifest.created != manifest.created:
            known = empty(manifest)
        try:
            return _open(folder, manifest, known)
        except (DataError, OSError, ValueError, RuntimeError, pa.ArrowException) as error:
            if read_manifest(folder) == manifest:  # otherwise, another process has replaced files in the meantime
                reason = str(error).rstrip(".")
                raise GalleryError(
                    f"The gallery {folder} is damaged: {reason}. Restore it, or create it again."
                ) from error


def _open(folder: Path, manifest: Manifest, known: Generation) -> Generation:
    pairs = zip(known.segments, manifest.segments, strict=False)
    same = [each for each, _ in takewhile(lambda pair: pair[0].facts == pair[1], pairs)]
    read_now = [read_segment(folder, facts, manifest.dim) for facts in manifest.segments[len(same) :]]
    before = known.table.slice(0, sum(len(each.vectors) for each in same))
    rows = pa.concat_tables([before, *(rows for _, rows, _ in read_now)]).combine_chunks()
    updates = pa.concat_tables([SCHEMA.empty_table(), *(updates for _, _, updates in read_now)])
    found = Generation(manifest, (*same, *(each for each, _, _ in read_now)), with_updates(rows, updates), None)
    return Generation(manifest, found.segments, found.table, _index(folder, found, known))


def _index(folder: Path, found: Generation, known: Generation) -> Any:
    facts = found.manifest.index
    if facts is None:
        return None
    if known.index is not None and known.manifest.index == facts:
        return known.index
    file = folder / INDEX.format(facts.number)
    check_digest(file, file_digest(file), facts.sha256)  # first: FAISS does not check what it reads
    return faiss_index.read(file, found.vectors[: facts.rows])
