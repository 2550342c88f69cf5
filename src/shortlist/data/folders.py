"""Catalogs of folders: one sub-folder per class (for training), or images at any depth (for search)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from pathlib import Path

from shortlist.data.catalog import Catalog
from shortlist.errors import DataError, shorten_list
from shortlist.locations import as_url, is_remote, list_remote

_JPEG, _LOSSLESS = (".jpg", ".jpeg", ".jpe", ".jfif"), (".png", ".bmp", ".gif", ".tif", ".tiff", ".tga")
_OTHERS = (".webp", ".avif", ".jp2", ".ppm", ".pgm", ".pbm", ".pnm")
IMAGE_EXTENSIONS = frozenset(_JPEG + _LOSSLESS + _OTHERS)
UNLABELLED = ""  # class name of images without a label
SPLIT_FOLDERS = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
EXPECTED = "expected one sub-folder per class with its images in it, or such folders under train/ and test/"


@dataclass
class _Listing:
    """Sorted content of one folder, without hidden entries."""

    folders: list[str] = field(default_factory=list)  # names
    images: list[str] = field(default_factory=list)  # paths relative to the root
    others: list[str] = field(default_factory=list)  # paths relative to the root


_ClassFolder = tuple[str, str, _Listing]  # split, class name, content


def class_folder_catalog(root: Path, on_missing: str = "error") -> Catalog:
    """Return the catalog of a folder with one sub-folder per class, optionally below train/, validation/ and test/.

    Classes and images are sorted by name. Hidden files and folders are ignored.

    Args:
        root: The folder.
        on_missing: "error", or "skip" to leave out class folders without images and record them in `Catalog.missing`.

    Raises:
        DataError: If the folder has a different layout, no images, or an empty class and `on_missing` is "error".
    """
    top = _list_folder(root)
    if not top.folders:
        found = f"{len(top.images)} images are directly in it" if top.images else "it is empty"
        raise DataError(f"No class folders in {root}: {found}; {EXPECTED}.")
    listings = {name: _list_folder(root, name) for name in top.folders}
    if set(listings) <= set(SPLIT_FOLDERS) and any(listing.folders for listing in listings.values()):
        return _class_catalog(root, _split_classes(root, listings), on_missing, has_splits=True)
    if top.images:
        raise DataError(f"{len(top.images)} images are directly in {root}, beside the class folders; {EXPECTED}.")
    return _class_catalog(
        root, [("", name, listing) for name, listing in listings.items()], on_missing, has_splits=False
    )


def nested_folder_catalog(root: Path) -> Catalog:
    """Return the catalog of all images below a folder, at any depth, sorted by path.

    The label of an image is the name of the first folder below `root`, or below train/, validation/ and test/ if every
    image is in a folder below these. Images directly in `root` belong to the class `UNLABELLED`.

    Raises:
        DataError: If there are no images, or a folder cannot be listed.
    """
    paths = sorted(_walk(root))
    if not paths:
        extensions = ", ".join(sorted(IMAGE_EXTENSIONS))
        raise DataError(f"No images in {root} at any depth; images are recognised by their extension: {extensions}.")
    parts = [path.split("/") for path in paths]
    has_splits = all(len(each) > 2 and each[0] in SPLIT_FOLDERS for each in parts)
    below = [each[1:] if has_splits else each for each in parts]
    labels = [each[0] if len(each) > 1 else UNLABELLED for each in below]
    splits = [SPLIT_FOLDERS[each[0]] if has_splits else "" for each in parts]
    return _path_catalog(root, paths, labels, splits, _name(root))


def single_image_catalog(file: Path) -> Catalog:
    """Return the catalog of one image file, without a label."""
    return _path_catalog(file.parent, [file.name], [UNLABELLED], [""], file.name)


def _list_folder(root: Path, folder: str = "") -> _Listing:
    """List `root / folder`; images and other files are paths relative to `root`."""
    found = _Listing()
    prefix = f"{folder}/" if folder else ""
    try:
        folders, files = list_remote(root / folder) if is_remote(root) else _list_local(root / folder)
    except OSError as error:
        raise DataError(f"Cannot list the folder {as_url(root / folder)}: {error.strerror or error}.") from error
    found.folders += [name for name in folders if not name.startswith(".")]
    for name in files:
        if name.startswith("."):
            continue
        is_image = os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS  # noqa: PTH122 - many times faster
        (found.images if is_image else found.others).append(prefix + name)
    for names in (found.folders, found.images, found.others):
        names.sort()
    return found


def _list_local(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders and of the files in a folder."""
    names: tuple[list[str], list[str]] = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            names[not _is_folder(entry)].append(entry.name)
    return names


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link to itself; reported as an unreadable image if it has an image extension
        return False


