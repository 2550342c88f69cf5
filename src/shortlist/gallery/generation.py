"""One immutable state of a gallery's folder. A change writes the next state, and then the note that names its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shortlist.errors import DataError
from shortlist.files import atomic_replace, write_text_atomically
from shortlist.gallery.store import GALLERY_FILE, GalleryError, Ids, Item, NoSuchItem, Row
from shortlist.search import faiss_index
from shortlist.search.vectors import open_vectors

FORMAT = 1
PARTS = {"items": "items-{}.parquet", "vectors": "vectors-{}.npy", "index": "index-{}.faiss"}
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("path", pa.string()),
        ("label", pa.string()),
        ("size", pa.int64()),
        ("modified", pa.int64()),
        ("removed", pa.bool_()),  # the row is still in the vectors and in the index
    ]
)
_COPIED_VECTORS = 16_384  # at a time


@dataclass(frozen=True, eq=False)
class Generation:
    """A state of a gallery. The table, the vectors and the index have one row per image, in the order of the ids."""

    note: dict[str, Any]
    table: pa.Table
    vectors: NDArray[np.float32]  # (n, d), memory-mapped
    index: Any  # FAISS

    @cached_property
    def ids(self) -> Ids:
        found: Ids = self.table["id"].to_numpy()
        return found

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """Mask of the images that are not removed, (n,)."""
        removed: NDArray[np.bool_] = self.table["removed"].to_numpy()
        return ~removed

    @cached_property
    def rows(self) -> Ids:
        """Rows of the images that are not removed."""
        return np.flatnonzero(self.alive)

    @cached_property
    def _label_codes(self) -> tuple[list[str], NDArray[np.int64]]:
        """All labels, and the position of each row's label among them, (n,); -1 for no label."""
        coded = pc.dictionary_encode(self.table["label"].combine_chunks())
        return coded.dictionary.to_pylist(), coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)

    def labelled(self, label: str | None) -> Ids:
        """Return the rows of the images with a label, or of all images if it is None."""
        if label is None:
            return self.rows
        names, codes = self._label_codes
        return np.flatnonzero((codes == names.index(label)) & self.alive) if label in names else np.empty(0, np.int64)

    def labels(self) -> dict[str, int]:
        """Return the number of images per label, sorted by label."""
        names, codes = self._label_codes
        counts = np.bincount(codes[(codes >= 0) & self.alive], minlength=len(names)).tolist()
        return {name: count for name, count in sorted(zip(names, counts, strict=True)) if count}

    def row(self, id: int) -> int:  # noqa: A002
        """Return the row of an image, or raise NoSuchItem."""
        row = int(np.searchsorted(self.ids, id))
        if row == len(self.ids) or self.ids[row] != id or not self.alive[row]:
            raise NoSuchItem(f"the gallery has no image {id}")
        return row

    def items(self, rows: Sequence[int] | Ids) -> list[Item]:
        found = self.table.select(["id", "path", "label"]).take(np.asarray(rows, dtype=np.int64))
        columns = (found[name].to_pylist() for name in ("id", "path", "label"))
        return [Item(number, Path(path), label) for number, path, label in zip(*columns, strict=True)]


def read_note(folder: Path) -> dict[str, Any]:
    """Read gallery.json.

    Raises:
        GalleryError: It does not exist, is damaged, or was written by a later version.
    """
    file = folder / GALLERY_FILE
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
        if note["format"] > FORMAT:
            raise GalleryError(f"{folder} was written by a later version of shortlist: update shortlist")
        if missing := {"files", "fingerprint", "dim", "generation", "next_id", "kind", "recall"} - set(note):
            raise KeyError(*sorted(missing))
    except FileNotFoundError:
        raise GalleryError(
            f"there is no gallery in {folder}: it has no {GALLERY_FILE}. Create one with shortlist index"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise GalleryError(f"{file} is damaged ({error!r}): create the gallery again") from error
    return dict(note)


def read(folder: Path) -> Generation:
    """Read the current state of a gallery.

    Raises:
        GalleryError: There is no gallery, or it is damaged.
    """
    for _ in range(10):  # another process may replace the files while they are read
        note = read_note(folder)
        files = {part: folder / name for part, name in note["files"].items()}
        try:
            if all(file.is_file() for file in files.values()):
                return _open(note, files)
        except FileNotFoundError:
            continue
        except (DataError, OSError, ValueError, RuntimeError, pa.ArrowException) as error:
            raise GalleryError(f"the gallery {folder} is damaged: {error}") from error
    missing = ", ".join(file.name for file in files.values() if not file.is_file())
    raise GalleryError(f"the gallery {folder} is damaged: {missing} is missing")


def _open(note: dict[str, Any], files: dict[str, Path]) -> Generation:
    table = pq.read_table(files["items"], schema=SCHEMA, memory_map=False).combine_chunks()
    found = Generation(note, table, open_vectors(files["vectors"]), faiss_index.read(files["index"]))
    if not len(table) == len(found.vectors) == found.index.ntotal or found.vectors.shape[1] != note["dim"]:
        raise ValueError("its items, vectors and index have different sizes")
    return found


def new_rows(rows: Sequence[Row], first_id: int) -> pa.Table:
    """Return a table of images to add, with ids from `first_id` on."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(Row._fields)
    ids = range(first_id, first_id + len(rows))
    values = [ids, *columns, [False] * len(rows)]
    return pa.table([pa.array(each, kind) for each, kind in zip(values, SCHEMA.types, strict=True)], schema=SCHEMA)


def write_vectors(
    folder: Path, number: int, old: NDArray[np.float32], kept: Ids, new: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Write the vectors of a generation, and open them as a memory map.

    Args:
        folder: The gallery's folder.
        number: Number of the generation.
        old: Vectors of the previous generation, (n, d).
        kept: Rows of `old` to keep.
        new: Vectors to append, (m, d).
    """
    path = folder / PARTS["vectors"].format(number)
    shape = (len(kept) + len(new), old.shape[1])
    with atomic_replace(path) as temporary:
        if not shape[0]:
            with temporary.open("wb") as file:
                np.save(file, new)
        else:
            vectors = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
            for start in range(0, len(kept), _COPIED_VECTORS):
                rows = kept[start : start + _COPIED_VECTORS]
                vectors[start : start + len(rows)] = old[rows]
            vectors[len(kept) :] = new
            vectors.flush()
    return open_vectors(path)


def write(folder: Path, note: dict[str, Any], table: pa.Table, index: Any) -> None:
    """Write the items and the index of a generation, make it the current one, and delete the files of the others.

    Args:
        folder: The gallery's folder.
        note: Contents of gallery.json, except for the names of the files.
        table: All rows.
        index: FAISS index of the vectors.
    """
    names = {part: name.format(note["generation"]) for part, name in PARTS.items()}
    with atomic_replace(folder / names["items"]) as temporary:
        pq.write_table(table, temporary)
    faiss_index.write(index, folder / names["index"])
    write_text_atomically(folder / GALLERY_FILE, json.dumps({**note, "files": names}, indent=2) + "\n")
    delete_unused(folder, names)


def delete_unused(folder: Path, names: Mapping[str, str]) -> None:
    """Delete the files of all generations except for those with these names, and incomplete files."""
    for pattern in PARTS.values():
        for file in (*folder.glob(pattern.format("*")), *folder.glob(f".{pattern.format('*')}.*")):
            if file.name not in names.values():
                with suppress(OSError):  # if an open file cannot be deleted, the next change deletes it
                    file.unlink()
