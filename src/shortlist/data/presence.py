"""Files that a source names and that are not there: an error, or left out with a count. Never silently."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shortlist.data.catalog import Catalog
from shortlist.errors import ConfigError, DataError, did_you_mean

OnMissing = Literal["error", "skip"]


def check_on_missing(on_missing: str) -> None:
    if on_missing not in ("error", "skip"):
        raise ConfigError(f'`on_missing="{on_missing}"`: {did_you_mean(on_missing, ["error", "skip"])}')


def without_missing(catalog: Catalog, on_missing: str) -> Catalog:
    """The catalog without the images whose files are absent; what was left out is in `missing`.

    Raises:
        DataError: files are absent and `on_missing` is "error", or no file is there at all.
    """
    check_on_missing(on_missing)
    absent = absent_files(catalog.root, catalog.paths)
    if not absent.any():
        return catalog
    names = [str(path) for path in catalog.paths[absent]]
    if absent.all():
        raise DataError(
            f"{catalog.name}: none of its {len(names)} images is in {catalog.root} (first: {names[0]}). "
            "Is `root` right?"
        )
    if on_missing == "error":
        raise DataError(
            f"{catalog.name}: {len(names)} of {len(catalog)} images are missing in {catalog.root}: {some(names)}. "
            'Put them there, or leave them out with `on_missing="skip"`'
        )
    return replace(catalog.subset(~absent), missing=catalog.missing + tuple(names))


def absent_files(root: Path, paths: NDArray[np.object_]) -> NDArray[np.bool_]:
    """(n,) which paths are no files. One listing a folder, not one question a file."""
    listings: dict[str, set[str] | None] = {}  # None: there is no such folder
    absent = np.zeros(len(paths), dtype=np.bool_)
    for index, path in enumerate(paths):
        folder, _, name = path.rpartition("/")
        if folder not in listings:
            listings[folder] = _file_names(root / (folder or ("/" if path.startswith("/") else "")))
        listed = listings[folder]
        if listed is None:
            absent[index] = True
        elif name not in listed:  # a file system that ignores case or accents lists another spelling
            absent[index] = not os.path.isfile(os.path.join(root, path))  # noqa: PTH113, PTH118 - never raises, and fast
    return absent


def _file_names(folder: Path) -> set[str] | None:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return None


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few of many, for a message.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
