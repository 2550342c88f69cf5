"""The interface of gallery storage, which a folder and a vector database implement."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
        label: Label, or None if it is unknown. Several labels are separated by commas.
        labels: All labels.
        fields: Other columns of the table that listed the image, such as its price.
    """

    id: int
    path: Path
    label: str | None
    labels: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, id: int, path: str, label: str | None, fields: str | None) -> Item:  # noqa: A002
        """Return the item of a record; see `Row`."""
        labels = labels_of(label)
        return cls(id, Path(path), ", ".join(labels) or None, labels, json.loads(fields or "{}"))


@dataclass(frozen=True)
class Hit:
    """A search result: an image and its cosine similarity to the query."""

    item: Item
    score: float


class Row(NamedTuple):
    """An image to add. Its size and modification time are used to detect later changes of the file."""

    path: str
    label: str | None  # see `labels_of`
    size: int  # bytes
    modified: int  # nanoseconds
    fields: str | None = None  # JSON object


def labels_of(label: str | None) -> tuple[str, ...]:
    """Return the labels in a record: none, one, or several lines between two line breaks."""
    if not label:
        return ()
    return tuple(label[1:-1].split("\n")) if label.startswith("\n") else (label,)


def join_labels(labels: Sequence[str]) -> str | None:
    """Return labels as stored in a record; the inverse of `labels_of`."""
    return "\n".join(("", *labels, "")) if len(labels) > 1 else "".join(labels) or None


def count_labels(counts: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    """Return the number of images per label, sorted by label, from the number of images per set of labels."""
    found = Counter[str]()
    for labels, number in counts.items():
        found.update(dict.fromkeys(labels, number))
    return {label: number for label, number in sorted(found.items()) if number}


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
        """Text that identifies the gallery that searches use now; it changes if the gallery is replaced by another."""

    @property
    def requested_kind(self) -> str:
        """Kind of index that was requested when the gallery was created; may be auto."""

    @property
    def min_score(self) -> float | None:
        """Default minimum score of a result; None: no minimum."""

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

    def set_min_score(self, score: float | None) -> None:
        """Store a new `min_score`."""

    def __len__(self) -> int:
        """Number of images."""

    def item(self, id: int) -> Item:  # noqa: A002 - the name of the field
        """Return an image by its id, or raise NoSuchItem."""

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]:
        """Return images in the order of their ids, optionally only those with a label."""

    def labels(self) -> dict[str, int]:
        """Return the number of images per label, sorted by label."""

    def vectors(self, ids: Sequence[int]) -> Floats:
        """Return vectors in the order of the ids, or raise NoSuchItem."""

    def search(self, vectors: Floats, k: int, label: str | None) -> list[list[Hit]]:
        """Return the k nearest images of each vector in descending order of their scores; ties are sorted by id."""

    def stored_rows(self, paths: Sequence[str]) -> Mapping[str, list[StoredRow]]:
        """Return the stored images with these paths, by path."""

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
        fields: Mapping[int, str | None] | None = None,
        min_score: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Add, remove and change images, within the context of `changing`. A folder makes all changes at once.

        Args:
            rows: Images to add.
            vectors: Vectors of the added images, (len(rows), dim).
            ids: Their ids, in ascending order; see `free_ids`. Default: the next free ids.
            removed: Ids of images to remove.
            labels: New labels by id; see `labels_of`.
            fields: New fields by id, as JSON.
            min_score: New `min_score`. Default: unchanged.
            progress: Called with the number of vectors indexed and the total number.
        """


def free_ids(number: int, first: int, wanted: Sequence[int] | None = None) -> Sequence[int]:
    """Return ids for new images: `wanted`, or the next free ids if one of `wanted` may have been used before.

    Args:
        number: Number of images.
        first: Smallest id that has never been used.
        wanted: Ids in ascending order.

    >>> free_ids(2, 5), free_ids(2, 5, [7, 9]), free_ids(2, 8, [7, 9])
    (range(5, 7), [7, 9], range(8, 10))
    """
    return wanted if wanted and wanted[0] >= first else range(first, first + number)
