"""A .npy file that is written row by row and can be resumed after an interruption."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shortlist.errors import RunError
from shortlist.files import open_regular_file, read_json, remove_unfinished, write_json
from shortlist.locations import size_and_mtime

NOTE_INTERVAL = 30.0  # seconds between two notes of the progress: the maximum work that a killed process loses
HEADER_BYTES = 128
_BLOCK = 2**20  # bytes that are read at a time
NO_FILE = "the file does not exist, or its name is not valid UTF-8"  # why a catalog lists a file as missing


@dataclass
class Note:
    """Contents of a vector file so far.

    Args:
        digest: Digest of everything that determines the vectors.
        rows: Number of vectors.
        dimensions: Dimension of the vectors.
        seen: Number of images that are done: written or left out.
        left_out: Images that could not be read, and the reasons.
        vectors_sha256: Digest of the vectors; for a complete file, of the vectors and then of the header.
        shard: For a part: index of the shard, and number of shards.
        catalog: For a part: fingerprint of the catalog, which is the same in all parts.
        network: For a part: digest of the network, which is the same in all parts.
    """

    digest: str = ""
    rows: int = 0
    dimensions: int = 0
    seen: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    vectors_sha256: str = ""
    shard: tuple[int, int] | None = None
    catalog: str = ""
    network: str = ""


class VectorFile:
    """Vectors that are appended to a temporary file beside `path`, which is renamed to `path` when it is complete.

    The number of vectors written so far, their digest, and the images they belong to, are kept in a note. Entering the
    context resumes if the note is for the same digest and the vectors are undamaged, and otherwise starts from the
    beginning.

    Args:
        path: Final path of the file. The final note is PATH.json.
        digest: Digest of everything that determines the vectors.
        dtype: Data type of the vectors.
        facts: Further facts for the note.
    """

    def __init__(
        self, path: Path, digest: str, dtype: DTypeLike = np.float16, facts: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self.note_file = path.with_name(f"{path.name}.json")
        self.part, self.part_note = (path.with_name(f".{path.name}.part{ending}") for ending in ("", ".json"))
        self.note = Note(digest, **(facts or {}))
        self._digest = hashlib.sha256()  # of the vectors so far
        self._last_note = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether the complete file exists, has this digest and is undamaged."""
        return self.rows_done is not None

    @property
    def rows_done(self) -> int | None:
        """Number of vectors in the file, or None if it is not `done`."""
        note, stamp = read_note(self.path), size_and_mtime(self.path)
        if note.digest != self.note.digest or stamp is None or stamp[0] != self._size(note):
            return None
        return note.rows if _digest_of(self.path, stamp) == note.vectors_sha256 else None

    def __enter__(self) -> VectorFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.note_file, self.part_note):
            remove_unfinished(file)
        note = _read_note(self.part_note)
        written = _vectors_digest(self.part, self._size(note)) if note.digest == self.note.digest else None
        if written is not None and written.hexdigest() == note.vectors_sha256:
            self.note, self._digest = note, written
            self._stream = self.part.open("r+b")
            self._stream.truncate(self._size(note))
        else:
            for file in (self.part_note, self.part):
                file.unlink(missing_ok=True)
            self._stream = self.part.open("w+b")
        self._stream.seek(0, os.SEEK_END)
        return self

    def append(self, vectors: NDArray[Any], seen: int) -> None:
        """Write more vectors, (n, d), after which `seen` images are done."""
        note = self.note
        if not len(vectors):
            note.seen = seen
            return
        if not note.dimensions:
            note.dimensions = vectors.shape[1]
            self._stream.write(_header((0, note.dimensions), self.dtype))
        content = np.ascontiguousarray(vectors, dtype=self.dtype).tobytes()
        self._stream.write(content)
        self._digest.update(content)
        note.rows, note.seen = note.rows + len(vectors), seen
        if time.monotonic() - self._last_note >= NOTE_INTERVAL:
            self._write_note(self.part_note)

    def leave_out(self, images: Mapping[str, str]) -> None:
        """Note images that cannot be read, and the reasons."""
        self.note.left_out |= images

    def finish(self) -> None:
        """Write the final number of rows into the header, and rename the file to its final path."""
        header = _header((self.note.rows, self.note.dimensions), self.dtype)
        self._stream.seek(0)
        self._stream.write(header)
        self._write_note(self.part_note)
        self.path.unlink(missing_ok=True)  # an older file, which the new note does not describe
        self._write_note(self.note_file, header)
        self.part.replace(self.path)
        self.part_note.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._stream.close()
            return
        with suppress(OSError):  # the error that ends the context is more important
            if self.note.rows:
                self._write_note(self.part_note)
        with suppress(OSError):  # buffered data may not fit on a full disk
            self._stream.close()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.path)

    def _size(self, note: Note) -> int:
        return HEADER_BYTES + note.rows * note.dimensions * self.dtype.itemsize

    def _write_note(self, file: Path, header: bytes = b"") -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())  # the note must not be ahead of the vectors
        digest = self._digest.copy()
        digest.update(header)
        self.note.vectors_sha256 = digest.hexdigest()
        write_json(file, asdict(self.note))
        self._last_note = time.monotonic()


@lru_cache
def _digest_of(path: Path, stamp: tuple[int, int]) -> str:
    """Return `vectors_sha256` of a complete file, cached as long as its size and modification time are the same."""
    digest = _vectors_digest(path, stamp[0], with_header=True)
    return "" if digest is None else digest.hexdigest()


def _vectors_digest(path: Path, end: int, *, with_header: bool = False) -> hashlib._Hash | None:
    """Return the digest of the vectors in a file, and then of the header; None if the file cannot be read.

    Args:
        path: The file.
        end: Number of bytes up to the end of the vectors.
        with_header: Whether to include the header.
    """
    digest, left = hashlib.sha256(), end - HEADER_BYTES
    try:
        with open_regular_file(path) as file:
            header = file.read(HEADER_BYTES)
            while content := file.read(min(_BLOCK, left)):
                digest.update(content)
                left -= len(content)
    except OSError:
        return None
    digest.update(header if with_header else b"")
    return digest


def left_out_images(path: Path) -> dict[str, str]:
    """Return the images that were left out of a complete vector file because they could not be read, and why."""
    return read_note(path).left_out


def read_note(path: Path) -> Note:
    """Return the note of a complete vector file, or an empty note if there is none."""
    return _read_note(path.with_name(f"{path.name}.json"))


def _read_note(file: Path) -> Note:
    """Read a note. A missing or damaged note is returned as an empty one."""
    try:
        note: Note = read_json(file, Note)
    except (OSError, RunError):
        return Note()
    return note


def _header(shape: tuple[int, int], dtype: np.dtype[Any]) -> bytes:
    """Return the header of a .npy file (version 1.0), padded to the same length for any number of rows."""
    facts = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape}, }}"
    start = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return start + facts.ljust(HEADER_BYTES - 11).encode("latin1") + b"\n"
