"""A collection of images that can be searched by image."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch

from shortlist.data import Catalog, open_collection
from shortlist.encoding.encoder import Encoder, ImageLike, is_single
from shortlist.encoding.pretrained import is_pretrained
from shortlist.errors import ConfigError, DataError, ShortlistError, did_you_mean
from shortlist.gallery.adding import Added, ImageAdder
from shortlist.gallery.change_log import ChangeLog
from shortlist.gallery.milvus_address import MilvusAddress, is_milvus
from shortlist.gallery.store import GALLERY_FILE, GalleryError, Hit, Item, NoSuchItem, Store
from shortlist.gallery.switching import current_location
from shortlist.locations import absolute_path, as_url
from shortlist.progress import Display, default_display
from shortlist.search.exact import check_k
from shortlist.search.faiss_index import check_kind
from shortlist.search.vectors import Vectors

if TYPE_CHECKING:
    from shortlist.gallery.checking import GalleryCheck

Result = TypeVar("Result")

__all__ = ["Added", "Gallery", "GalleryError", "Hit", "Item", "NoSuchItem"]


class Gallery:
    """Images, their vectors, and the encoder that computes vectors. Several threads may search a gallery.

    Args:
        store: Storage of the gallery.
        model: Folder with an embedder to use instead of the gallery's own.
    """

    def __init__(self, store: Store, model: Path | None = None) -> None:
        self.store, self._model = store, model
        self._encoder: Encoder | None = None
        self._prepare: Callable[[Encoder], Encoder] = Encoder.to  # moves it to the GPU, if there is one
        self._loading, self._following = threading.Lock(), threading.Lock()
        self._followed: tuple[Path, Path | str] | None = None  # the name that was opened, and where it referred to
        self._former: list[Store] = []  # stores that searches may still use
        self.opened_as: tuple[str, str | None] | None = None  # arguments with which another process can open it

    @classmethod
    def open(cls, location: Path | str, model: Path | str | Encoder | None = None) -> Gallery:
        """Open an existing gallery.

        Args:
            location: Folder, or Milvus collection: milvus:FILE.db or http://HOST:19530/COLLECTION; or the name of a
                gallery, see `switch`.
            model: Folder of a run whose model to use instead of the gallery's own, an encoder, or a name for
                `Encoder.from_pretrained`. It must be the same model. Required if the model was given in Python.

        Raises:
            GalleryError: The folder contains no gallery, it is damaged, or the model is not the gallery's.
        """
        folder = None if model is None or isinstance(model, Encoder) else Path(model)
        current = current_location(location)
        gallery = cls(_open_store(current), folder)
        if current != location:
            gallery._followed = Path(location), current
        alone = isinstance(model, Encoder) or str(current).startswith("milvus:")  # one process opens a Milvus Lite file
        gallery.opened_as = None if alone else (str(location), None if folder is None else str(folder))
        if folder is not None and is_pretrained(folder):
            model = Encoder.from_pretrained(folder)
        if isinstance(model, Encoder):
            gallery.encoder = model
        elif model is not None:
            _ = gallery.encoder  # checks that it is the same model
        return gallery

    @classmethod
    def create(
        cls, location: Path | str, encoder: Encoder, *, model: Path | str | None = None, kind: str = "auto"
    ) -> Gallery:
        """Create an empty gallery.

        Args:
            location: See `open`.
            encoder: Encoder that computes the vectors. A folder keeps a copy of it.
            model: Folder with the encoder's embedder, usually that of a run, or a name for `Encoder.from_pretrained`. A
                Milvus collection stores its path or name, and no copy.
            kind: Kind of index: flat, hnsw, ivfpq, or auto, which depends on the number of images.

        Raises:
            GalleryError: The location is in use.
            ConfigError: The kind of index is unknown.
        """
        if not is_milvus(location):
            from shortlist.gallery.folder_store import FolderStore

            return cls(FolderStore.create(Path(location), encoder, kind))
        if model is None:
            raise GalleryError(f"{location} needs `model`, the folder of the model: a Milvus collection holds no copy.")
        from shortlist.gallery.milvus_store import MilvusStore

        return cls(MilvusStore.create(MilvusAddress.parse(str(location)), encoder, Path(model), kind), Path(model))

    @classmethod
    def build(
        cls,
        encoder: Encoder,
        source: Path | str | Catalog,
        location: Path | str,
        *,
        root: Path | str | None = None,
        model: Path | str | None = None,
        kind: str = "auto",
        workers: int | None = None,
        display: Display | None = None,
    ) -> Gallery:
        """Add images to a gallery, which is created if it does not exist.

        Args:
            encoder: Encoder that computes the vectors.
            source: Images, with or without labels: a folder, table, image file or benchmark, as in `open_collection`,
                or a catalog.
            location: See `open`.
            root: Root of `source`, as in `open_catalog`.
            model: See `create`.
            kind: See `create`.
            workers: Number of processes that decode images. Default: chosen by the number of cores and images.
            display: Shows the progress.

        Raises:
            DataError: The images cannot be opened, or none can be read.
            GalleryError: The location is in use, or the gallery has vectors of another model.
        """
        catalog = source if isinstance(source, Catalog) else open_collection(source, root=root)
        return index(encoder, catalog, location, model=model, kind=kind, workers=workers, display=display)[0]

    @staticmethod
    def exists(location: Path | str) -> bool:
        """Return whether there is a gallery.

        Raises:
            GalleryError: The Milvus server does not answer, or the Milvus Lite file cannot be opened.
        """
        location = current_location(location)
        if not is_milvus(location):
            return (Path(location) / GALLERY_FILE).is_file()
        from shortlist.gallery.milvus_store import exists

        return exists(MilvusAddress.parse(str(location)))

    @staticmethod
    def check(location: Path | str, *, display: Display | None = None) -> GalleryCheck:
        """Read all files of a gallery in a folder, and verify their digests.

        Opening a gallery verifies only its small files, its index, and parts of its vectors.

        Args:
            location: Folder of the gallery.
            display: Shows the progress.

        Raises:
            GalleryError: The folder contains no gallery, gallery.json is damaged, or it is a Milvus collection.
        """
        location = current_location(location)
        if is_milvus(location):
            raise GalleryError(f"{location} is a Milvus collection, whose files Milvus checks itself.")
        from shortlist.gallery.checking import check_folder

        with (display or default_display()).task(f"checking {Path(location).absolute().name}", "files") as progress:
            return check_folder(Path(location), progress)

    def close(self) -> None:
        """Release files and connections, so that another process can open a Milvus Lite file."""
        for store in (self.store, *self._former):
            store.close()

    def refresh(self) -> None:
        """Load the changes that other processes have made. Until then, searches use the state that was opened.

        If the gallery was opened by its name, and the name now refers to another gallery, that gallery is loaded. If
        this fails, searches continue to use the previous one. If the gallery was replaced by one of another model, that
        model is loaded.

        Raises:
            GalleryError: The gallery can no longer be read, or its model is missing.
        """
        if self._followed is not None and self._following.acquire(blocking=False):  # only one thread loads a gallery
            try:
                self._follow(*self._followed)
            finally:
                self._following.release()
        self.store.refresh()
        if self._encoder is not None:
            _ = self.encoder

    def _follow(self, name: Path, before: Path | str) -> None:
        current = current_location(name)
        if current == before:
            return
        new = Gallery.open(current)
        new._prepare = self._prepare
        if self._encoder is not None:
            _ = new.encoder  # loaded before any search uses it
        with self._loading:
            self._former.append(self.store)
            self.store, self._encoder, self._model, self._followed = new.store, new._encoder, None, (name, current)

    @property
    def encoder(self) -> Encoder:
        """The encoder that computes vectors, loaded on first use, and again if another one computed the vectors.

        Raises:
            GalleryError: It is not the encoder that computed the vectors of the gallery.
            ModelError: It cannot be read.
        """
        with self._loading:
            if self._encoder is None or self._encoder.fingerprint != self.store.fingerprint:
                self._encoder = self._prepare(self._checked(self.store.encoder(self._model)))
            return self._encoder

    @encoder.setter
    def encoder(self, encoder: Encoder) -> None:
        self._encoder = self._checked(encoder)

    @contextmanager
    def preparing_encoders(self, prepare: Callable[[Encoder], Encoder]) -> Iterator[None]:
        """Inside a `with` block, apply a function to the encoder, and to every encoder that is loaded later.

        Args:
            prepare: Function that returns an encoder with the same vectors, such as one in another runtime.
        """
        before = self._prepare, self._encoder
        self._prepare, self._encoder = prepare, None if self._encoder is None else prepare(self._encoder)
        try:
            yield
        finally:
            self._prepare, self._encoder = before

    def _checked(self, found: Encoder) -> Encoder:
        if found.fingerprint != self.store.fingerprint:
            raise GalleryError(
                f"The model in {self._model or self.name} is not the one that computed the vectors of the gallery "
                f"{self.name} (fingerprint {found.fingerprint[:12]}, expected {self.store.fingerprint[:12]})."
            )
        return found

    @property
    def name(self) -> str:
        """Name of the folder or collection."""
        return self.store.name

    def facts(self) -> dict[str, Any]:
        """Return a description of the gallery as JSON-serializable values."""
        store = self.store
        return {
            "name": self.name,
            "images": len(self),
            "dim": store.dim,
            "fingerprint": store.fingerprint,
            "min_score": store.min_score,
            **store.facts(),
        }

    def describe_index(self) -> str:
        """Describe the index: whether search is exact, the kind of index, and its recall if it was measured."""
        facts = self.store.facts()
        kind, recall = facts["kind"], facts["recall"]
        if kind == "flat":
            return "exact (flat)"
        if recall is None:
            return f"approximate ({kind}, recall not measured)"
        queries = f"{recall['queries']:,} of its own images as queries"
        return f"approximate ({kind}, recall@{recall['at']} {100 * recall['recall']:.1f} %, measured with {queries})"

    @property
    def min_score(self) -> float | None:
        """Default minimum score of a result in searches; None: no minimum."""
        return self.store.min_score

    def set_min_score(self, score: float | None) -> None:
        """Store the default minimum score of a result in searches.

        Args:
            score: Cosine similarity from -1 to 1, such as the value that a report recommends; None: no minimum.

        Raises:
            ConfigError: It is not a number from -1 to 1.
            GalleryError: Another process is changing the gallery.
        """
        self.store.set_min_score(check_min_score(score))

    def __len__(self) -> int:
        return len(self.store)

    def item(self, id: int) -> Item:  # noqa: A002 - the name of the field
        """Return an image by its id.

        Raises:
            NoSuchItem: No image has this id.
        """
        return self.store.item(id)

    def items(self, *, label: str | None = None, offset: int = 0, limit: int = 50) -> list[Item]:
        """Return images in the order of their ids, optionally only those with a label."""
        return self.store.items(label, offset, limit)

    def labels(self) -> dict[str, int]:
        """Return the number of images per label, sorted by label."""
        return self.store.labels()

    def unknown_label(self, label: str) -> DataError:
        """Return the error for a label that no image has, with the labels that are similar to it."""
        known = self.labels()
        hint = did_you_mean(label, known) if known else "and no labels at all"
        return DataError(f"The gallery {self.name} has no image with the label {label!r}, {hint}")

    @overload  # a string is also a sequence of strings
    def search(  # type: ignore[overload-overlap]
        self, images: ImageLike, k: int = 10, *, label: str | None = None, min_score: float | None = None
    ) -> list[Hit]: ...
    @overload
    def search(
        self, images: Sequence[ImageLike], k: int = 10, *, label: str | None = None, min_score: float | None = None
    ) -> list[list[Hit]]: ...

    def search(
        self,
        images: ImageLike | Sequence[ImageLike],
        k: int = 10,
        *,
        label: str | None = None,
        min_score: float | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Find the k images that are most similar to an image, or to each image of a list.

        Args:
            images: One image, as a path, file contents, PIL image, tensor or array (see `Encoder.encode`), or a list.
            k: Number of results. If the gallery has fewer images, all are returned.
            label: Find only images with this label.
            min_score: Leave out results with a lower score. Default: `Gallery.min_score`; -1 returns all.

        Returns:
            Hits in descending order of their scores; for a list, one list of hits per image.

        Raises:
            ImageError: An image cannot be read.
        """
        found = self.in_one_state(
            lambda: self.search_vectors(self.encoder.encode(images), k, label=label, min_score=min_score)
        )
        return found[0] if is_single(images) else found

    def search_vectors(
        self, vectors: Vectors, k: int = 10, *, label: str | None = None, min_score: float | None = None
    ) -> list[list[Hit]]:
        """Find the k nearest images of each vector.

        Args:
            vectors: Unit vectors, (q, d).
            k: Number of results per vector. If the gallery has fewer images, all are returned.
            label: Find only images with this label.
            min_score: See `search`.

        Returns:
            Hits per vector, in descending order of their scores.
        """
        queries = np.ascontiguousarray(torch.as_tensor(vectors).detach().cpu().float().numpy())
        if queries.ndim != 2 or queries.shape[1] != self.store.dim:
            raise DataError(f"Queries of {self.name} must have shape (q, {self.store.dim}), not {queries.shape}.")
        check_k(k)
        lowest = self.min_score if min_score is None else check_min_score(min_score)
        found = self.store.search(queries, k, label) if len(queries) else []
        return found if lowest is None else [[hit for hit in hits if hit.score >= lowest] for hits in found]

    def similar(
        self,
        id: int,  # noqa: A002
        k: int = 10,
        *,
        label: str | None = None,
        min_score: float | None = None,
    ) -> list[Hit]:
        """Find the k images that are most similar to an image of the gallery, without that image itself.

        Raises:
            NoSuchItem: No image has this id.
        """
        (found,) = self.in_one_state(
            lambda: self.search_vectors(self.store.vectors([id]), k + 1, label=label, min_score=min_score)
        )
        return [hit for hit in found if hit.item.id != id][:k]

    def in_one_state(self, search: Callable[[], Result]) -> Result:
        """Call a function that searches, again if the gallery was replaced by another one in the meantime.

        Otherwise, the query could be a vector, or the minimum score a value, of the other one.
        """
        while True:
            identity = self.store.identity
            try:
                found = search()
            except ShortlistError:  # such as if the vectors of the other gallery have a different dimension
                if self.store.identity == identity:
                    raise
                continue
            if self.store.identity == identity:
                return found

    def add(
        self,
        catalog: Catalog,
        *,
        workers: int | None = None,
        parts: Path | str | None = None,
        ids: Mapping[str, int] | None = None,
        prune: str | None = None,
        min_score: float | None = None,
        log: Path | str | None = None,
        display: Display | None = None,
    ) -> Added:
        """Add images. Images that the gallery already has are embedded again only if their files have changed.

        If the process is killed, the next call resumes from the embeddings that are complete. Queries of a catalog with
        roles are not added.

        Args:
            catalog: The images. The class name "" means that an image has no label, as in `open_collection`.
            workers: Number of processes that decode images. Default: chosen by the number of cores and images.
            parts: Folder of the parts that shards have embedded, which are merged and then deleted.
            ids: Ids of the images by absolute path, in ascending order. They are used if they are larger than all ids
                that the gallery has ever used. Default: the next free ids.
            prune: Folder in which images, at any depth, are removed from the gallery if the catalog does not list
                them; "" for all images of the gallery. Default: none are removed.
            min_score: Default minimum score of a result, which is stored together with the images; see `set_min_score`.
                Default: unchanged.
            log: File to which a JSON object per changed image is appended.
            display: Shows the progress.

        Raises:
            DataError: No image can be read, or an image is cropped to a box.
            ConfigError: `min_score` is not a number from -1 to 1.
            IncompletePartsError: The parts do not contain every image.
            GalleryError: Another process is changing the gallery.
        """
        display = display or default_display()
        check_min_score(min_score)
        with (
            display.task(f"embedding {catalog.name}", "images") as embedding,
            display.task("building the index", "vectors", later=True) as indexing,
        ):
            adder = ImageAdder(
                self.store, self.encoder, catalog, parts=parts, ids=ids, prune=prune, min_score=min_score, log=log
            )
            return adder.run(workers, embedding, indexing)

    def remove(
        self,
        which: Iterable[int | Path | str],
        *,
        log: Path | str | None = None,
        display: Display | None = None,
    ) -> int:
        """Remove images by id, by path, or all images in a folder. Their files are not deleted.

        Args:
            which: Ids, or paths of files and folders.
            log: File to which a JSON object per removed image is appended.
            display: Shows the progress.

        Returns:
            Number of images that were removed.

        Raises:
            NoSuchItem: No image has one of the ids or paths.
        """
        display = display or default_display()
        with (
            self.store.changing(),
            display.task(f"removing from {self.name}"),
            display.task("building the index", "vectors", later=True) as indexing,
        ):
            ids: dict[int, None] = {}
            for each in which:
                found = [self.store.item(each).id] if isinstance(each, int) else self._ids_under(each)
                ids.update(dict.fromkeys(found))
            if ids:
                paths = [] if log is None else [as_url(self.store.item(each).path) for each in ids]
                self.store.change(removed=list(ids), progress=indexing)
                ChangeLog(log, self.name).write("removed", paths)
        return len(ids)

    def _ids_under(self, path: Path | str) -> list[int]:
        found = self.store.ids_under(absolute_path(path))
        if not found:
            raise NoSuchItem(f"The gallery {self.name} has no image at {absolute_path(path)}.")
        return found


