"""A gallery in a folder: items, vectors, a FAISS index, and the model that gave the vectors.

A change writes new files and then replaces gallery.json, which names them. So whoever is killed in the middle leaves
the gallery as it was, and whoever has it open goes on with what they opened.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shortlist.encoding.encoder import ENCODER_FILE, Encoder
from shortlist.gallery import generation
from shortlist.gallery.generation import Generation
from shortlist.gallery.store import Floats, GalleryError, Hit, Ids, Item, Known, Row
from shortlist.progress import Progress
from shortlist.search import faiss_index
from shortlist.search.exact import nearest

MODEL, WORK = "model", ".adding"
REMOVED_SHARE = 0.2  # of the rows may be of removed images before an approximate index is built anew
COPIED = 65_536  # vectors of one label to take out and search; more are searched where they are
GROWN = 2.0  # times the images that IVF-PQ learned its codes from: then it learns again


class FolderStore:
    """A gallery's folder, as `Store` says. Searches may run in several threads, also while it changes."""

    at_once = None  # a change writes whole files

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = generation.read(folder)

    @classmethod
    def create(cls, folder: Path, encoder: Encoder, kind: str = "auto") -> FolderStore:
        """An empty gallery.

        Raises:
            GalleryError: the folder holds something else.
            ConfigError: there is no such kind of index.
        """
        faiss_index.check_kind(kind)
        if folder.is_file() or (folder.is_dir() and any(not _ours(each) for each in folder.iterdir())):
            raise GalleryError(f"{folder} is there already, and is no gallery: choose another place")
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
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
        """Nothing: files that are mapped go with it."""

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
    def asked_kind(self) -> str:
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
            everything = len(rows) == len(now.table)
            scores, found = faiss_index.search(now.index, now.vectors, vectors, k, None if everything else now.alive)
            if (found >= 0).all():
                return _hits(now, scores, found)
        # Exactly: an approximate index finds little among few of its vectors, and does not reach very many.
        if len(rows) <= COPIED:
            best, within = nearest(vectors, now.vectors[rows], k)
            return _hits(now, best.numpy(), rows[within.numpy()])
        best, whole = nearest(vectors, now.vectors, k, searchable=np.isin(np.arange(len(now.table)), rows))
        return _hits(now, best.numpy(), whole.numpy())

    def known(self, paths: Sequence[str]) -> Mapping[str, list[Known]]:
        there = pc.is_in(self.now.table["path"], value_set=pa.array(paths, pa.string()))
        found: dict[str, list[Known]] = {}
        for each in self.now.table.filter(pc.and_not(there, self.now.table["removed"])).to_pylist():
            row = Row(each["path"], each["label"], each["size"], each["modified"])
            found.setdefault(row.path, []).append(Known(each["id"], row))
        return found

    def below(self, folder: str) -> list[int]:
        paths = self.now.table["path"]
        there = pc.or_(pc.equal(paths, folder), pc.starts_with(paths, folder.rstrip("/") + "/"))
        found: list[int] = self.now.table.filter(pc.and_not(there, self.now.table["removed"]))["id"].to_pylist()
        return found

    @contextmanager
    def changing(self) -> Iterator[Path]:
        """Raises GalleryError where another process holds it."""
        with _locked(self.folder):
            self.refresh()
            generation.sweep(self.folder, self.now.note["files"])  # of someone who was killed
            work = self.folder / WORK
            yield work
            shutil.rmtree(work, ignore_errors=True)  # what failed or was killed is kept, to go on with

    def change(
        self,
        rows: Sequence[Row] = (),
        vectors: Floats | None = None,
        *,
        removed: Sequence[int] = (),
        labels: Mapping[int, str | None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        now, first = self.now, self.now.note["next_id"]
        gone = ~now.alive
        gone[[now.row(each) for each in removed]] = True
        table = _with_column(now.table, "removed", pa.array(gone))
        if labels:
            named = now.table["label"].to_pylist()
            for each, label in labels.items():
                named[now.row(each)] = label
            table = _with_column(table, "label", pa.array(named, pa.string()))
        table = pa.concat_tables([table, generation.new_rows(rows, first)])
        new = np.empty((0, self.dim), dtype=np.float32) if vectors is None else vectors
        self._become(table, new, len(rows), progress)

    def _become(self, table: pa.Table, new: Floats, rows: int, progress: Progress | None) -> None:
        """Write the next generation, of the rows that are there already and of new ones at the end."""
        now, gone = self.now, table["removed"].to_numpy()
        left = len(table) - int(gone.sum())
        kind = faiss_index.choose_kind(self.asked_kind, left, self.dim)
        note = {**now.note, "generation": now.note["generation"] + 1, "next_id": now.note["next_id"] + rows}
        serves = self._serves(kind, gone)
        if not serves:
            table = table.filter(pc.invert(table["removed"]))
        kept = np.arange(len(now.table)) if serves else np.flatnonzero(~gone[: len(now.table)])
        vectors = generation.write_vectors(self.folder, note["generation"], now.vectors, kept, new)
        if serves:
            index = faiss_index.read(self.folder / now.note["files"]["index"])  # others search the one in memory
            faiss_index.extend(index, new, progress)
        else:
            index = faiss_index.build(kind, vectors, progress)
            note |= _index_facts(kind, left)
        if kind != "flat":
            note["recall"] = faiss_index.tune(index, vectors, ~table["removed"].to_numpy())
        generation.write(self.folder, {**note, "images": left}, table, index)
        self.now = generation.read(self.folder)

    def _serves(self, kind: str, gone: NDArray[np.bool_]) -> bool:
        """Whether the present index goes on, with rows of removed images in it. Exact ones are cheap to build anew."""
        note = self.now.note
        grown = kind == "ivfpq" and len(gone) > GROWN * note["built_of"]
        return kind == note["kind"] != "flat" and not grown and gone.sum() <= REMOVED_SHARE * len(gone)


def _ours(file: Path) -> bool:
    """Whether a gallery that was killed while it was made may have left this."""
    known = (".*", MODEL, *(name.format("*") for name in generation.PARTS.values()))
    return any(file.match(each) for each in known)


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def _index_facts(kind: str, images: int) -> dict[str, Any]:
    """`recall` stays None for an exact index."""
    return {"kind": kind, "recall": None, "built_of": images}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = filelock.FileLock(folder / ".lock", is_singleton=True)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise GalleryError(f"Another process is changing the gallery {folder}. Wait for it.") from None
    except OSError as error:
        raise GalleryError(f"The gallery {folder} cannot be written to: {error.strerror}.") from None
    try:
        yield
    finally:
        lock.release()


def _hits(now: Generation, scores: NDArray[np.float32], rows: Ids) -> list[list[Hit]]:
    """Of (q, k) scores and rows."""
    hits = [Hit(*each) for each in zip(now.items(rows.ravel()), scores.ravel().tolist(), strict=True)]
    k = rows.shape[1]
    found = [hits[start : start + k] for start in range(0, len(hits), k)]
    return [sorted(each, key=lambda hit: (-hit.score, hit.item.id)) for each in found]
