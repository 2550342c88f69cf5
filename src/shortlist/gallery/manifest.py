"""gallery.json: the small file that names the files of a gallery's current state. Replacing it completes a change."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shortlist.files import write_text_atomically
from shortlist.gallery.store import GALLERY_FILE, GalleryError

FORMAT = 2
RECORDS, VECTORS, INDEX = "items-{}.parquet", "vectors-{}.npy", "index-{}.faiss"  # by the number of the change


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SegmentFacts(_Model):
    """A segment's files and their sizes."""

    number: int  # of the change that wrote it
    rows: int  # images, whose vectors are in the segment
    updates: int  # newer records of images of earlier segments


class IndexFacts(_Model):
    """The file of an approximate index, and the number of rows that it covers."""

    number: int
    rows: int


class Recall(_Model):
    """Part of the exact results that an approximate index finds; see `shortlist.search.faiss_index.tune`."""

    recall: float
    at: int
    queries: int


class Manifest(_Model):
    """The contents of gallery.json."""

    format: int = FORMAT
    created: str  # tells a gallery from another one in the same folder
    fingerprint: str
    dim: int
    requested_kind: str
    generation: int = 0  # number of changes so far
    next_id: int = 0
    images: int = 0  # that are not removed
    segments: tuple[SegmentFacts, ...] = ()
    kind: str = "flat"
    index: IndexFacts | None = None  # None: search is exact
    recall: Recall | None = None  # when the index was built or extended last
    built_of: int = 0  # images, when the index was built

    def file_names(self) -> set[str]:
        """Return the names of the gallery's files, without the model."""
        names = {RECORDS.format(each.number) for each in self.segments}
        names |= {VECTORS.format(each.number) for each in self.segments if each.rows}
        return names | ({INDEX.format(self.index.number)} if self.index else set())


def new_number() -> int:
    """Return a random number for the files of a change, so that no file of any other gallery has the same name.

    Therefore a file is never taken for one of a copy of the gallery that was changed differently, nor overwritten by
    copying another gallery to the same folder while processes use it.
    """
    return secrets.randbits(53)


def read_manifest(folder: Path) -> Manifest:
    """Read gallery.json.

    Raises:
        GalleryError: It does not exist, is damaged, or was written by another version.
    """
    file = folder / GALLERY_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        written = int(found["format"])
    except FileNotFoundError:
        raise GalleryError(
            f"there is no gallery in {folder}: it has no {GALLERY_FILE}. Create one with shortlist index"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise GalleryError(f"{file} is damaged ({error!r}): create the gallery again") from error
    if written > FORMAT:
        raise GalleryError(f"{folder} was written by a later version of shortlist: update shortlist")
    if written < FORMAT:
        raise GalleryError(f"{folder} was written by an earlier version of shortlist: create the gallery again")
    try:
        return Manifest.model_validate(found)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise GalleryError(f"{file} is damaged ({place}: {problem['msg']}): create the gallery again") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a state the current one, and delete the files of earlier states."""
    write_text_atomically(folder / GALLERY_FILE, manifest.model_dump_json(indent=2) + "\n")
    delete_unused(folder, manifest)


def delete_unused(folder: Path, manifest: Manifest) -> None:
    """Delete files that the manifest does not name, and incomplete files."""
    names = manifest.file_names()
    for file in gallery_files(folder):
        if file.name not in names:
            with suppress(OSError):  # if an open file cannot be deleted, the next change deletes it
                file.unlink()


def gallery_files(folder: Path) -> Sequence[Path]:
    """Return the files of segments and indexes in a folder, including incomplete ones."""
    patterns = [each.format("*") for each in (RECORDS, VECTORS, INDEX)]
    return [file for each in patterns for pattern in (each, f".{each}.*") for file in folder.glob(pattern)]
