"""The interface of gallery storage, which a folder and a vector database implement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shortlist.encoding.encoder import Encoder
from shortlist.errors import DataError, RunError
from shortlist.progress import Progress

GALLERY_FILE = "gallery.json"  # its presence makes a folder a gallery
MODEL = "model"  # folder of the encoder in the folder of a gallery
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class GalleryError(RunError):
    """A gallery cannot be opened, searched or changed."""


class NoSuchItem(DataError):  # noqa: N818 - public name
    """The gallery has no image with this id or path."""


@dataclass(frozen=True)
class Item:
    """An image of a gallery.

    Args:
        id: Identifier that never changes and is never reused.
        path: Absolute path of the file, which may have been deleted since.
        label: Label, or None if it is unknown.
    """

    id: int
    path: Path
    label: str | None


@dataclass(frozen=True)
class Hit:
    """A search result: an image and its cosine similarity to the query."""

    item: Item
    score: float


class Row(NamedTuple):
    """An image to add. Its size and modification time tell later whether the file has changed."""

    path: str
    label: str | None
    size: int  # bytes
    modified: int  # nanoseconds


class StoredRow(NamedTuple):
    """An image that a store already has."""

    id: int
    row: Row


class Store(Protocol):
    """Storage of a gallery. Vectors are (n, dim) float32 of unit length."""

    @property
    def name(self) -> str:
        """Name of the gallery."""

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder that computed the vectors."""

    @property
    def identity(self) -> str:
        """Text that differs if the gallery has been replaced by another one, in the state that searches use now."""

    @property
    def requested_kind(self) -> str:
        """Kind of index that was requested when the gallery was created; may be auto."""

    @property
    def images_per_change(self) -> int | None:
        """Number of images to embed between two calls of `change`; None: all of them."""

    def encoder(self, model: Path | None) -> Encoder:
        """Load the encoder, or one with the weights in another folder. The caller compares the fingerprints."""

    def close(self) -> None:
        """Release files and connections."""

    def refresh(self) -> None:
        """Load the changes that other processes have made."""

    def facts(self) -> dict[str, Any]:
        """Return the location, the kind of index and its recall, as JSON-serializable values."""

    def __len__(self) -> int:
        """Number of images."""

    def item(self, id: int) -> Item:  # noqa: A002 - the name of the field
        """Return an image by its id, or raise NoSuchItem."""

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]:
        """Return images in the order of their ids, optionally of one label."""

    def labels(self) -> dict[str, int]:
        """Return the number of images per label, sorted by label."""

    def vectors(self, ids: Sequence[int]) -> Floats:
        """Return vectors in the order of the ids, or raise NoSuchItem."""

    def search(self, vectors: Floats, k: int, label: str | None) -> list[list[Hit]]:
        """Return the k nearest images of each vector in descending order of their scores; ties are sorted by id."""

    def stored_rows(self, paths: Sequence[str]) -> Mapping[str, list[StoredRow]]:
        """Return the images that the store has of these paths, by path."""

    def ids_under(self, path: str) -> list[int]:
        """Return the ids of the images in a folder, at any depth, or of the image with this path."""

    def changing(self) -> AbstractContextManager[Path]:
        """Lock the store for this process and load its newest state. Yields a folder for unfinished work."""

    def change(
        self,
        rows: Sequence[Row] = (),
        vectors: Floats | None = None,
        *,
        ids: Sequence[int] | None = None,
        removed: Sequence[int] = (),
        labels: Mapping[int, str | None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Add, remove and relabel images, within the context of `changing`.

        Args:
            rows: Images to add.
            vectors: Vectors of the added images, (len(rows), dim).
            ids: Their ids, in ascending order; see `free_ids`. Default: the next ones.
            removed: Ids of images to remove.
            labels: New labels by id.
            progress: Called with the number of vectors indexed and the total number.
        """


def free_ids(number: int, first: int, wanted: Sequence[int] | None = None) -> Sequence[int]:
    """Return ids for new images: those that are wanted or, if one of them may have been used before, the next ones.

    Args:
        number: Number of images.
        first: Smallest id that has never been used.
        wanted: Ids in ascending order.

    >>> free_ids(2, 5), free_ids(2, 5, [7, 9]), free_ids(2, 8, [7, 9])
    (range(5, 7), [7, 9], range(8, 10))
    """
    return wanted if wanted and wanted[0] >= first else range(first, first + number)
