"""A folder of pictures: one sub-folder a class, under train/ and test/ where those are given."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shortlist.data.catalog import Catalog
from shortlist.data.presence import some
from shortlist.errors import DataError

_JPEG, _LOSSLESS = (".jpg", ".jpeg", ".jpe", ".jfif"), (".png", ".bmp", ".gif", ".tif", ".tiff", ".tga")
_OTHERS = (".webp", ".avif", ".jp2", ".ppm", ".pgm", ".pbm", ".pnm")
IMAGE_ENDINGS = frozenset(_JPEG + _LOSSLESS + _OTHERS)
SPLIT_FOLDERS = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
EXPECTED = "expected one sub-folder a class with its images in it, or such folders under train/ and test/"


def folder_catalog(root: Path, on_missing: str = "error") -> Catalog:
    """All images under `root`, classes by name, images by name. Hidden files and folders do not count.

    Raises:
        DataError: there is nothing, or it is arranged otherwise, or a class has no image (left out and recorded in
            `missing` where `on_missing` is "skip").
    """
    top = _listing(root, "")
    if not top.folders:
        found = f"{len(top.images)} images lie directly in it" if top.images else "it is empty"
        raise DataError(f"no class folders in {root}: {found}; {EXPECTED}")
    parts = {name: _listing(root, name) for name in top.folders}
    if set(parts) <= set(SPLIT_FOLDERS) and any(part.folders for part in parts.values()):
        return _catalog(root, _split_classes(root, parts), on_missing, has_splits=True)
    if top.images:
        raise DataError(f"{len(top.images)} images lie directly in {root}, beside the class folders; {EXPECTED}")
    return _catalog(root, [("", name, part) for name, part in parts.items()], on_missing, has_splits=False)


@dataclass
class _Listing:
    folders: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


_Class = tuple[str, str, _Listing]  # split, name, what lies in its folder; images as paths from the root


def _listing(root: Path, folder: str) -> _Listing:
    found = _Listing()
    prefix = f"{folder}/" if folder else ""
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    found.folders.append(entry.name)
                elif os.path.splitext(entry.name)[1].lower() in IMAGE_ENDINGS:  # noqa: PTH122 - many times faster
                    found.images.append(prefix + entry.name)
                else:
                    found.others.append(prefix + entry.name)
    except OSError as error:
        raise DataError(f"cannot look into the folder {root / folder}: {error.strerror}") from error
    found.folders.sort()
    found.images.sort()
    found.others.sort()
    return found


def _split_classes(root: Path, parts: dict[str, _Listing]) -> list[_Class]:
    if {"val", "validation"} <= set(parts):
        raise DataError(f"{root} has both val/ and validation/; keep one of them")
    classes: list[_Class] = []
    for name, part in parts.items():
        if part.images:
            raise DataError(f"{len(part.images)} images lie directly in {root / name}; {EXPECTED}")
        classes += [(SPLIT_FOLDERS[name], below, _listing(root, f"{name}/{below}")) for below in part.folders]
    return classes


def _catalog(root: Path, classes: list[_Class], on_missing: str, *, has_splits: bool) -> Catalog:
    for _, name, found in classes:
        if found.folders:
            raise DataError(
                f"the class folder {name!r} in {root} has folders of its own ({some(found.folders)}); {EXPECTED}"
            )
    empty = [f"{split}/{name}/" if has_splits else f"{name}/" for split, name, found in classes if not found.images]
    if len(empty) == len(classes):
        raise DataError(f"no images in {root}: its folders ({some(empty)}) hold none; {EXPECTED}")
    if empty and on_missing == "error":
        raise DataError(
            f"{len(empty)} class folders in {root} have no images: {some(empty)}. "
            'Fill or remove them, or leave them out with `on_missing="skip"`'
        )
    names = sorted({name for _, name, found in classes if found.images})
    label_of = {name: label for label, name in enumerate(names)}
    filled = [one for one in classes if one[2].images]
    sizes = [len(found.images) for _, _, found in filled]
    return Catalog(
        name=root.resolve().name,
        root=root,
        paths=np.array([path for _, _, found in filled for path in found.images], dtype=object),
        labels=np.repeat([label_of[name] for _, name, _ in filled], sizes),
        class_names=tuple(names),
        splits=np.repeat([split for split, _, _ in filled], sizes),
        missing=tuple(empty),
        ignored=tuple(path for _, _, found in classes for path in found.others),
    )
