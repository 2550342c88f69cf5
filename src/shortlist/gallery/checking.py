"""A complete check of a gallery's folder, which reads all of its files. Opening a gallery checks less, to be fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shortlist.encoding.encoder import Encoder
from shortlist.errors import ShortlistError
from shortlist.files import file_digest
from shortlist.gallery import generation
from shortlist.gallery.manifest import Manifest, read_manifest
from shortlist.gallery.segment import check_digest
from shortlist.gallery.store import GALLERY_FILE, MODEL, GalleryError
from shortlist.progress import Progress


@dataclass(frozen=True)
class GalleryCheck:
    """Result of `check_folder`.

    Args:
        files: Number of files that were read, without those of the model.
        problems: Descriptions of the problems found.
    """

    files: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def check_folder(folder: Path, progress: Progress) -> GalleryCheck:
    """Verify the digests of all files of a gallery, and load its model and its index.

    Args:
        folder: The gallery's folder.
        progress: Called with the number of files done and the total number.

    Raises:
        GalleryError: The folder contains no gallery, or gallery.json is damaged.
    """
    while True:
        manifest = read_manifest(folder)
        problems = [*_damaged_files(folder, manifest, progress), *_model_problems(folder, manifest)]
        if not problems:
            try:
                generation.read(folder)
            except GalleryError as error:
                problems.append(str(error))
        if not problems or read_manifest(folder) == manifest:  # otherwise, another process has replaced files
            return GalleryCheck(len(manifest.digests()) + 1, tuple(problems))


def _damaged_files(folder: Path, manifest: Manifest, progress: Progress) -> list[str]:
    problems, digests = [], sorted(manifest.digests().items())
    for number, (name, expected) in enumerate(digests, 2):  # gallery.json is the first file
        try:
            check_digest(folder / name, file_digest(folder / name), expected)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
        except ValueError as error:
            problems.append(str(error))
        progress(number, len(digests) + 1)
    return problems


def _model_problems(folder: Path, manifest: Manifest) -> list[str]:
    try:
        found = Encoder.load(folder / MODEL).fingerprint
    except ShortlistError as error:
        return [str(error)]
    if found != manifest.fingerprint:
        return [f"the model in {folder / MODEL} is not the one that {GALLERY_FILE} names"]
    return []
