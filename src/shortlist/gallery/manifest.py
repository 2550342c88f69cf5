"""gallery.json: the small file that lists the files of a gallery's current state. Replacing it completes a change."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shortlist.errors import RunError
from shortlist.files import read_json, write_json
from shortlist.gallery.store import GALLERY_FILE, GalleryError

FORMAT = 4
RECORDS, VECTORS, INDEX = "items-{}.parquet", "vectors-{}.npy", "index-{}.faiss"  # by the number of the change


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SegmentFacts(_Model):
    """A segment's files, their sizes, and their digests."""

    number: int  # number of the change that wrote it
    rows: int  # number of images whose vectors are in the segment
    updates: int  # number of newer records of images of earlier segments
    records_sha256: str
    vectors_sha256: str = ""  # empty if there are no rows
    vectors_sample: str = ""  # see `sample_digest`: checked when a gallery is opened


class IndexFacts(_Model):
    """The file of an approximate index, and the number of rows that it covers."""

    number: int
    rows: int
    sha256: str


class Recall(_Model):
    """Fraction of the exact results that the index finds."""

    recall: float
    at: int = Field(description="Number of results.")
    queries: int = Field(description="Number of images of the gallery that were used as queries.")


class Manifest(_Model):
    """The contents of gallery.json."""

    created: str  # distinguishes galleries that were created in the same folder
    fingerprint: str
    dim: int
    requested_kind: str
    generation: int = 0  # number of changes so far
    next_id: int = 0
    images: int = 0  # number of images that are not removed
    segments: tuple[SegmentFacts, ...] = ()
    kind: str = "flat"
    index: IndexFacts | None = None  # None: search is exact
    recall: Recall | None = None  # when the index was built or extended last
    built_of: int = 0  # number of images when the index was built
    min_score: float | None = None  # default of searches

    def digests(self) -> dict[str, str]:
        """Return the digests of the gallery's files by name, without the model."""
        found = {RECORDS.format(each.number): each.records_sha256 for each in self.segments}
        found |= {VECTORS.format(each.number): each.vectors_sha256 for each in self.segments if each.rows}
        return found | ({INDEX.format(self.index.number): self.index.sha256} if self.index else {})


def new_number() -> int:
    """Return a random number for the files of a change, so that no file of any other gallery has the same name.

    Files of two copies of a gallery that were changed differently are therefore never confused, and copying another
    gallery to the same folder does not overwrite files that are in use.
    """
    return secrets.randbits(53)


def read_manifest(folder: Path) -> Manifest:
    """Read gallery.json.

    Raises:
        GalleryError: It does not exist, is damaged, or was written by another version.
    """
    file = folder / GALLERY_FILE
    if not file.is_file():
        raise GalleryError(
            f"No gallery found in {folder}: it has no {GALLERY_FILE}. "
            f"Create one: shortlist index MODEL IMAGES -o {folder}"
        )
    try:
        manifest: Manifest = read_json(file, Manifest, FORMAT)
    except RunError as error:
        raise GalleryError(f"{error} Or create the gallery again.") from error
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a state the current one, and delete the files of earlier states."""
    write_json(folder / GALLERY_FILE, manifest.model_dump(mode="json"), FORMAT)
    delete_unused(folder, manifest)


def delete_unused(folder: Path, manifest: Manifest) -> None:
    """Delete files that the manifest does not name, and incomplete files."""
    names = manifest.digests()
    for file in gallery_files(folder):
        if file.name not in names:
            with suppress(OSError):  # if an open file cannot be deleted, the next change deletes it
                file.unlink()


def gallery_files(folder: Path) -> Sequence[Path]:
    """Return the files of segments and indexes in a folder, including incomplete ones."""
    patterns = [each.format("*") for each in (RECORDS, VECTORS, INDEX)]
    return [file for each in patterns for pattern in (each, f".{each}.*") for file in folder.glob(pattern)]
