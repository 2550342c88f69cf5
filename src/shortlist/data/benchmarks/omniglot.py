"""Omniglot: characters of 50 alphabets, 20 drawings each; background set for training, evaluation set for testing."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shortlist.cache import build_once, cache_folder
from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.catalog import Catalog
from shortlist.data.folders import IMAGE_EXTENSIONS
from shortlist.errors import DataError
from shortlist.progress import Progress

PARTS = {"images_background": "train", "images_evaluation": "test"}
MARKERS = tuple(f"{part}{ending}" for part in PARTS for ending in ("", ".npz"))
EXPECTS = "images_background and images_evaluation, as .npz files or as folders Alphabet/character01/*.png"


def read(root: Path, progress: Progress | None = None) -> Catalog:
    """Read Omniglot from its folders, or from .npz files, which are unpacked once to PNG files in the cache.

    Args:
        root: Folder with `images_background` and `images_evaluation`, as folders or as .npz files.
        progress: Callback that is called with (done, total) while images are unpacked.

    Raises:
        DataError: If a file or folder is missing or cannot be read.
    """
    if all((root / part).is_dir() for part in PARTS):
        return _from_folders(root)
    if all((root / f"{part}.npz").is_file() for part in PARTS):
        return _from_arrays(root, progress)
    found = [name for name in MARKERS if (root / name).exists()]
    raise DataError(f"omniglot: {root} must contain {EXPECTS}; it only contains {' and '.join(found)}.")


def _from_folders(root: Path) -> Catalog:
    paths: list[str] = []
    names: list[str] = []  # class of each image
    splits: list[str] = []
    for part, split in PARTS.items():
        images = sorted(
            file
            for file in (root / part).glob("*/*/*")
            if file.suffix.lower() in IMAGE_EXTENSIONS and not file.name.startswith(".")
        )
        if not images:
            raise DataError(
                f"omniglot: no images in {root / part}; expected files such as Alphabet/character01/0001_01.png."
            )
        paths += [file.relative_to(root).as_posix() for file in images]
        names += [f"{file.parent.parent.name}/{file.parent.name}" for file in images]
        splits += [split] * len(images)
    return Catalog.from_classes("omniglot", root, paths, names, splits)


def _from_arrays(root: Path, progress: Progress | None) -> Catalog:
    digest = hashlib.sha256()  # of the contents, so that changed files get a new cache folder
    for part in PARTS:
        digest.update((root / f"{part}.npz").read_bytes())
    folder = cache_folder("omniglot") / digest.hexdigest()[:16]
    labels_of = {part: _read_labels(root / f"{part}.npz") for part in PARTS}
    build_once(folder, lambda partial: _unpack(root, partial, progress))
    paths: list[str] = []
    names: list[str] = []
    splits: list[str] = []
    for part, labels in labels_of.items():
        paths += _png_paths(part, labels)
        names += [f"{part.removeprefix('images_')}/{label:04}" for label in labels.tolist()]
        splits += [PARTS[part]] * len(labels)
    return Catalog.from_classes("omniglot", folder, paths, names, splits)


def _png_paths(part: str, labels: NDArray[np.int64]) -> list[str]:
    """Return paths such as images_background/0007/00133.png: one folder per class, then the position in the array."""
    return [f"{part}/{label:04}/{position:05}.png" for position, label in enumerate(labels.tolist())]


def _unpack(root: Path, folder: Path, progress: Progress | None) -> None:
    contents = {part: _read_images(root / f"{part}.npz") for part in PARTS}
    total, done = sum(len(labels) for _, labels in contents.values()), 0
    for part, (images, labels) in contents.items():
        for label in np.unique(labels):
            (folder / part / f"{label:04}").mkdir(parents=True)
        for name, image in zip(_png_paths(part, labels), images, strict=True):
            Image.fromarray(image.astype(np.uint8) * np.uint8(255)).save(folder / name, compress_level=1)
            done += 1
            if progress is not None:
                progress(done, total)


def _read_images(file: Path) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return all images (n, height, width), True for blank paper, and their labels (n,)."""
    images, labels = _read_array(file, "images"), _read_array(file, "labels")
    if images.dtype != np.bool_ or images.ndim < 3 or images.shape[:-2] != labels.shape:
        raise DataError(
            f"omniglot: {file} contains {images.dtype} images of shape {images.shape} and labels of shape "
            f"{labels.shape}; expected black and white images (bool, True = paper) with one label each."
        )
    return images.reshape(-1, *images.shape[-2:]), labels.ravel()


def _read_labels(file: Path) -> NDArray[np.int64]:
    labels = _read_array(file, "labels").ravel()
    if not np.issubdtype(labels.dtype, np.integer) or not len(labels) or labels.min() < 0:
        raise DataError(f"omniglot: the labels of {file} must be non-negative integers.")
    return labels.astype(np.int64)


def _read_array(file: Path, key: str) -> NDArray[Any]:
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            content: NDArray[Any] = arrays[key]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"omniglot: cannot read {file}: {error}") from error
    except KeyError as error:
        raise DataError(f"omniglot: {file} has no array {key!r}.") from error
    return content


BENCHMARK = Benchmark(
    name="omniglot",
    about="1,623 handwritten characters of 50 alphabets, 20 drawings each",
    read=read,
    protocol="leave-one-out",
    k=(1, 2, 4, 8),
    download="https://github.com/brendenlake/omniglot (images_background.zip, images_evaluation.zip)",
    expects=EXPECTS,
    tree="""\
images_background/Greek/character01/0394_01.png, ...
images_evaluation/...
or
images_background.npz     images (classes, 20, 105, 105) bool, labels (classes, 20)
images_evaluation.npz""",
    markers=MARKERS,
    counts={"train": ImageCount(19_280, 964), "test": ImageCount(13_180, 659)},
    writes=True,
)
