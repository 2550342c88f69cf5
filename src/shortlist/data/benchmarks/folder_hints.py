"""Find where a benchmark seems to be, if it is not in the folder that the user gave."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

MAX_ENTRIES = 2000  # maximum number of entries read per folder
MAX_SUBFOLDERS = 50  # folders with more sub-folders are searched one level deep only


def find_nearby(root: Path, markers: Sequence[str]) -> Path | None:
    """Return the nearest folder, up to two levels below or above `root`, that contains one of the markers."""
    here = root.absolute()
    for folder in (*_folders_below(root), here.parent, here.parent.parent):
        if any((folder / marker).exists() for marker in markers):
            return folder
    return None


def find_misplaced(root: Path, path: str) -> Path | None:
    """Return the place of a file that should be at `root / path` but has more or fewer folders above it."""
    parts = path.split("/")
    endings = ["/".join(parts[first:]) for first in range(len(parts))]
    for folder in (root, *_folders_below(root)):
        for ending in endings:
            if (folder / ending).is_file():
                return folder / ending
    return None


def split_folders(root: Path) -> str:
    """Return the names of two split folders with sub-folders, such as "train/ and test/", or "" if there are none."""
    names = [name for name in ("train", "test", "val", "valid") if next(_subfolders(root / name), None) is not None]
    return " and ".join(f"{name}/" for name in names[:2]) if len(names) > 1 else ""


def first_folder_with(root: Path, folders: Iterable[str], paths: Iterable[str], tried: int = 100) -> str | None:
    """Return the first of `folders` that contains one of the first `tried` paths, or None. "" is the root itself."""
    first_paths = list(islice(paths, tried))
    for folder in folders:
        if any((root / folder / path).is_file() for path in first_paths):
            return folder
    return None


def _folders_below(root: Path) -> Iterator[Path]:
    """Yield the sub-folders and, if there are at most MAX_SUBFOLDERS, their sub-folders."""
    children = list(_subfolders(root))
    yield from children
    if len(children) <= MAX_SUBFOLDERS:
        yield from (folder for child in children for folder in _subfolders(child))


def _subfolders(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES) if entry.is_dir())
    except OSError:
        return
    yield from (root / name for name in names if not name.startswith("."))
