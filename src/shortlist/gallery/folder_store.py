"""A gallery in a folder: items, vectors, a FAISS index, and the model that computed the vectors.

A change writes new files and then replaces gallery.json, which names them. If the process is killed before that, the
gallery is unchanged. Processes that have the gallery open continue to use the files that they opened.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shortlist.encoding.encoder import ENCODER_FILE, Encoder
from shortlist.files import exclusive_lock
from shortlist.gallery import generation
from shortlist.gallery.generation import Generation
from shortlist.gallery.store import Floats, GalleryError, Hit, Ids, Item, Row, StoredRow
from shortlist.progress import Progress
from shortlist.search import faiss_index
from shortlist.search.exact import nearest

MODEL, WORK = "model", ".adding"
MAX_REMOVED_SHARE = 0.2  # of the rows of an approximate index; above, it is rebuilt
MAX_COPIED_VECTORS = 65_536  # vectors of one label to copy for a search; more are searched in place
RETRAIN_FACTOR = 2.0  # IVF-PQ is trained again when the gallery has grown by this factor


class FolderStore:
    """A gallery's folder; see `Store`. Several threads may search it, also while it changes."""

    images_per_change = None  # a change writes complete files

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = generation.read(folder)

    @classmethod
    def create(cls, folder: Path, encoder: Encoder, kind: str = "auto") -> FolderStore:
        """Create an empty gallery.

        Raises:
            GalleryError: The folder has other contents, or another process is changing it.
            ConfigError: There is no such kind of index.
        """
        faiss_index.check_kind(kind)
        if folder.is_file() or (folder.is_dir() and any(not _is_gallery_file(each) for each in folder.iterdir())):
            raise GalleryError(f"{folder} exists and is not a gallery: choose another location")
        with _lock(folder):
            encoder.save(folder / MODEL)
            note = {
                "format": generation.FORMAT,
                "fingerprint": encoder.fingerprint,
                "dim": encoder.dim,
                "generation": 0,
                "next_id": 0,
                "images": 0,
                "asked_kind": kind,
                **_index_facts("flat", 0),
            }
            none = np.empty((0, encoder.dim), dtype=np.float32)
            vectors = generation.write_vectors(folder, 0, none, np.arange(0), none)
            generation.write(folder, note, generation.new_rows([], 0), faiss_index.build("flat", vectors))
        return cls(folder)

    def close(self) -> None:
        """Do nothing: memory maps are released with the object."""

    def refresh(self) -> None:
        if generation.read_note(self.folder)["generation"] != self.now.note["generation"]:
            self.now = generation.read(self.folder)

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def dim(self) -> int:
        return int(self.now.note["dim"])

    @property
    def fingerprint(self) -> str:
        return str(self.now.note["fingerprint"])

    @property
    def requested_kind(self) -> str:
        return str(self.now.note["asked_kind"])

    def encoder(self, model: Path | None) -> Encoder:
        own = self.folder / MODEL
        if model is None:
            return Encoder.load(own)
        return Encoder.load(model, json.loads((own / ENCODER_FILE).read_text(encoding="utf-8")))

    def facts(self) -> dict[str, Any]:
        return {"place": str(self.folder.absolute()), **{name: self.now.note[name] for name in ("kind", "recall")}}

    def __len__(self) -> int:
        return len(self.now.rows)

    def item(self, id: int) -> Item:  # noqa: A002
        now = self.now
        return now.items([now.row(id)])[0]

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]:
        now = self.now
        return now.items(now.labelled(label)[offset : offset + limit])

    def labels(self) -> dict[str, int]:
        return self.now.labels()

    def vectors(self, ids: Sequence[int]) -> Floats:
        now = self.now
        return np.array(now.vectors[[now.row(each) for each in ids]], dtype=np.float32).reshape(len(ids), self.dim)

    def search(self, vectors: Floats, k: int, label: str | None) -> list[list[Hit]]:
        now = self.now
        rows = now.labelled(label)
        k = min(k, len(rows))
        if not k:
            return [[] for _ in vectors]
        if label is None:
            alive = None if len(rows) == len(now.table) else now.alive
            scores, found = faiss_index.search(now.index, now.vectors, vectors, k, alive)
            if (found >= 0).all():
                return _hits(now, scores, found)
        # Exact search: an approximate index has a low recall among few of its vectors, and cannot find very many.
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
            row = Row(each["path"], each["label"], each["size"], each["modified"])
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
            generation.delete_unused(self.folder, self.now.note["files"])  # left behind by a killed process
            work = self.folder / WORK
            yield work
            shutil.rmtree(work, ignore_errors=True)  # after an error it is kept, to resume from it

    def change(
        self,
        rows: Sequence[Row] = (),
        vectors: Floats | None = None,
        *,
        removed: Sequence[int] = (),
        labels: Mapping[int, str | None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        now, first_id = self.now, self.now.note["next_id"]
        is_removed = ~now.alive
        is_removed[[now.row(each) for each in removed]] = True
        table = _with_column(now.table, "removed", pa.array(is_removed))
        if labels:
            new_labels = now.table["label"].to_pylist()
            for each, label in labels.items():
                new_labels[now.row(each)] = label
            table = _with_column(table, "label", pa.array(new_labels, pa.string()))
        table = pa.concat_tables([table, generation.new_rows(rows, first_id)])
        new = np.empty((0, self.dim), dtype=np.float32) if vectors is None else vectors
        self._write_next(table, new, len(rows), progress)

    def _write_next(self, table: pa.Table, new: Floats, added: int, progress: Progress | None) -> None:
        """Write the next generation, whose table has the present rows and then the `added` new ones."""
        now, removed = self.now, table["removed"].to_numpy()
        images = len(table) - int(removed.sum())
        kind = faiss_index.choose_kind(self.requested_kind, images, self.dim)
        note = {**now.note, "generation": now.note["generation"] + 1, "next_id": now.note["next_id"] + added}
        extends = self._can_extend_index(kind, removed)
        if not extends:
            table = table.filter(pc.invert(table["removed"]))
        kept = np.arange(len(now.table)) if extends else np.flatnonzero(~removed[: len(now.table)])
        vectors = generation.write_vectors(self.folder, note["generation"], now.vectors, kept, new)
        if extends:
            index = faiss_index.read(self.folder / now.note["files"]["index"])  # other threads search the one in memory
            faiss_index.extend(index, new, progress)
        else:
            index = faiss_index.build(kind, vectors, progress)
            note |= _index_facts(kind, images)
        if kind != "flat":
            note["recall"] = faiss_index.tune(index, vectors, ~table["removed"].to_numpy())
        generation.write(self.folder, {**note, "images": images}, table, index)
        self.now = generation.read(self.folder)

    def _can_extend_index(self, kind: str, removed: NDArray[np.bool_]) -> bool:
        """Return whether the index is kept, including rows of removed images. Exact indexes are cheap to rebuild."""
        note = self.now.note
        outgrown = kind == "ivfpq" and len(removed) > RETRAIN_FACTOR * note["built_of"]
        return kind == note["kind"] != "flat" and not outgrown and removed.sum() <= MAX_REMOVED_SHARE * len(removed)


def _is_gallery_file(file: Path) -> bool:
    """Return whether a process that was killed while creating a gallery may have left this file behind."""
    patterns = (".*", MODEL, *(name.format("*") for name in generation.PARTS.values()))
    return any(file.match(each) for each in patterns)


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def _index_facts(kind: str, images: int) -> dict[str, Any]:
    """Return what the note says about a new index. The recall of an exact index stays None."""
    return {"kind": kind, "recall": None, "built_of": images}


def _lock(folder: Path) -> AbstractContextManager[None]:
    in_use = GalleryError(f"Another process is changing the gallery {folder}. Wait until it has finished.")
    return exclusive_lock(folder / ".lock", in_use)


def _hits(now: Generation, scores: NDArray[np.float32], rows: Ids) -> list[list[Hit]]:
    """Return the hits of (q, k) scores and rows, best first, ties sorted by id."""
    hits = [Hit(*each) for each in zip(now.items(rows.ravel()), scores.ravel().tolist(), strict=True)]
    k = rows.shape[1]
    per_query = [hits[start : start + k] for start in range(0, len(hits), k)]
    return [sorted(each, key=lambda hit: (-hit.score, hit.item.id)) for each in per_query]
