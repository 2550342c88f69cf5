"""A .npy file that is written row by row and can be resumed after an interruption."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shortlist.files import remove_unfinished, write_json

NOTE_INTERVAL = 30.0  # seconds between two notes of the progress: the most work that a killed process loses
HEADER_BYTES = 128


class VectorFile:
    """Vectors that are appended to a temporary file beside `path`, which is renamed to `path` when it is complete.

    The number of vectors written so far, and the images they belong to, are kept in a note. Entering the context
    resumes from the note if it has the same digest, and starts from the beginning otherwise.

    Args:
        path: Final path of the file. The final note is PATH.json.
        digest: Digest of everything that determines the vectors.
        dtype: Data type of the vectors.
        facts: Further facts for the note.
    """

    def __init__(
        self, path: Path, digest: str, dtype: DTypeLike = np.float16, facts: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.digest, self.dtype, self.facts = path, digest, np.dtype(dtype), dict(facts or {})
        self.note_file = path.with_name(f"{path.name}.json")
        self.part, self.part_note = (path.with_name(f".{path.name}.part{ending}") for ending in ("", ".json"))
        self.rows = self.dimensions = 0  # shape of what has been written
        self.seen = 0  # images that are done: written or left out
        self.left_out: list[str] = []
        self._last_note = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether the complete file exists and has this digest."""
        note = read_note(self.path)
        if note.get("digest") != self.digest or not self.path.is_file():
            return False
        size = note["rows"] * note["dimensions"] * self.dtype.itemsize
        return bool(self.path.stat().st_size == HEADER_BYTES + size)

    def __enter__(self) -> VectorFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.note_file, self.part_note):
            remove_unfinished(file)
        note = _read_note(self.part_note)
        if note.get("digest") == self.digest and self.part.is_file():
            self.rows, self.seen, self.dimensions = note["rows"], note["seen"], note["dimensions"]
            self.left_out = list(note["left_out"])
            self._stream = self.part.open("r+b")
            self._stream.truncate(self._noted_bytes)
        else:
            self.part_note.unlink(missing_ok=True)
            self._stream = self.part.open("w+b")
        self._stream.seek(0, os.SEEK_END)
        return self

    def append(self, vectors: NDArray[Any], seen: int) -> None:
        """Write more vectors, (n, d), after which `seen` images are done."""
        if not len(vectors):
            self.seen = seen
            return
        if not self.dimensions:
            self.dimensions = vectors.shape[1]
            self._stream.write(_header((0, self.dimensions), self.dtype))
        self._stream.write(np.ascontiguousarray(vectors, dtype=self.dtype).tobytes())
        self.rows, self.seen = self.rows + len(vectors), seen
        if time.monotonic() - self._last_note >= NOTE_INTERVAL:
            self._write_note(self.part_note)

    def leave_out(self, images: Iterable[Path]) -> None:
        """Note images that cannot be read. Each is listed once, also if the catalog lists it twice."""
        self.left_out += [path for path in dict.fromkeys(map(str, images)) if path not in self.left_out]

    def finish(self) -> None:
        """Write the final number of rows into the header, and rename the file to its final path."""
        self._stream.seek(0)
        self._stream.write(_header((self.rows, self.dimensions), self.dtype))
        self._write_note(self.part_note)
        self.path.unlink(missing_ok=True)  # an older file, which the new note does not describe
        self._write_note(self.note_file)
        self.part.replace(self.path)
        self.part_note.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and self.rows:
            with suppress(OSError):  # the error that ends the context is more important
                self._write_note(self.part_note)
        self._stream.close()

    @property
    def _noted_bytes(self) -> int:
        return HEADER_BYTES + self.rows * self.dimensions * self.dtype.itemsize

    def _write_note(self, file: Path) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())  # the note must not be ahead of the vectors
        note = {name: getattr(self, name) for name in ("digest", "rows", "dimensions", "seen", "left_out")}
        write_json(file, {**self.facts, **note})
        self._last_note = time.monotonic()


def left_out_images(path: Path) -> list[str]:
    """Return the images that were left out of a complete vector file because they could not be read."""
    return list(read_note(path).get("left_out", []))


def read_note(path: Path) -> dict[str, Any]:
    """Return the note of a complete vector file; an empty one if there is none."""
    return _read_note(path.with_name(f"{path.name}.json"))


def _read_note(file: Path) -> dict[str, Any]:
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _header(shape: tuple[int, int], dtype: np.dtype[Any]) -> bytes:
    """Return the header of a .npy file (version 1.0), padded to the same length for any number of rows."""
    facts = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape}, }}"
    start = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return start + facts.ljust(HEADER_BYTES - 11).encode("latin1") + b"\n"
