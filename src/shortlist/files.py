"""Atomic writes, locks, JSON files and digests."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

import filelock

from shortlist.errors import ConfigError, RunError

VERSION = 1  # of the format of a file that shortlist writes, unless the file has a version of its own


def check_writable(path: Path) -> None:
    """Check that a file can be written, before starting the work that produces its contents.

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
    """Hold a lock file inside a `with` block. The lock is released if the process is killed.

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


def exclusive_write(path: Path, timeout: float = 0) -> AbstractContextManager[None]:
    """Hold the lock of a file that this process is going to write; see `exclusive_lock`.

    Args:
        path: Path of the file.
        timeout: Number of seconds to wait for the lock.

    Raises:
        RunError: Another process is writing the file, or its folder is not writable.
    """
    in_use = RunError(f"Another process is writing {path}. Wait until it has finished.")
    return exclusive_lock(path.with_name(f".{path.name}.lock"), in_use, timeout)


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `path` at the end unless an exception is raised."""
    temporary = temporary_path(path)
    with naming(path, temporary):
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which is renamed to `path` at the end unless an exception is raised.

    If `path` exists by then, the temporary folder is deleted.
    """
    temporary = temporary_path(path)
    with naming(path, temporary):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            if not path.exists():
                temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def temporary_path(path: Path) -> Path:
    """Return a path beside `path` that no other thread or process uses, even if it is in another container."""
    return path.with_name(f".{path.name}.{secrets.randbelow(10**12)}")


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Set the file name of an OSError to `path` if it is that of a temporary file or, as on a full disk, missing."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def remove_unfinished(path: Path, older_than: float = -math.inf) -> None:
    """Delete temporary files and folders that killed processes left next to `path`.

    Args:
        path: The file or folder. Unless `older_than` is given, no other process may be writing it.
        older_than: Minimum age in seconds of what is deleted.
    """
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if not temporary.suffix[1:].isdecimal():
            continue
        with suppress(FileNotFoundError):  # another process has deleted it
            if time.time() - temporary.lstat().st_mtime < older_than:
                continue
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink()


def read_json(path: Path, shape: Any = None, version: int = VERSION) -> Any:
    """Read a JSON file that `write_json` has written.

    Args:
        path: The file.
        shape: Type of the contents, such as `list[str]` or a dataclass, which is validated and created by pydantic.
            None: the contents are returned as they are.
        version: Version of the format that the caller supports.

    Raises:
        RunError: The file is missing, cannot be read, is not valid JSON, has a wrong digest or another version, or does
            not match `shape`.
    """
    value = parse_json(read_text(path), path)
    if isinstance(value, dict):
        value = verified(value, path, version)
    return value if shape is None else validated(value, path, shape)


def read_text(path: Path) -> str:
    """Read a text file that shortlist has written.

    Raises:
        RunError: The file is missing, cannot be read, or is not a regular file.
    """
    try:
        return read_regular_file(path, errors="replace")
    except FileNotFoundError:
        raise RunError(f"{path} is missing. Restore it.") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None


def read_regular_file(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read the text in a regular file; see `open_regular_file`.

    Raises:
        OSError: The file cannot be read, or is not a regular file. The error has the name of the file.
        UnicodeDecodeError: It is not text in this encoding.
    """
    with naming(path), TextIOWrapper(open_regular_file(path), encoding, errors) as file:
        return file.read()


def parse_json(text: str, path: Path) -> Any:
    """Parse JSON that was read from `path`; see `read_json`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: it is not valid JSON ({error}). Restore or delete it.") from None


def validated(value: Any, path: Path, shape: Any) -> Any:
    """Convert a value that was read from `path` to the type `shape` with pydantic; see `read_json`."""
    from pydantic import TypeAdapter, ValidationError  # not needed by an installation without extras

    try:
        return TypeAdapter(shape).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        what = f"{place}: {problem['msg']}" if place else problem["msg"]
        raise RunError(f"{path} is damaged ({what}). Restore or delete it.") from None


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with `sha256`, the digest of its other values."""
    return {**value, "sha256": _json_digest(value)}


def verified(value: Mapping[str, Any], path: Path, version: int = VERSION) -> dict[str, Any]:
    """Verify the version and the digest of an object that was read from `path`, and return its other values.

    Parts of a file, such as the lines of `metrics.jsonl`, are written without a version.

    Raises:
        RunError: The version is not supported, or the digest is missing or does not match.
    """
    check_version(value.get("format", version), path, version)
    others = {name: each for name, each in value.items() if name != "sha256"}
    try:
        intact = value.get("sha256") == _json_digest(others)
    except RecursionError:  # lists in lists that can just be read, but not written
        intact = False
    if not intact:
        raise RunError(f"{path} is damaged: its contents differ from what was written. Restore or delete it.")
    others.pop("format", None)
    return others


def check_version(found: Any, path: Path, version: int = VERSION) -> None:
    """Check the version of the format of a file.

    Raises:
        RunError: It is not `version`.
    """
    if not isinstance(found, int):
        raise RunError(f"{path} is damaged: its format version is {found!r}. Restore or delete it.")
    if found > version:
        raise RunError(f"{path} has format {found}, of a later version of shortlist. Update shortlist.")
    if found < version:
        raise RunError(f"{path} has format {found}, which only earlier versions of shortlist read. Use one of these.")


def _json_digest(value: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(value))  # keys become strings before they are sorted
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any, version: int = VERSION) -> None:
    """Write a JSON file atomically; `read_json` reads it.

    Args:
        path: The file.
        value: Its contents. An object also gets `format`, the version of the format, and `sha256`, a digest.
        version: Version of the format, unless the object has one.
    """
    if isinstance(value, Mapping):
        value = with_checksum({"format": version, **value})
    write_text_atomically(path, json.dumps(value, indent=2) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing `path` only when the text is complete."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def open_regular_file(path: Path | str) -> BufferedReader:
    """Open a regular file for reading. Reading anything else, such as a named pipe, could block forever.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    nonblocking = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe waits for a writer; Windows has no such files
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | nonblocking))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with naming(path), open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_digest(path: Path, blocks: int = 64, size: int = 2**16) -> str:
    """Return the SHA-256 of evenly spaced blocks of a file, or of the whole file if it is small.

    Unlike `file_digest`, it takes no longer for a larger file. It detects a replaced file, but not every damaged bit.
    """
    digest = hashlib.sha256()
    with naming(path), open_regular_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        spaced = end > blocks * size
        for number in range(blocks if spaced else -(-end // size)):
            file.seek(number * (end - size) // (blocks - 1) if spaced else number * size)
            digest.update(file.read(size))
    return digest.hexdigest()