def _walk(root: Path, folder: str = "", parents: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Yield the paths of all images below `root / folder`; a link to a parent folder is not followed."""
    identity = (0, len(parents))  # a remote folder has no links
    if not is_remote(root):
        found = (root / folder).stat()
        identity = found.st_dev, found.st_ino
    if identity in parents:
        return
    listing = _list_folder(root, folder)
    yield from listing.images
    for name in listing.folders:
        yield from _walk(root, f"{folder}/{name}" if folder else name, parents | {identity})


def _split_classes(root: Path, listings: dict[str, _Listing]) -> list[_ClassFolder]:
    if {"val", "validation"} <= set(listings):
        raise DataError(f"{root} has both val/ and validation/; keep one of them.")
    classes: list[_ClassFolder] = []
    for name, listing in listings.items():
        if listing.images:
            raise DataError(f"{len(listing.images)} images are directly in {root / name}; {EXPECTED}.")
        classes += [(SPLIT_FOLDERS[name], below, _list_folder(root, f"{name}/{below}")) for below in listing.folders]
    return classes


def _class_catalog(root: Path, classes: list[_ClassFolder], on_missing: str, *, has_splits: bool) -> Catalog:
    for _, name, listing in classes:
        if listing.folders:
            raise DataError(
                f"The class folder {name!r} in {root} contains folders ({shorten_list(listing.folders)}); {EXPECTED}."
            )
    empty = [f"{split}/{name}/" if has_splits else f"{name}/" for split, name, listing in classes if not listing.images]
    if len(empty) == len(classes):
        raise DataError(f"No images in {root}: its folders ({shorten_list(empty)}) contain none; {EXPECTED}.")
    if empty and on_missing == "error":
        raise DataError(
            f"{len(empty)} class folders in {root} have no images: {shorten_list(empty)}. "
            'Fill or remove them, or leave them out with `on_missing="skip"`.'
        )
    filled = [one for one in classes if one[2].images]
    return Catalog.from_classes(
        _name(root),
        root,
        [path for _, _, listing in filled for path in listing.images],
        [name for _, name, listing in filled for _ in listing.images],
        [split for split, _, listing in filled for _ in listing.images],
        missing=tuple(empty),
        ignored=tuple(path for _, _, listing in classes for path in listing.others),
    )


def _path_catalog(root: Path, paths: list[str], labels: list[str], splits: list[str], name: str) -> Catalog:
    """Return the catalog of these images; names that are not valid UTF-8 are left out and recorded in `missing`."""
    valid = [_is_utf8(f"{root}/{path}") for path in paths]
    if not any(valid):
        raise DataError(f"The file name of {root / paths[0]} is not valid UTF-8: rename the file.")
    kept = (list(compress(values, valid)) for values in (paths, labels, splits))
    return Catalog.from_classes(name, root, *kept, missing=tuple(compress(paths, map(not_, valid))))


def _name(root: Path) -> str:
    return root.name if is_remote(root) else root.resolve().name


def _is_utf8(path: str) -> bool:
    """Check that a table can hold the path: Python represents invalid bytes of a file name as lone surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
