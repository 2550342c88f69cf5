"""Files that a source lists but that do not exist: an error, or skipped and recorded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.data.catalog import Catalog
from shortlist.errors import ConfigError, DataError, did_you_mean, shorten_list
from shortlist.locations import is_remote, join, list_remote


def check_on_missing(on_missing: str) -> None:
    """Check that `on_missing` is "error" or "skip".

    Raises:
        ConfigError: If it is anything else.
    """
    if on_missing not in ("error", "skip"):
        raise ConfigError(f'`on_missing="{on_missing}"`: {did_you_mean(on_missing, ["error", "skip"])}')


def without_missing(catalog: Catalog, on_missing: str) -> Catalog:
    """Return the catalog without the images whose files do not exist; they are appended to `Catalog.missing`.

    Raises:
        DataError: If files are missing and `on_missing` is "error", or if no file exists at all.
    """
    check_on_missing(on_missing)
    absent = absent_files(catalog.root, catalog.paths)
    if not absent.any():
        return catalog
    names = [str(path) for path in catalog.paths[absent]]
    if absent.all():
        raise DataError(
            f"{catalog.name}: none of its {len(names)} images exists in {catalog.root} (first: {names[0]}). "
            "Check that `root` is right."
        )
    if on_missing == "error":
        verb = "is" if len(names) == 1 else "are"
        raise DataError(
            f"{catalog.name}: {len(names)} of {len(catalog)} images {verb} missing in {catalog.root}: "
            f'{shorten_list(names)}. Add them, or leave them out with `on_missing="skip"`.'
        )
    return replace(catalog.subset(~absent), missing=catalog.missing + tuple(names))


def absent_files(root: Path, paths: NDArray[np.object_]) -> NDArray[np.bool_]:
    """Return a mask (n,) of the paths that are not files.

    Each folder is listed once, which is much faster than one file system call per file.
    """
    listings: dict[str, set[str] | None] = {}  # None: the folder does not exist
    absent = np.zeros(len(paths), dtype=np.bool_)
    for index, path in enumerate(paths):
        folder, _, name = path.rpartition("/")
        if folder not in listings:
            listings[folder] = _file_names(join(root, folder or ("/" if path.startswith("/") else "")))
        listed = listings[folder]
        if listed is None:
            absent[index] = True
        elif name not in listed:  # a file system that ignores case or accents may list another spelling
            absent[index] = is_remote(join(root, folder)) or not os.path.isfile(os.path.join(root, path))  # noqa: PTH113, PTH118 - never raises, and fast
    return absent


def _file_names(folder: Path) -> set[str] | None:
    try:
        if is_remote(folder):
            return set(list_remote(folder)[1])
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if _is_file(entry)}
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return None


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a symbolic link to itself
        return False
