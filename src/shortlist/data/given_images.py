"""Images passed as Python objects: a catalog, lists of paths and labels, or a torch dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from shortlist.data.catalog import Catalog
from shortlist.data.images import as_image
from shortlist.errors import DataError

# A catalog, (paths, labels), or a map-style dataset of (image, label)
GivenImages = Catalog | tuple[Iterable[str | Path], Iterable[Any]] | Dataset[Any]


def as_catalog(images: GivenImages, folder: Path) -> Catalog:
    """Convert images that are passed as Python objects to a catalog.

    Args:
        images: A catalog, which is returned; a pair of paths and labels; or a map-style torch dataset of images and
            labels. Labels are strings or integers. Images are as in `as_image`, without a random transform.
        folder: Folder to which the images of a dataset are written, as PNG files, unless the dataset lists their files
            in `samples`, as those of torchvision do.

    Raises:
        DataError: `images` has another type, or the numbers of paths and labels differ.
    """
    if isinstance(images, Catalog):
        return images
    if isinstance(images, Dataset):
        return _dataset_catalog(images, folder)
    if not isinstance(images, tuple) or len(images) != 2:
        raise DataError(f"`images` must be a Catalog, a pair (paths, labels) or a torch Dataset, not {_kind(images)}.")
    return _catalog([str(path) for path in images[0]], list(images[1]))


def _dataset_catalog(dataset: Dataset[Any], folder: Path) -> Catalog:
    samples, names = getattr(dataset, "samples", None), getattr(dataset, "classes", None)
    if isinstance(samples, Sequence) and all(map(_is_file, samples)):
        return _catalog([str(path) for path, _ in samples], [names[each] if names else each for _, each in samples])
    if not hasattr(dataset, "__len__"):
        raise DataError("The dataset must have a length: give a map-style dataset, not an iterable one.")
    folder.mkdir(parents=True)
    labels: list[Any] = []
    for index in range(len(dataset)):
        item = dataset[index]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise DataError(f"The items of the dataset must be pairs (image, label), not {_kind(item)}.")
        as_image(item[0]).save(folder / f"{index:08}.png")
        labels.append(item[1])
    return _catalog([str(folder / f"{index:08}.png") for index in range(len(labels))], labels)


def _is_file(sample: object) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], str | Path)


def _catalog(paths: list[str], labels: list[Any]) -> Catalog:
    if len(paths) != len(labels):
        raise DataError(f"There are {len(paths):,} paths but {len(labels):,} labels: give one label per image.")
    if not paths:
        raise DataError("No images: the list of paths is empty.")
    return Catalog.from_classes("images", Path(), paths, _class_names(labels))


def _class_names(labels: list[Any]) -> list[str]:
    """Return the labels as text. Integers are padded with zeros, so that they are sorted numerically."""
    plain = [label.item() if isinstance(label, Tensor | np.generic) else label for label in labels]
    if all(type(label) is int and label >= 0 for label in plain):
        width = len(str(max(plain)))
        return [f"{label:0{width}}" for label in plain]
    for label in plain:
        if not isinstance(label, str | int) or label == "":
            raise DataError(f"A label must be a string or an integer, not {label!r}.")
    return [str(label) for label in plain]


def _kind(value: object) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
