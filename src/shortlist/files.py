"""Files that are whole or not there."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import filelock

from shortlist.errors import ConfigError, RunError


def check_writable(path: Path) -> None:
    """See that a file can be written, before the work that it is for.

    Raises:
        ConfigError: it cannot.
    """
    folder = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the name of a file.")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written, since {folder} is a file: give another name.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written, since you may not write to {folder}: give another name.")


@contextmanager
def exclusive_lock(file: Path, in_use: RunError) -> Iterator[None]:
    """Hold a lock file for as long as the context is open. The lock of a process that is killed is released.

    Args:
        file: Path of the lock file. Its folder is created.
        in_use: Error to raise if another process holds the lock.

    Raises:
        RunError: Another process holds the lock (`in_use`), or the folder is not writable.
    """
    lock = filelock.FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise in_use from None
    except OSError as error:
        raise RunError(f"The folder {file.parent} cannot be written to: {error.strerror}.") from None
    try:
        yield
    finally:
        lock.release()


def exclusive_write(path: Path) -> AbstractContextManager[None]:
    """Hold the lock of a file that this process is going to write; see `exclusive_lock`.

    Raises:
        RunError: Another process is writing the file, or its folder is not writable.
    """
    in_use = RunError(f"Another process is writing {path}. Wait until it has finished.")
    return exclusive_lock(path.with_name(f".{path.name}.lock"), in_use)


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; the file takes its place at the end, unless something failed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # a name that nobody knows, or none, as where the disk is full
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Delete what `replacing` left beside `path` where it was killed; while nobody else can be writing it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if left.suffix[1:].isdecimal():
            left.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """What is in a JSON file of ours.

    Raises:
        RunError: it is damaged.
    """
    return parse_json(path.read_text(encoding="utf-8", errors="replace"), path)


def parse_json(text: str, path: Path) -> Any:
    """A piece of JSON from a file of ours; as of `read_json`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunError(f"{path} is damaged: it is no JSON ({error}). Put it back as it was.") from None


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def absolute_path(path: Path | str) -> str:
    """Return an absolute path without `~`, `.` and `..`. Unlike `Path.resolve`, keep symbolic links."""
    return os.path.abspath(Path(path).expanduser())  # noqa: PTH100


def size_and_mtime(file: Path) -> tuple[int, int] | None:
    """Return the size in bytes and the modification time in nanoseconds of a file, or None if it does not exist."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
