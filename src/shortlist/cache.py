"""The cache folder, and folders in it that are built once and atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shortlist.errors import DataError

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
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"Cannot write to the cache {folder.parent}: {error.strerror}; set SHORTLIST_CACHE to another folder."
        ) from error
    try:
        build(partial)
        partial.chmod(0o755)  # mkdtemp creates it for the current user only
        _rename(partial, folder)
    except OSError as error:
        raise DataError(
            f"Cannot fill the cache {folder}: {error.strerror or error}; set SHORTLIST_CACHE to another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process has built it in the meantime
            raise


def _remove_stale(folder: Path) -> None:
    """Remove partial copies of a folder left behind by killed processes."""
    for partial in folder.parent.glob(f".{folder.name}.partial-*"):
        if partial.stat().st_mtime < time.time() - _STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)
