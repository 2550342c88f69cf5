"""A collection of images that can be searched by an image."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shortlist.data import Catalog
from shortlist.encoding.encoder import Encoder, ImageLike
from shortlist.errors import ConfigError, DataError
from shortlist.extras import extra
from shortlist.files import absolute_path
from shortlist.gallery.adding import Added, Adding
from shortlist.gallery.milvus_address import MilvusAddress, is_milvus
from shortlist.gallery.store import NOTE, GalleryError, Hit, Item, NoSuchItem, Store
from shortlist.progress import Display, default_display
from shortlist.search.faiss_index import check_kind
from shortlist.search.vectors import Vectors

__all__ = ["Added", "Gallery", "GalleryError", "Hit", "Item", "NoSuchItem"]


class Gallery:
    """Images, their vectors, and what gives an image its vector. Searches may run in several threads.

    Args:
        store: where it is kept.
        model: a folder with the embedder, in place of the gallery's own.
    """

    def __init__(self, store: Store, model: Path | None = None) -> None:
        self.store, self._model = store, model

    @classmethod
    def open(cls, place: Path | str, model: Path | str | None = None) -> Gallery:
        """A gallery that is there.

        Args:
            place: its folder, or a collection of Milvus: milvus:FILE.db or http://HOST:19530/COLLECTION.
            model: a run's folder, to be used in place of the gallery's own model. It must be the same model.

        Raises:
            GalleryError: there is none, it is damaged, or the model is another.
        """
        gallery = cls(_opened(place), None if model is None else Path(model))
        if model is not None:
            _ = gallery.encoder  # is it the same?
        return gallery

    @classmethod
    def create(
        cls, place: Path | str, encoder: Encoder, *, model: Path | str | None = None, kind: str = "auto"
    ) -> Gallery:
        """An empty gallery.

        Args:
            place: as of `open`.
            encoder: what gives images their vectors; a folder keeps a copy of it.
            model: the folder that the encoder's embedder is in, a run's mostly; a collection of Milvus keeps its
                place, and no copy.
            kind: of the index: flat, hnsw, ivfpq, or auto, which goes by the number of images.

        Raises:
            GalleryError: something else is there.
            ConfigError: there is no such kind.
        """
        if not is_milvus(place):
            with extra("search", "A gallery in a folder"):
                from shortlist.gallery.folder_store import FolderStore
            return cls(FolderStore.create(Path(place), encoder, kind))
        if model is None:
            raise GalleryError(
                f"{place} needs the folder of the model, `model`: a collection of Milvus keeps its place only"
            )
        from shortlist.gallery.milvus_store import MilvusStore

        return cls(MilvusStore.create(MilvusAddress.parse(str(place)), encoder, Path(model), kind), Path(model))

    @staticmethod
    def exists(place: Path | str) -> bool:
        """Whether there is a gallery.

        Raises:
            GalleryError: a server that does not answer, or something is there and is no gallery.
        """
        if not is_milvus(place):
            return (Path(place) / NOTE).is_file()
        from shortlist.gallery.milvus_store import exists

        return exists(MilvusAddress.parse(str(place)))

    def close(self) -> None:
        """Let go of files and connections; a file of Milvus Lite can then be opened by others."""
        self.store.close()

    def refresh(self) -> None:
        """See what other processes have added or removed since; until then, searches go on with what was opened.

        Raises:
            GalleryError: it cannot be read any more.
        """
        self.store.refresh()

    @cached_property
    def encoder(self) -> Encoder:
        """What gives an image its vector; loaded when it is first asked for.

        Raises:
            GalleryError: it is not the one that gave the gallery its vectors.
            ModelError: it cannot be read.
        """
        from accelerate import Accelerator

        found = self.store.encoder(self._model)
        if found.fingerprint != self.store.fingerprint:
            raise GalleryError(
                f"the model in {self._model or self.name} is not the one that gave the gallery {self.name} its vectors "
                f"(fingerprint {found.fingerprint[:12]}, not {self.store.fingerprint[:12]})"
            )
        found.embedder.to(Accelerator().device)
        return found

    @property
    def name(self) -> str:
        return self.store.name

    def facts(self) -> dict[str, Any]:
        """All that can be said of it, ready for JSON."""
        store = self.store
        return {
            "name": self.name,
            "images": len(self),
            "dim": store.dim,
            "fingerprint": store.fingerprint,
            **store.facts(),
        }

    def __len__(self) -> int:
        return len(self.store)

    def item(self, id: int) -> Item:  # noqa: A002 - what it is
        """One image.

        Raises:
            NoSuchItem: there is none of this id.
        """
        return self.store.item(id)

    def items(self, *, label: str | None = None, offset: int = 0, limit: int = 50) -> list[Item]:
        """Some of the images, in the order of their ids; of one label where that is given."""
        return self.store.items(label, offset, limit)

    def labels(self) -> dict[str, int]:
        """Every label, by name, and how many images have it."""
        return self.store.labels()

    def search(self, image: ImageLike, k: int = 10, *, label: str | None = None) -> list[Hit]:
        """The k images that are most like an image, the best first.

        Args:
            image: a file, what is in a file, or a PIL image.
            k: how many; fewer if there are fewer.
            label: only images of this label.

        Raises:
            ImageError: it cannot be read.
        """
        return self.search_vectors(self.encoder.encode([image]), k, label=label)[0]

    def search_vectors(self, vectors: Vectors, k: int = 10, *, label: str | None = None) -> list[list[Hit]]:
        """The k images that are nearest to each vector of unit length, (q, d)."""
        wanted = np.ascontiguousarray(torch.as_tensor(vectors).detach().cpu().float().numpy())
        if wanted.ndim != 2 or wanted.shape[1] != self.store.dim:
            raise DataError(f"vectors to search {self.name} with are (q, {self.store.dim}), not {wanted.shape}")
        if k < 1:
            raise ConfigError(f"`k` is how many images to find, 1 or more, not {k}")
        return self.store.search(wanted, k, label) if len(wanted) else []

    def similar(self, id: int, k: int = 10, *, label: str | None = None) -> list[Hit]:  # noqa: A002
        """The k images that are most like one of the gallery's own, without itself.

        Raises:
            NoSuchItem: there is none of this id.
        """
        (found,) = self.search_vectors(self.store.vectors([id]), k + 1, label=label)
        return [hit for hit in found if hit.item.id != id][:k]

    def add(
        self,
        catalog: Catalog,
        *,
        workers: int = 0,
        display: Display | None = None,
    ) -> Added:
        """Put images in; those that are there, and whose files have not changed since, are not looked at again.

        What was embedded before a kill is not embedded again. Where the images have roles, queries stay outside.

        Args:
            catalog: the images; the class "" stands for no label, as of `open_collection`.
            workers: processes that decode.
            display: for progress.

        Raises:
            DataError: none can be read, or some are parts of images.
            GalleryError: another process is changing the gallery.
        """
        display = display or default_display()
        with (
            display.task(f"embedding {catalog.name}", "images") as progress,
            display.task("building the index", "vectors", later=True) as indexing,
        ):
            return Adding(self.store, self.encoder, catalog).run(workers, progress, indexing)

    def remove(self, which: Iterable[int | Path | str], *, display: Display | None = None) -> int:
        """Take images out by id, by path, or all that lie in a folder; gives how many.

        Args:
            which: ids, or paths of files and folders.
            display: for progress.

        Raises:
            NoSuchItem: there is nothing of the kind.
        """
        display = display or default_display()
        with (
            self.store.changing(),
            display.task(f"removing from {self.name}"),
            display.task("building the index", "vectors", later=True) as indexing,
        ):
            ids: dict[int, None] = {}
            for each in which:
                ids.update(dict.fromkeys([self.store.item(each).id] if isinstance(each, int) else self._below(each)))
            if ids:
                self.store.change(removed=list(ids), progress=indexing)
        return len(ids)

    def _below(self, place: Path | str) -> list[int]:
        found = self.store.below(absolute_path(place))
        if not found:
            raise NoSuchItem(f"the gallery {self.name} has nothing at {absolute_path(place)}")
        return found


def index(
    encoder: Encoder,
    catalog: Catalog,
    place: Path | str,
    *,
    model: Path | str | None = None,
    kind: str = "auto",
    workers: int = 0,
    display: Display | None = None,
) -> tuple[Gallery, Added]:
    """Put images into a gallery, which is made if there is none: what `Gallery.create`, `open` and `add` do.

    Raises:
        GalleryError: the gallery that is there is of another model, or its index of another kind.
    """
    check_kind(kind)
    if not Gallery.exists(place):
        gallery = Gallery.create(place, encoder, model=model, kind=kind)
    else:
        gallery = Gallery.open(place)
        if gallery.store.fingerprint != encoder.fingerprint:
            raise GalleryError(
                f"{place} holds vectors of another model: choose another place, or add to it with the model that it has"
            )
        if kind not in ("auto", gallery.store.asked_kind):
            raise GalleryError(
                f"{place} was made with the kind {gallery.store.asked_kind}, for {kind} choose another place"
            )
    gallery.encoder = encoder  # it is here already
    return gallery, gallery.add(catalog, workers=workers, display=display)


def _opened(place: Path | str) -> Store:
    if is_milvus(place):
        from shortlist.gallery.milvus_store import MilvusStore

        return MilvusStore(MilvusAddress.parse(str(place)))
    with extra("search", "A gallery in a folder"):
        from shortlist.gallery.folder_store import FolderStore
    return FolderStore(Path(place))
