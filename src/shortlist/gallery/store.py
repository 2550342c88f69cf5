"""Where a gallery keeps what it knows: in a folder, or in a vector database."""

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

NOTE = "gallery.json"  # by which a folder is known as a gallery
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class GalleryError(RunError):
    """A gallery that cannot be opened, searched or changed."""


class NoSuchItem(DataError):  # noqa: N818 - says what is asked for
    """A gallery has no image of this id."""


@dataclass(frozen=True)
class Item:
    """What a gallery knows of one image.

    Args:
        id: stays the same for the life of the gallery, and is never used twice.
        path: absolute; the file may have gone since.
        label: None where it is not known.
    """

    id: int
    path: Path
    label: str | None


@dataclass(frozen=True)
class Hit:
    """An item that was found, and its cosine similarity to what was searched with."""

    item: Item
    score: float


class Row(NamedTuple):
    """An image to be added: where it is, what it is, and by what one sees that its file has changed."""

    path: str
    label: str | None
    size: int  # bytes
    modified: int  # nanoseconds


class Known(NamedTuple):
    """A row that a store has already."""

    id: int
    row: Row


class Store(Protocol):
    """What differs between galleries. Vectors are (n, dim) float32 of unit length."""

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Of the encoder that gave it its vectors."""

    @property
    def asked_kind(self) -> str:
        """Of its index, as it was asked for: maybe auto."""

    @property
    def at_once(self) -> int | None:
        """Images to embed between two calls of `change`, where those are cheap; None: all of them."""

    def encoder(self, model: Path | None) -> Encoder:
        """Its own, or with the weights in another folder; the caller compares fingerprints."""

    def close(self) -> None: ...

    def refresh(self) -> None:
        """See what other processes have changed since."""

    def facts(self) -> dict[str, Any]: ...

    def __len__(self) -> int: ...

    def item(self, id: int) -> Item:  # noqa: A002 - what it is
        """Raises NoSuchItem."""

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]: ...

    def labels(self) -> dict[str, int]: ...

    def vectors(self, ids: Sequence[int]) -> Floats:
        """In the order of the ids. Raises NoSuchItem."""

    def search(self, vectors: Floats, k: int, label: str | None) -> list[list[Hit]]:
        """The k nearest of each, the best first, ties by id."""

    def known(self, paths: Sequence[str]) -> Mapping[str, list[Known]]:
        """What it has of these paths, by path."""

    def below(self, folder: str) -> list[int]:
        """The ids of what lies in a folder, at any depth, or is this file."""

    def changing(self) -> AbstractContextManager[Path]:
        """Hold it for this process alone, in its newest state; gives a folder for unfinished work."""

    def change(
        self,
        rows: Sequence[Row] = (),
        vectors: Floats | None = None,
        *,
        removed: Sequence[int] = (),
        labels: Mapping[int, str | None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Within `changing`: add rows, which get new ids, take others out, and give others another label."""
