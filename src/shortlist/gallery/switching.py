"""Names of galleries: small files that contain the location of the current gallery, so that it can be replaced.

Every function and command that opens a gallery also takes the path of such a file. Replacing the file is atomic, and a
process that has the gallery open under its name loads the other one with `Gallery.refresh`.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shortlist.errors import RunError
from shortlist.files import exclusive_write, read_json, write_json
from shortlist.gallery.milvus_address import is_milvus
from shortlist.gallery.store import GALLERY_FILE, GalleryError


class GalleryName(BaseModel):
    """The contents of the file. Relative paths of folders are relative to the folder of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gallery: str
    previous: str | None = None


def is_name(location: Path | str) -> bool:
    """Return whether a location is a file, and therefore a name rather than a gallery itself."""
    return not is_milvus(location) and Path(location).is_file()


def current_location(location: Path | str) -> Path | str:
    """Return the location of the gallery that a name refers to; any other location is returned unchanged.

    Raises:
        GalleryError: The file was not written by `switch`.
    """
    return _located(Path(location), _read(Path(location)).gallery) if is_name(location) else location


def switch(name: Path | str, location: Path | str) -> GalleryName:
    """Make a name refer to a gallery. Servers that were started with the name load the gallery within seconds.

    The gallery is opened and its model is loaded first, so that a name never refers to an unusable gallery.

    Args:
        name: File to write.
        location: Folder of the gallery, or Milvus collection.

    Raises:
        GalleryError: The folder contains no gallery, it is damaged, its model is missing, or `name` is not a file.
    """
    from shortlist.gallery.gallery import Gallery  # imported here because it imports this module

    file = Path(name)
    if is_milvus(name) or file.is_dir():
        raise GalleryError(f"{name} is a gallery or a folder, not a name: give the path of a file.")
    if is_name(location):
        raise GalleryError(f"{location} is itself the name of a gallery: give the gallery.")
    with closing(Gallery.open(location)) as gallery:
        _ = gallery.encoder
    target = str(location) if is_milvus(location) else _relative(Path(location), file.parent)
    with exclusive_write(file):
        before = _read(file) if file.exists() else None
        if before is not None and before.gallery == target:
            return before
        return _write(file, GalleryName(gallery=target, previous=None if before is None else before.gallery))


def switch_back(name: Path | str) -> GalleryName:
    """Make a name refer to the previous gallery again. A second call undoes this.

    Args:
        name: File that `switch` has written.

    Raises:
        GalleryError: The name is unknown, it has no previous gallery, or it no longer exists.
    """
    file = Path(name)
    if not is_name(name):
        raise GalleryError(f"Unknown name {name}: create it with shortlist gallery switch {name} GALLERY")
    with exclusive_write(file):
        now = _read(file)
        if now.previous is None:
            raise GalleryError(f"{name} has not been switched yet: it refers to {now.gallery}, its first gallery.")
        previous = _located(file, now.previous)
        if not is_milvus(previous) and not (Path(previous) / GALLERY_FILE).is_file():
            raise GalleryError(f"The previous gallery of {name}, {previous}, no longer exists.")
        return _write(file, GalleryName(gallery=now.previous, previous=now.gallery))


def _read(file: Path) -> GalleryName:
    try:
        found: GalleryName = read_json(file, GalleryName)
    except RunError as error:
        raise GalleryError(
            f"{file} is a file, but neither a gallery nor a name of one. Create a name with shortlist gallery "
            f"switch. ({error})"
        ) from None
    return found


def _write(file: Path, name: GalleryName) -> GalleryName:
    write_json(file, name.model_dump())
    return name


def _relative(folder: Path, start: Path) -> str:
    """Return a path relative to another folder, unless it was given as an absolute path."""
    return str(folder) if folder.is_absolute() else os.path.relpath(folder, start)


def _located(file: Path, gallery: str) -> Path | str:
    return gallery if is_milvus(gallery) else file.parent / gallery
