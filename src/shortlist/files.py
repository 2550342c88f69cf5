"""Atomic writes, locks and JSON files."""

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
    """Check that a file can be written, before the work whose result it will hold.

    Raises:
        ConfigError: The file cannot be written.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Give the path of a file.")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written because {folder} is a file. Give another path.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: no permission to write to {folder}. Give another path.")


@contextmanager
def exclusive_lock(file: Path, in_use: RunError, timeout: float = 0) -> Iterator[None]:
    """Hold a lock file for as long as the context is open. The lock of a process that is killed is released.

    Args:
        file: Path of the lock file. Its folder is created.
        in_use: Error to raise if another process holds the lock.
        timeout: Number of seconds to wait for the lock.

    Raises:
        RunError: Another process holds the lock (`in_use`), or the folder is not writable.
    """
    lock = filelock.FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
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
    """Yield a temporary path to write to, which replaces `path` at the end unless an exception is raised."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # there is no name if the disk is full
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Delete temporary files that killed processes left next to `path`. No other process may be writing it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if temporary.suffix[1:].isdecimal():
            temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Read a JSON file that shortlist has written.

    Raises:
        RunError: The file is not valid JSON.
    """
    return parse_json(path.read_text(encoding="utf-8", errors="replace"), path)


def parse_json(text: str, path: Path) -> Any:
    """Parse JSON that was read from `path`; see `read_json`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}). Restore or delete it.") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; `read_json` reads it."""
    write_text_atomically(path, json.dumps(value, indent=2) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing `path` only when the text is complete."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
