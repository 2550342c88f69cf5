"""Files on disk or in object stores. Remote files are read through fsspec and a disk cache of bounded size.

A remote file is a `Path` whose first part is a protocol: `Path("s3://bucket/a.png")`, which pathlib writes as
s3:/bucket/a.png. `as_url` restores the URL.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from shortlist.cache import cache_folder, unusable
from shortlist.errors import ConfigError, DataError
from shortlist.extras import extra
from shortlist.files import atomic_replace, open_regular_file

LIMIT_VARIABLE = "SHORTLIST_REMOTE_CACHE"  # size of the cache, such as 500MB
DEFAULT_LIMIT = "20GB"
_PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]+):/+")  # at least two characters: C:/ is a drive
_TRIM_SHARE = 64  # a process trims the cache whenever it has added 1/64 of the limit

_added: dict[Path, int] = {}  # bytes that this process has added to a cache since it trimmed it


def is_remote(path: Path | str) -> bool:
    """Return whether a path is the URL of a file or folder in an object store."""
    return _PROTOCOL.match(str(path)) is not None


def as_path(source: Path | str) -> Path:
    """Return the path of a file or URL. A URL with file:// becomes a local path, and ~ is expanded."""
    text = str(source)
    return Path(text.removeprefix("file://") if text.startswith("file:///") else text).expanduser()


def absolute_path(path: Path | str) -> str:
    """Return an absolute path without `~`, `.` and `..`, or a URL. Unlike `Path.resolve`, keep symbolic links."""
    return as_url(path) if is_remote(path) else os.path.abspath(Path(path).expanduser())  # noqa: PTH100


def as_url(path: Path | str) -> str:
    """Return a remote path with the two slashes that pathlib removes, and any other path unchanged."""
    return _PROTOCOL.sub(r"\1://", str(path), count=1)


def join(root: Path, path: str) -> Path:
    """Return `root / path`, or the path itself if it is a URL."""
    return Path(path) if is_remote(path) else root / path


