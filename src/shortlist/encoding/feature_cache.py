"""Cache of the pooled features that a frozen backbone computes for one or several views (augmentations) of an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.data import Catalog, ImageDataset, Transform
from shortlist.data.images import ViewDataset
from shortlist.encoding.embed import embed_dataset
from shortlist.encoding.vector_file import VectorFile
from shortlist.errors import RunError
from shortlist.files import exclusive_lock, read_json, write_text_atomically
from shortlist.locations import size_and_mtime
from shortlist.model import Embedder
from shortlist.progress import Progress
from shortlist.search import open_vectors

IMAGES = ".images.json"  # ending of the list of images next to a file of features


@dataclass(frozen=True)
class Views:
    """The views that are computed for each image.

    Args:
        transform: Transform of the image, random or deterministic.
        number: Number of views.
        seed: Seed of the random transform.
        dtype: Name of the data type of the cached features.
    """

    transform: Transform
    number: int = 1
    seed: int = 0
    dtype: str = "float32"

    def dataset(self, catalog: Catalog) -> ImageDataset:
        """Return the views of the images of a catalog."""
        return ViewDataset(catalog, self.transform, self.number, self.seed)


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Features of the n images of a catalog, in memory-mapped files.

    Args:
        files: Contents of the files, (rows, views, channels) each.
        file: Index of the file of each image (n,).
        row: Row of each image in its file (n,).
        encoded: Number of images that had to be encoded; the others were in the cache.
    """

    files: tuple[NDArray[Any], ...]
    file: NDArray[np.int64]
    row: NDArray[np.int64]
    encoded: int = 0

    def __len__(self) -> int:
        return len(self.row)

    @property
    def channels(self) -> int:
        """Number of dimensions of the features."""
        return int(self.files[0].shape[2])

    def take(self, images: NDArray[np.int64], views: NDArray[np.int64]) -> Tensor:
        """Return the features of the given views of the given images, (B, channels) float32."""
        if len(self.files) == 1:
            return torch.from_numpy(self.files[0][self.row[images], views]).float()
        found, files = torch.empty(len(images), self.channels), self.file[images]
        for number in np.unique(files).tolist():
            chosen = np.flatnonzero(files == number)
            rows = self.files[number][self.row[images[chosen]], views[chosen]]
            found[torch.from_numpy(chosen)] = torch.from_numpy(rows).float()
        return found


class PooledFeatures(nn.Module):
    """The frozen part of an embedder: maps images (B, 3, H, W) to pooled features (B, channels)."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder
        self.train(embedder.training)

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.pooled_features(images)


class FeatureCache:
    """Pooled features in a folder, which several runs and processes can share.

    Cached features are reused if the weights of backbone and pooling, the views, and the path, box, size and
    modification time of the image are the same. Only the remaining images are encoded, into a new file. If a process is
    interrupted, the features that it has encoded are kept. If several processes need the same features, one encodes
    them while the others wait.

    Args:
        folder: Folder of the cache. It is created.
        on_wait: Called with a message if another process is encoding.
    """

    def __init__(self, folder: Path, on_wait: Callable[[str], object] = lambda message: None) -> None:
        self.folder, self.on_wait = folder, on_wait

    def features(
        self,
        embedder: Embedder,
        catalog: Catalog,
        views: Views,
        *,
        batch_size: int = 32,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> CachedFeatures:
        """Return the features of all images of a catalog, after encoding those that are not in the cache.

        Args:
            embedder: Embedder whose backbone and pooling compute the features, in evaluation mode.
            catalog: The images.
            views: The views of each image.
            batch_size: Number of views per forward pass.
            workers: Number of processes that decode images.
            progress: Called with the number of images done and the number of images to encode.

        Raises:
            DataError: An image cannot be read.
            NonFiniteError: A feature is not finite, or too large for the data type.
        """
        weights = {"backbone": embedder.config.backbone, "pooled": embedder.pooled_digest()}
        facts = {**weights, **asdict(views), "transform": str(views.transform)}
        folder = self.folder / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        keys = image_keys(catalog)
        if missing := _missing(keys, _index(folder, views)):
            with self._locked(folder):
                _keep_unfinished(folder, views)
                if missing := _missing(keys, _index(folder, views)):
                    write_text_atomically(folder / "facts.json", json.dumps(facts, indent=1) + "\n")
                    file = _new_file(folder, [keys[index] for index in missing], views)
                    dataset = views.dataset(catalog.subset(missing))
                    images = max(1, batch_size // views.number)
                    network = PooledFeatures(embedder)
                    embed_dataset(network, dataset, file, batch_size=images, workers=workers, progress=progress)
        return _open(keys, _index(folder, views), views, len(missing))

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Hold the lock of a folder, after waiting for the process that holds it."""
        in_use = RunError(f"Another process is encoding images in {folder}.")
        with ExitStack() as lock:
            try:
                lock.enter_context(exclusive_lock(folder / ".lock", in_use))
            except RunError as error:
                if error is not in_use:
                    raise
                self.on_wait(f"{in_use} Waiting until it has finished.")
                lock.enter_context(exclusive_lock(folder / ".lock", in_use, timeout=-1))
            yield


