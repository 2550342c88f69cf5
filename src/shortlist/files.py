"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; the file takes its place at the end, unless something failed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