def list_remote(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders and of the files in a remote folder.

    Raises:
        FileNotFoundError: The folder does not exist.
        DataError: The store cannot be read.
    """
    url = as_url(folder)
    entries = _request(url, lambda system, path: system.ls(path, detail=True))
    own = url.partition("://")[2].strip("/")
    names: tuple[list[str], list[str]] = [], []
    for entry in entries:
        if entry["name"].strip("/") != own:  # some stores list the folder itself
            names[entry["type"] != "directory"].append(entry["name"].rstrip("/").rpartition("/")[2])
    return names


def remote_kind(path: Path) -> str | None:
    """Return "file" or "directory", or None if there is neither.

    Raises:
        DataError: The store cannot be read.
    """
    try:
        return str(_request(as_url(path), lambda system, at: system.info(at))["type"])
    except FileNotFoundError:
        return None


def size_and_mtime(file: Path) -> tuple[int, int] | None:
    """Return the size in bytes and the modification time in nanoseconds of a file, or None if it does not exist.

    If a remote file has changed since it was cached, the cached copy is removed.

    Raises:
        DataError: The object store cannot be read, or an outdated copy cannot be removed from the cache.
    """
    try:
        if not is_remote(file):
            found = file.stat()
            return found.st_size, found.st_mtime_ns
        stamp: tuple[int, int] = _request(as_url(file), _stamp)
    except OSError:
        return None
    cached = _cached(as_url(file))
    try:
        now = cached.stat()
        if (now.st_size, now.st_mtime_ns) != stamp:
            cached.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:  # the outdated copy would be read
        raise unusable(cached.parent.parent, error) from error
    return stamp


def open_binary(file: Path) -> BinaryIO:
    """Open a file for reading. A remote file is copied to the cache first, unless it is already there.

    Raises:
        OSError: The file does not exist, or cannot be opened.
        DataError: The object store or the cache cannot be used.
    """
    if not is_remote(file):
        return open_regular_file(file)
    url = as_url(file)
    cached = _cached(url)
    for _ in range(3):  # another process may remove the copy before it is opened
        with suppress(FileNotFoundError):
            opened = open_regular_file(cached)
            with suppress(OSError):  # the cache is read-only, or belongs to another user
                os.utime(cached, ns=(time.time_ns(), os.fstat(opened.fileno()).st_mtime_ns))  # last used now
            return opened
        _download(url, cached)
    raise DataError(f"Files are removed from the cache {cached.parent.parent} too soon. Increase {LIMIT_VARIABLE}.")


def _download(url: str, cached: Path) -> None:
    size, modified = _request(url, _stamp)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(cached) as temporary:
            temporary.touch()  # so that errors of the cache are not reported as errors of the store
            _request(url, lambda system, path: system.get_file(path, str(temporary)))
            os.utime(temporary, ns=(time.time_ns(), modified))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unusable(cached.parent.parent, error) from error
    folder, limit = cached.parent.parent, cache_limit()
    _added[folder] = _added.get(folder, limit) + size
    if _added[folder] > limit / _TRIM_SHARE:  # also by the first download of a process
        trim(folder, limit, keep=cached)
        _added[folder] = 0


def trim(folder: Path, limit: int, keep: Path | None = None) -> None:
    """Remove the least recently used files until the total size is at most `limit` bytes."""
    files = []
    for file in folder.glob("*/*"):
        with suppress(FileNotFoundError):  # another process trims as well
            found = file.stat()
            files.append((found.st_atime_ns, found.st_size, file))
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= limit:
            return
        if file != keep:
            with suppress(PermissionError):  # a file of another user
                file.unlink(missing_ok=True)
                total -= size


def cache_limit() -> int:
    """Return the maximum size of the cache in bytes.

    Raises:
        ConfigError: The environment variable is not a size.
    """
    return int(parse_size(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT, LIMIT_VARIABLE))


def parse_size(size: str | float, name: str) -> float:
    """Return a number of bytes.

    Args:
        size: The number itself, or text with a unit: "24GB", "24 GiB".
        name: Name of the setting, for the error.

    Raises:
        ConfigError: It is not a size.

    Example:
        >>> parse_size("24GB", "memory"), parse_size("1.5 KiB", "memory")
        (24000000000.0, 1536.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", str(size).strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{name} must be a size such as 24GB, not {size!r}.")
    number, unit, binary = found.groups()
    factor: float = (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper())
    return float(number) * factor


def _cached(url: str) -> Path:
    digest = hashlib.sha256(url.encode()).hexdigest()
    return cache_folder("remote") / digest[:2] / digest


def _stamp(system: Any, path: str) -> tuple[int, int]:
    """Return the size, and the modification time in nanoseconds or, if the store has none, 0."""
    info = system.info(path)
    if info["type"] == "directory":
        raise FileNotFoundError(path)
    try:
        modified = system.modified(path)
    except NotImplementedError:
        return int(info["size"] or 0), 0
    return int(info["size"] or 0), int(modified.timestamp() * 1e6) * 1000


def _request(url: str, action: Any) -> Any:
    """Return `action(file system, path)`, and convert errors of the store to a one-line DataError."""
    with extra("training", url):
        import fsspec
    protocol = url.partition("://")[0]
    try:
        system, path = fsspec.url_to_fs(url)
        return action(system, path)
    except (FileNotFoundError, DataError, ConfigError):
        raise
    except ImportError as error:
        raise DataError(f"{protocol}:// needs another package: {str(error).rstrip('.')}.") from error
    except Exception as error:  # each store has its own exceptions
        name, reason = type(error).__name__, " ".join(str(error).split()).rstrip(".")
        if "credential" in f"{name} {reason}".lower():
            reason = f"{reason or name}. Set the credentials as the documentation of the store's client describes"
        raise DataError(f"Cannot read {url}: {reason or name}.") from error
