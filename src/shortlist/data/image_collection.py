"""Images to be embedded and searched, with labels or without: whatever a user points at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shortlist.data.benchmarks import BENCHMARKS
from shortlist.data.catalog import SPLITS, Catalog
from shortlist.data.folders import IMAGE_ENDINGS, SPLIT_FOLDERS
from shortlist.data.sources import open_catalog
from shortlist.data.tables import table_catalog
from shortlist.errors import ConfigError, DataError, did_you_mean

UNLABELLED = ""  # the class of images that have no label


def open_collection(
    source: str | Path,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Catalog:
    """The images of a benchmark, of a folder at any depth, of a CSV or Parquet file, or in one image file.

    The label of an image in a folder is the name of the first folder below it (below train/, test/ and the like, where
    there is nothing else); images right in it have none, and a table needs no labels. Such images are of the class
    `UNLABELLED`. Nobody is given a split, and files that are not there are only noticed when they are read.

    Args:
        source: a benchmark's name, or a path. A name that is both is the benchmark; write ./NAME for the folder.
        root: for a benchmark, the folder it lies in; for a table, the folder its paths are relative to.
        split: only the images of this one, where the source has splits.
        progress: called with (done, total) where a benchmark has to be unpacked first.

    Raises:
        DataError: there is no such source, or no images in it.
    """
    if split is not None and split not in SPLITS:
        raise ConfigError(f"there is no split {split!r}, {did_you_mean(split, SPLITS)}")
    path = Path(source).expanduser()
    if isinstance(source, str) and source in BENCHMARKS:
        catalog = open_catalog(source, root=root, on_missing="skip", progress=progress)
    elif path.suffix.lower() in (".csv", ".parquet") and path.is_file():
        catalog = table_catalog(path, None if root is None else Path(root).expanduser(), unlabelled=UNLABELLED)
    elif root is not None:
        raise ConfigError(f"`root` has no meaning for {source}: it goes with a benchmark's name or a table")
    elif path.is_dir():
        catalog = _folder(path)
    elif path.is_file():
        catalog = _catalog(path.parent, [(path.name, UNLABELLED, "")], path.name)
    else:
        raise DataError(_unknown(source, path))
    return catalog if split is None else catalog.split(split)


def _folder(root: Path) -> Catalog:
    try:
        found = sorted(_images(root, "", set()))
    except OSError as error:
        raise DataError(f"cannot look into the folder {error.filename}: {error.strerror}") from error
    if not found:
        endings = ", ".join(sorted(IMAGE_ENDINGS))
        raise DataError(f"no images in {root}, at any depth (a file is one by its ending: {endings})")
    parts = [path.split("/") for path in found]
    splits = all(len(each) > 2 and each[0] in SPLIT_FOLDERS for each in parts)
    named = [each[1:] if splits else each for each in parts]
    rows = [
        (path, below[0] if len(below) > 1 else UNLABELLED, SPLIT_FOLDERS[each[0]] if splits else "")
        for path, each, below in zip(found, parts, named, strict=True)
    ]
    return _catalog(root, rows, root.resolve().name)


def _images(root: Path, folder: str, above: set[tuple[int, int]]) -> Iterator[str]:
    """Paths from the root; hidden files and folders do not count, and a link to a folder above leads nowhere."""
    place = root / folder
    found = place.stat()
    here = above | {(found.st_dev, found.st_ino)}
    if len(here) == len(above):
        return
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir():
                yield from _images(root, path, here)
            elif os.path.splitext(entry.name)[1].lower() in IMAGE_ENDINGS:  # noqa: PTH122 - many times faster
                yield path


def _catalog(root: Path, rows: list[tuple[str, str, str]], name: str) -> Catalog:
    """Of path, label and split of each image."""
    named = [row for row in rows if _is_text(f"{root}/{row[0]}")]
    if not named:
        raise DataError(f"the name of {root / rows[0][0]} is not text in UTF-8: rename it")
    missing = tuple(sorted({row[0] for row in rows} - {row[0] for row in named}))
    paths, labels, splits = zip(*named, strict=True)
    names, numbers = np.unique(np.array(labels, dtype=object), return_inverse=True)
    return Catalog(
        name, root, np.array(paths, dtype=object), numbers, tuple(names.tolist()), np.array(splits), missing=missing
    )


def _is_text(path: str) -> bool:
    """Whether a table can hold it: Python spells other bytes of a file's name as lone surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unknown(source: str | Path, path: Path) -> str:
    kinds = "a benchmark's name, a folder, a .csv or .parquet file, or an image"
    if isinstance(source, str) and os.sep not in source and not path.suffix:
        return f"there is no {source!r}: {did_you_mean(source, BENCHMARKS)} (images are {kinds})"
    return f"there is no {path.absolute()} (images are {kinds})"