def index(
    encoder: Encoder,
    catalog: Catalog,
    location: Path | str,
    *,
    model: Path | str | None = None,
    kind: str = "auto",
    workers: int | None = None,
    parts: Path | str | None = None,
    ids: Mapping[str, int] | None = None,
    prune: str | None = None,
    min_score: float | None = None,
    default_min_score: float | None = None,
    log: Path | str | None = None,
    display: Display | None = None,
) -> tuple[Gallery, Added]:
    """Add images to a gallery, which is created if it does not exist; see `Gallery.create`, `open` and `add`.

    `default_min_score` is stored as the minimum score if `min_score` is not given, and the gallery has none.

    Raises:
        GalleryError: The existing gallery has vectors of another model, or an index of another kind.
    """
    check_kind(kind)
    check_min_score(min_score)
    if not Gallery.exists(location):
        gallery = Gallery.create(location, encoder, model=model, kind=kind)
    else:
        gallery = Gallery.open(location)
        if gallery.store.fingerprint != encoder.fingerprint:
            raise GalleryError(
                f"{location} contains vectors of another model. Choose another location, or use the gallery's own "
                "model."
            )
        if kind not in ("auto", gallery.store.requested_kind):
            raise GalleryError(
                f"{location} was created with the kind {gallery.store.requested_kind}: "
                f"choose another location for {kind}."
            )
    gallery.encoder = encoder  # already loaded
    if min_score is None and gallery.min_score is None:
        min_score = default_min_score
    added = gallery.add(
        catalog, workers=workers, parts=parts, ids=ids, prune=prune, min_score=min_score, log=log, display=display
    )
    return gallery, added


def check_min_score(score: float | None) -> float | None:
    """Return a minimum score, or raise a ConfigError if it is not a number from -1 to 1."""
    if score is not None and not -1 <= score <= 1:  # also if it is not a number
        raise ConfigError(f"`min_score`, the minimum cosine similarity of a result, is from -1 to 1, not {score}.")
    return score


def _open_store(location: Path | str) -> Store:
    if is_milvus(location):
        from shortlist.gallery.milvus_store import MilvusStore

        return MilvusStore(MilvusAddress.parse(str(location)))
    from shortlist.gallery.folder_store import FolderStore

    return FolderStore(Path(location))
