"""A .npy file that grows by rows, and can be gone on with when whoever wrote it was stopped."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

NOTE_EVERY = 30.0  # seconds of work that a kill may cost
HEADER = 128  # bytes


class VectorFile:
    """Rows of vectors, written one after another beside `path`; whole, the file takes its name there.

    What has been written so far, and which images it is of, stands in a note: `with VectorFile(...) as file` goes on
    from there if the digest is the same, and starts afresh if not.

    Args:
        path: where the vectors shall be in the end, with a note PATH.json.
        digest: of all that the vectors depend on.
        dtype: of the numbers.
    """

    def __init__(self, path: Path, digest: str, dtype: DTypeLike = np.float16) -> None:
        self.path, self.digest, self.dtype = path, digest, np.dtype(dtype)
        self.note_file = path.with_name(f"{path.name}.json")
        self.part, self.part_note = (path.with_name(f".{path.name}.part{ending}") for ending in ("", ".json"))
        self.rows = self.seen = self.dimensions = 0  # vectors written; images they are of, with those left out
        self.left_out: list[str] = []
        self._noted = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether the whole file is there, and of this digest."""
        note = _read(self.note_file)
        if note.get("digest") != self.digest or not self.path.is_file():
            return False
        size = note["rows"] * note["dimensions"] * self.dtype.itemsize
        return bool(self.path.stat().st_size == HEADER + size)

    def __enter__(self) -> VectorFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        note = _read(self.part_note)
        if note.get("digest") == self.digest and self.part.is_file():
            self.rows, self.seen, self.dimensions = note["rows"], note["seen"], note["dimensions"]
            self.left_out = list(note["left_out"])
            self._stream = self.part.open("r+b")
            self._stream.truncate(self._end)  # what was written after the note
        else:
            self.part_note.unlink(missing_ok=True)
            self._stream = self.part.open("w+b")
        self._stream.seek(0, os.SEEK_END)
        return self

    def append(self, vectors: NDArray[Any], seen: int) -> None:
        """Write (n, d) more; `seen` images are then done."""
        if not self.dimensions:
            self.dimensions = vectors.shape[1]
            self._stream.write(_header((0, self.dimensions), self.dtype))
        self._stream.write(np.ascontiguousarray(vectors, dtype=self.dtype).tobytes())
        self.rows, self.seen = self.rows + len(vectors), seen
        if time.monotonic() - self._noted >= NOTE_EVERY:
            self._note(self.part_note)

    def finish(self) -> None:
        """Give the file its final length and its name."""
        self._stream.seek(0)
        self._stream.write(_header((self.rows, self.dimensions), self.dtype))
        self._sync()
        self._note(self.part_note)
        self.path.unlink(missing_ok=True)  # an older one: the note that is written now is not its own
        self._note(self.note_file)
        self.part.replace(self.path)
        self.part_note.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and self.rows:
            with suppress(OSError):  # what went wrong is told already
                self._note(self.part_note)
        self._stream.close()

    @property
    def _end(self) -> int:
        return HEADER + self.rows * self.dimensions * self.dtype.itemsize

    def _note(self, file: Path) -> None:
        self._sync()
        facts = {name: getattr(self, name) for name in ("digest", "rows", "dimensions", "seen", "left_out")}
        temporary = file.with_name(f"{file.name}.new")
        temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)
        self._noted = time.monotonic()

    def _sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())


def left_out(path: Path) -> list[str]:
    """The images that a whole file of vectors leaves out, because they cannot be read."""
    return list(_read(path.with_name(f"{path.name}.json")).get("left_out", []))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _header(shape: tuple[int, int], dtype: np.dtype[Any]) -> bytes:
    """That of a .npy file (version 1.0), of one length for any number of rows."""
    facts = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape}, }}"
    start = b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little")
    return start + facts.ljust(HEADER - 11).encode("latin1") + b"\n"
