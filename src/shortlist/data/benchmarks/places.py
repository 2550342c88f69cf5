"""Where a benchmark seems to lie, when it is not in the folder that was given."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

MOST = 2000  # entries of a folder that are looked at
FEW = 50  # folders that are also looked into


def somewhere_near(root: Path, marks: Iterable[str]) -> Path | None:
    """The nearest folder, up to two levels down or up, that holds one of the marks."""
    marks = list(marks)
    here = root.absolute()
    for folder in (*_below(root), here.parent, here.parent.parent):
        if any((folder / mark).exists() for mark in marks):
            return folder
    return None


def misplaced(root: Path, path: str) -> Path | None:
    """Where the file is that should be at `path`: some folders deeper, or some folders less deep."""
    parts = path.split("/")
    ends = ["/".join(parts[first:]) for first in range(len(parts))]
    for folder in (root, *_below(root)):
        for end in ends:
            if (folder / end).is_file():
                return folder / end
    return None


def split_folders(root: Path) -> str:
    """Such as "train/ and test/", where there are such folders with a sub-folder a class, as for classification."""
    names = [name for name in ("train", "test", "val", "valid") if next(_folders(root / name), None) is not None]
    return " and ".join(f"{name}/" for name in names[:2]) if len(names) > 1 else ""


def first_with(root: Path, folders: Iterable[str], paths: Iterable[str], tried: int = 100) -> str | None:
    """The first of `folders` that holds one of the first paths; None where none does. "" is the root itself."""
    some = list(islice(paths, tried))
    for folder in folders:
        if any((root / folder / path).is_file() for path in some):
            return folder
    return None


def _below(root: Path) -> Iterator[Path]:
    """The folders in a folder, and then, where those are few, the folders in them."""
    children = list(_folders(root))
    yield from children
    if len(children) <= FEW:
        yield from (folder for child in children for folder in _folders(child))


def _folders(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in islice(entries, MOST) if entry.is_dir())
    except OSError:
        return
    yield from (root / name for name in names if not name.startswith("."))
