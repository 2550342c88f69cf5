"""Where things that can be made again are kept, and how to make them once: whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shortlist.errors import DataError

_ABANDONED = 24 * 3600  # seconds after which an unfinished folder belongs to a process that was killed


def cache_folder(name: str) -> Path:
    """The folder `name` in $SHORTLIST_CACHE, or else in the platform's usual place (~/.cache/shortlist)."""
    if chosen := os.environ.get("SHORTLIST_CACHE"):
        return Path(chosen).expanduser() / name
    if usual := os.environ.get("XDG_CACHE_HOME"):
        return Path(usual) / "shortlist" / name
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "shortlist" / name
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "shortlist" / "cache" / name
    return Path.home() / ".cache" / "shortlist" / name


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build` if it does not exist yet.

    `build` fills a temporary folder beside it, which is renamed when it is complete: a folder that exists is whole,
    also if a process was killed meanwhile or two build the same at once.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"cannot write to the cache {folder.parent}: {error.strerror}; set SHORTLIST_CACHE to another folder"
        ) from error
    try:
        build(partial)
        partial.chmod(0o755)  # mkdtemp's own is for one user only
        _rename(partial, folder)
    except OSError as error:
        raise DataError(
            f"cannot fill the cache {folder}: {error.strerror or error}; set SHORTLIST_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, and its folder is as good
            raise


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of the same folder."""
    for left in folder.parent.glob(f".{folder.name}.partial-*"):
        if left.stat().st_mtime < time.time() - _ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
