"""The cache folder, and folders in it that are built once and atomically."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shortlist.errors import DataError
from shortlist.files import atomic_folder, remove_unfinished

_STALE_SECONDS = 24 * 3600  # an unfinished folder older than this was left by a killed process


def cache_folder(name: str) -> Path:
    """Return the folder `name` in the cache, without creating it.

    The cache is `$SHORTLIST_CACHE`, or by default the platform's user cache folder (`~/.cache/shortlist` on Linux).

    Raises:
        RuntimeError: The home folder cannot be determined.
    """
    if chosen := os.environ.get("SHORTLIST_CACHE"):
        return Path(chosen).expanduser() / name
    try:
        import platformdirs
    except ModuleNotFoundError:  # an installation without extras
        return Path.home() / ".cache" / "shortlist" / name
    return platformdirs.user_cache_path("shortlist", appauthor=False).expanduser() / name


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build a folder unless it exists.

    `build` fills a temporary folder next to it, which is renamed when it is complete. An existing folder is therefore
    always complete, even if a process was killed or two processes built it at the same time.

    Args:
        folder: The folder to build.
        build: Function that fills the empty folder it is given.

    Returns:
        `folder`.

    Raises:
        DataError: The folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        remove_unfinished(folder, _STALE_SECONDS)
        with atomic_folder(folder) as partial:
            build(partial)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process has built it in the meantime
            raise unusable(folder.parent, error) from error
    return folder


def unusable(cache: Path, error: OSError) -> DataError:
    """Return the error for a cache folder that cannot be written to."""
    return DataError(
        f"Cannot write to the cache {cache}: {error.strerror or error}. Set SHORTLIST_CACHE to another folder."
    )