def image_keys(catalog: Catalog) -> list[str]:
    """Return a key per image, which changes when the image file changes."""
    facts = ([str(catalog.paths[i]), catalog.box(i), size_and_mtime(catalog.file(i))] for i in range(len(catalog)))
    return [hashlib.blake2b(json.dumps(each).encode(), digest_size=12).hexdigest() for each in facts]


_Index = dict[str, tuple[Path, int]]  # key of an image -> file and row


def _index(folder: Path, views: Views) -> _Index:
    """Return the images in the complete files of a folder. Damaged files are ignored."""
    found: _Index = {}
    for images in sorted(folder.glob(f"*{IMAGES}")):
        file, keys = _vector_file(images, views), _listed_keys(images)
        if file.rows_done == len(keys):
            found |= {key: (file.path, row) for row, key in enumerate(keys)}
    return found


def _listed_keys(images: Path) -> list[str]:
    """Return the keys of the images that are listed in a file; none if it is damaged."""
    try:
        keys: list[str] = read_json(images, list[str])
    except RunError:
        return []
    return keys


def _vector_file(images: Path, views: Views) -> VectorFile:
    """Return the feature file that belongs to a list of images."""
    return VectorFile(images.with_name(images.name.replace(IMAGES, ".npy")), images.name, views.dtype)


def _keep_unfinished(folder: Path, views: Views) -> None:
    """Shorten the lists of files that interrupted processes have left to the images that the files contain.

    Damaged files are deleted.
    """
    for images in folder.glob(f"*{IMAGES}"):
        file, keys = _vector_file(images, views), _listed_keys(images)
        if file.rows_done == len(keys):
            continue
        with file:
            usable = 0 < file.note.rows <= len(keys)
            if usable:
                write_text_atomically(images, json.dumps(keys[: file.note.rows]) + "\n")
                file.finish()
        if not usable:
            images.unlink()
            file.part.unlink()


def _missing(keys: list[str], index: _Index) -> list[int]:
    """Return the position of each image that is not in the index. An image that is listed twice is returned once."""
    return [position for key, position in {key: i for i, key in enumerate(keys)}.items() if key not in index]


def _new_file(folder: Path, keys: list[str], views: Views) -> VectorFile:
    """Return a file for the features of these images, after writing the list of the images."""
    text = json.dumps(keys) + "\n"
    images = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{IMAGES}"
    write_text_atomically(images, text)
    return _vector_file(images, views)


def _open(keys: list[str], index: _Index, views: Views, encoded: int) -> CachedFeatures:
    places = [index[key] for key in keys]
    paths = sorted({path for path, _ in places})
    number = {path: position for position, path in enumerate(paths)}
    files = tuple(vectors.reshape(len(vectors), views.number, -1) for vectors in map(open_vectors, paths))
    file = np.array([number[path] for path, _ in places], dtype=np.int64)
    return CachedFeatures(files, file, np.array([row for _, row in places], dtype=np.int64), encoded)
