"""A gallery in a folder: items, vectors, a FAISS index of many vectors, and the model that computed the vectors.

A change writes a segment with the added, removed and relabelled images, and then replaces gallery.json, which lists the
segments. If the process is killed before that, the gallery is unchanged. Processes that have the gallery open continue
to use the files that they opened. Small segments are merged when there are many of them, and the vectors of removed
images are dropped when there are many of them. The amortised cost of a change is proportional to its size.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shortlist.encoding.encoder import ENCODER_FILE, Encoder, read_settings
from shortlist.files import exclusive_lock, file_digest
from shortlist.gallery import generation
from shortlist.gallery.generation import Generation
from shortlist.gallery.manifest import (
    INDEX,
    IndexFacts,
    Manifest,
    Recall,
    delete_unused,
    gallery_files,
    new_number,
    read_manifest,
    write_manifest,
)
from shortlist.gallery.segment import Segment, first_to_merge, new_rows, with_column, with_updates, write_segment
from shortlist.gallery.store import MODEL, Floats, GalleryError, Hit, Ids, Item, Row, StoredRow, free_ids
from shortlist.locations import absolute_path
from shortlist.progress import Progress
from shortlist.search import faiss_index
from shortlist.search.exact import nearest
from shortlist.search.vectors import StackedVectors

WORK = ".adding"
MAX_REMOVED_SHARE = 0.2  # of the rows; above it, the vectors of removed images are dropped and the index is rebuilt
MAX_UNINDEXED_SHARE, MIN_UNINDEXED = 0.02, 1_000  # rows outside the index are searched exactly; more are indexed
MAX_COPIED_VECTORS = 65_536  # number of vectors of one label to copy for a search; more are searched in place
RETRAIN_FACTOR = 2.0  # IVF-PQ is trained again when the gallery has grown by this factor


class FolderStore:
    """A gallery in a folder; see `Store`. Several threads may search it, even while it changes."""

    images_per_change = None  # all images of a call are added by one change

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = generation.read(folder)

    @classmethod
    def create(cls, folder: Path, encoder: Encoder, kind: str = "auto") -> FolderStore:
        """Create an empty gallery.

        Raises:
            GalleryError: The folder has other contents, or another process is changing it.
            ConfigError: The kind of index is unknown.
            MissingExtraError: This kind of index requires FAISS, which is not installed.
        """
        faiss_index.check_kind(kind)
        faiss_index.check_installed(kind)
        if folder.is_file() or (folder.is_dir() and _has_other_contents(folder)):
            raise GalleryError(f"{folder} exists and is not a gallery: choose another location.")
        with _lock(folder):
            encoder.save(folder / MODEL)
            manifest = Manifest(
                created=uuid.uuid4().hex, fingerprint=encoder.fingerprint, dim=encoder.dim, requested_kind=kind
            )
            write_manifest(folder, manifest)
        return cls(folder)

    def close(self) -> None:
        """Do nothing: memory maps are released with the object."""

    def refresh(self) -> None:
        if read_manifest(self.folder) != self.now.manifest:
            self.now = generation.read(self.folder, self.now)

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def dim(self) -> int:
        return self.now.manifest.dim

    @property
    def fingerprint(self) -> str:
        return self.now.manifest.fingerprint

    @property
    def identity(self) -> str:
        return self.now.manifest.created

    @property
    def requested_kind(self) -> str:
        return self.now.manifest.requested_kind

    @property
    def min_score(self) -> float | None:
        return self.now.manifest.min_score

    def set_min_score(self, score: float | None) -> None:
        with self.changing():
            self.now = replace(self.now, manifest=self.now.manifest.model_copy(update={"min_score": score}))
            write_manifest(self.folder, self.now.manifest)

    def encoder(self, model: Path | None) -> Encoder:
        own = self.folder / MODEL
        if model is None:
            return Encoder.load(own)
        return Encoder.load(model, read_settings(own / ENCODER_FILE))

    def facts(self) -> dict[str, Any]:
        manifest = self.now.manifest
        recall = None if manifest.recall is None else manifest.recall.model_dump()
        return {"place": absolute_path(self.folder), "kind": manifest.kind, "recall": recall}

    def __len__(self) -> int:
        return len(self.now.rows)

    def item(self, id: int) -> Item:  # noqa: A002
        now = self.now
        return now.items(now.rows_of([id]))[0]

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]:
        now = self.now
        return now.items(now.rows_with_label(label)[offset : offset + limit])

    def labels(self) -> dict[str, int]:
        return self.now.labels()

    def vectors(self, ids: Sequence[int]) -> Floats:
        now = self.now
        return now.vectors[now.rows_of(ids)]

    def search(self, vectors: Floats, k: int, label: str | None) -> list[list[Hit]]:
        now = self.now
        rows = now.rows_with_label(label)
        k = min(k, len(rows))
        if not k:
            return [[] for _ in vectors]
        if label is None:
            searchable = None if len(rows) == len(now.table) else now.searchable
            return _hits(now, *faiss_index.search(now.index, now.vectors, vectors, k, searchable))
        # Exact search: an approximate index has a low recall among few of its vectors.
        if len(rows) <= MAX_COPIED_VECTORS:
            scores_of_copies, positions = nearest(vectors, now.vectors[rows], k)
            return _hits(now, scores_of_copies.numpy(), rows[positions.numpy()])
        best, best_rows = nearest(vectors, now.vectors, k, searchable=np.isin(np.arange(len(now.table)), rows))
        return _hits(now, best.numpy(), best_rows.numpy())

    def stored_rows(self, paths: Sequence[str]) -> Mapping[str, list[StoredRow]]:
        table = self.now.table
        chosen = pc.is_in(table["path"], value_set=pa.array(paths, pa.string()))
        found: dict[str, list[StoredRow]] = {}
        for each in table.filter(pc.and_not(chosen, table["removed"])).to_pylist():
            row = Row(*(each[name] for name in Row._fields))
            found.setdefault(row.path, []).append(StoredRow(each["id"], row))
        return found

    def ids_under(self, path: str) -> list[int]:
        table = self.now.table
        chosen = pc.or_(pc.equal(table["path"], path), pc.starts_with(table["path"], path.rstrip("/") + "/"))
        found: list[int] = table.filter(pc.and_not(chosen, table["removed"]))["id"].to_pylist()
        return found

    @contextmanager
    def changing(self) -> Iterator[Path]:
        """Lock the folder, or raise a GalleryError if another process holds the lock; see `Store.changing`."""
        with _lock(self.folder):
            self.refresh()
            delete_unused(self.folder, self.now.manifest)  # left behind by a killed process
            work = self.folder / WORK
            yield work
            shutil.rmtree(work, ignore_errors=True)  # after an error it is kept, to resume from it

    def change(
        self,
        rows: Sequence[Row] = (),
        vectors: Floats | None = None,
        *,
        ids: Sequence[int] | None = None,
        removed: Sequence[int] = (),
        labels: Mapping[int, str | None] | None = None,
        fields: Mapping[int, str | None] | None = None,
        min_score: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        now = self.now
        updates = _updates(now, removed, {"label": labels or {}, "fields": fields or {}})
        added = new_rows(rows, free_ids(len(rows), now.manifest.next_id, ids))
        table = with_updates(pa.concat_tables([now.table, added]).combine_chunks(), updates)
        new_vectors = np.empty((0, self.dim), np.float32) if vectors is None else vectors
        new = Segment(new_number(), new_vectors, updates["id"].to_numpy())
        self._write_next(table, new, min_score, progress)

    def _write_next(self, table: pa.Table, new: Segment, min_score: float | None, progress: Progress | None) -> None:
        """Write the next generation.

        Args:
            table: Records of all rows: the existing and the new images.
            new: The segment to add, in memory.
            min_score: See `change`.
            progress: See `change`.
        """
        now, searchable = self.now, ~table["removed"].to_numpy()
        next_id = table["id"][-1].as_py() + 1 if len(new.vectors) else now.manifest.next_id
        images = int(searchable.sum())
        kind = faiss_index.choose_kind(self.requested_kind, images, self.dim)
        many_removed = len(table) - images > MAX_REMOVED_SHARE * len(table)
        outgrown = kind == "ivfpq" and len(table) > RETRAIN_FACTOR * now.manifest.built_of
        rebuilds = kind != "flat" and (kind != now.manifest.kind or outgrown or many_removed)
        if images < len(table) and (rebuilds or many_removed):
            segments = self._compacted(table, new, np.flatnonzero(searchable))
            table = table.filter(pa.array(searchable)).combine_chunks()
        else:
            segments = self._appended(table, new)
        manifest = now.manifest.model_copy(
            update={
                "generation": now.manifest.generation + 1,
                "next_id": next_id,
                "images": images,
                "min_score": now.manifest.min_score if min_score is None else min_score,
                "segments": tuple(each.facts for each in segments if each.facts is not None),
                "kind": kind,
            }
        )
        after = Generation(manifest, segments, table, now.index)
        after = self._with_index(after, new.number, rebuilds, progress)
        if progress is not None and len(new.vectors) and after.index is now.index:
            progress(len(new.vectors), len(new.vectors))
        write_manifest(self.folder, after.manifest)
        self.now = after

    def _appended(self, table: pa.Table, new: Segment) -> tuple[Segment, ...]:
        """Write the new segment, merged with those before it if there are many small ones."""
        segments = (*self.now.segments, new)
        first = first_to_merge([each.size for each in segments])
        start = sum(len(each.vectors) for each in segments[:first])
        vectors = StackedVectors([each.vectors for each in segments], self.dim)
        updated = np.unique(np.concatenate([each.updated for each in segments[first:]]))
        at = np.searchsorted(table["id"].to_numpy(), updated)
        earlier, own = table.take(at[at < start]), np.arange(start, len(table))
        return *segments[:first], write_segment(self.folder, new.number, table.slice(start), vectors, own, earlier)

    def _compacted(self, table: pa.Table, new: Segment, rows: Ids) -> tuple[Segment, ...]:
        """Write one segment of the rows that are not removed."""
        if not len(rows):
            return ()
        vectors = StackedVectors([*self.now.vectors.parts, new.vectors], self.dim)
        return (write_segment(self.folder, new.number, table.take(rows), vectors, rows, table.slice(0, 0)),)

    def _with_index(self, after: Generation, number: int, rebuilds: bool, progress: Progress | None) -> Generation:
        """Return a state with its index. If necessary, build or extend the index and write it with this number."""
        manifest, index, vectors = after.manifest, after.index, after.vectors
        if manifest.kind == "flat":
            no_index = manifest.model_copy(update={"index": None, "recall": None, "built_of": 0})
            return replace(after, manifest=no_index, index=None)
        built_of = manifest.built_of
        if rebuilds:
            index, built_of = faiss_index.build(manifest.kind, vectors, progress), len(vectors)
        elif len(vectors) - index.ntotal > max(MIN_UNINDEXED, MAX_UNINDEXED_SHARE * index.ntotal):
            index = faiss_index.extend_copy(index, vectors, progress)
        else:
            return after
        recall = faiss_index.tune(index, vectors, after.searchable)
        file = self.folder / INDEX.format(number)
        faiss_index.write(index, file)
        facts = {
            "index": IndexFacts(number=number, rows=len(vectors), sha256=file_digest(file)),
            "recall": None if recall is None else Recall(**recall),
            "built_of": built_of,
        }
        return replace(after, manifest=manifest.model_copy(update=facts), index=index)


def _updates(now: Generation, removed: Sequence[int], changes: Mapping[str, Mapping[int, str | None]]) -> pa.Table:
    """Return new records of images to remove or change; the changes are new values by column and id."""
    ids = list(dict.fromkeys([*removed, *(each for values in changes.values() for each in values)]))
    found = now.table.take(now.rows_of(ids))
    is_removed = np.isin(ids, np.asarray(removed, dtype=np.int64))
    for name, values in changes.items():
        new = [values.get(each, value) for each, value in zip(ids, found[name].to_pylist(), strict=True)]
        found = with_column(found, name, pa.array(new, pa.string()))
    return with_column(found, "removed", pa.array(is_removed, pa.bool_()))


def _has_other_contents(folder: Path) -> bool:
    """Return whether a folder has files other than those of a gallery whose creation was interrupted."""
    own = {*gallery_files(folder), *folder.glob(".*"), folder / MODEL}
    return any(each not in own for each in folder.iterdir())


def _lock(folder: Path) -> AbstractContextManager[None]:
    in_use = GalleryError(f"Another process is changing the gallery {folder}. Wait until it has finished.")
    return exclusive_lock(folder / ".lock", in_use)


def _hits(now: Generation, scores: NDArray[np.float32], rows: Ids) -> list[list[Hit]]:
    """Return the hits of (q, k) scores and rows, best first, ties sorted by id."""
    hits = [Hit(*each) for each in zip(now.items(rows.ravel()), scores.ravel().tolist(), strict=True)]
    k = rows.shape[1]
    per_query = [hits[start : start + k] for start in range(0, len(hits), k)]
    return [sorted(each, key=lambda hit: (-hit.score, hit.item.id)) for each in per_query]
