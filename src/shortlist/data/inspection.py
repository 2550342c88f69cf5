"""What is in a catalog, and what is wrong with its files."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.data.catalog import ROLES, SPLITS, Catalog
from shortlist.data.images import ImageError, opened, upright_rgb, upright_size
from shortlist.progress import Display, Progress, default_display

Unreadable = tuple[str, str]  # path, why
SAMPLE = 1000


def summary(catalog: Catalog, per_class: int = 4, sample: int = SAMPLE) -> dict[str, Any]:
    """What is in a catalog, ready for JSON.

    Args:
        catalog: of any size; of at most `sample` images, evenly spread, the headers are read for their sizes.
        per_class: how many images of a class a batch takes; smaller classes cannot be trained on.
        sample: 0 reads no image.

    Returns:
        `name, root, images, classes, splits` (images, classes and classes below `per_class` of each),
        `images_per_class` and `width`, `height` (min, median, max), `too_small` (classes below `per_class`), `roles`
        (how many queries and gallery images, where there are any), `sampled`
        and `unreadable` (images whose headers were read, and of those that could not be), `missing, ignored, remarks`.
    """
    sizes, unreadable = _image_sizes(catalog, sample)
    return {
        "name": catalog.name,
        "root": str(catalog.root),
        **_counts(catalog, per_class),
        "splits": {split: _counts(part, per_class) for split in SPLITS if len(part := _part(catalog, split))},
        **({} if catalog.roles is None else {"roles": {role: int((catalog.roles == role).sum()) for role in ROLES}}),
        "per_class": per_class,
        "width": _spread(sizes[:, 0]),
        "height": _spread(sizes[:, 1]),
        "sampled": len(sizes) + unreadable,
        "unreadable": unreadable,
        "missing": list(catalog.missing),
        "ignored": list(catalog.ignored),
        "remarks": list(catalog.remarks),
    }


@dataclass(frozen=True)
class CheckReport:
    """What `check` found.

    Args:
        images: how many were looked at.
        missing: files that are not there.
        unreadable: (path, why) of files that cannot be decoded.
        duplicates: (path, path) of files with equal bytes and different classes: at least one label is wrong.
        copies: files that another file of the same class equals; harmless, but they count double.
    """

    images: int
    missing: tuple[str, ...]
    unreadable: tuple[Unreadable, ...]
    duplicates: tuple[tuple[str, str], ...]
    copies: int

    @property
    def ok(self) -> bool:
        """Whether training can use every image that the source names, each with one label."""
        return not (self.missing or self.unreadable or self.duplicates)


def check(catalog: Catalog, workers: int | None = None, display: Display | None = None) -> CheckReport:
    """Decode every image, with all cores, and compare the files with each other.

    Args:
        catalog: opened with on_missing="skip", so that what is missing can be reported with the rest.
        workers: threads; by default one a core.
        display: for progress.
    """
    missing, unreadable = list(catalog.missing), []
    same: dict[bytes, list[int]] = {}  # files by their bytes
    with (display or default_display()).task(f"opening {catalog.name}", "images") as progress:
        for index, (digest, why) in enumerate(_examined(catalog, workers, progress)):
            path = str(catalog.paths[index])
            if digest is None:
                missing.append(path)
            elif why is None:
                same.setdefault(digest, []).append(index)
            else:
                unreadable.append((path, why))
    duplicates, copies = _duplicates(catalog, same)
    return CheckReport(len(catalog), tuple(missing), tuple(unreadable), tuple(duplicates), copies)


def drop_unreadable(
    catalog: Catalog, workers: int | None = None, progress: Progress | None = None
) -> tuple[Catalog, list[Unreadable]]:
    """The catalog without the images that cannot be decoded (its `missing` names them), and (path, why) of each."""
    bad = [
        (index, why)
        for index, (_, why) in enumerate(_examined(catalog, workers, progress, compare=False))
        if why is not None
    ]
    if not bad:
        return catalog, []
    unreadable = [(str(catalog.paths[index]), why) for index, why in bad]
    keep = np.setdiff1d(np.arange(len(catalog)), [index for index, _ in bad])
    missing = catalog.missing + tuple(path for path, _ in unreadable)
    return replace(catalog.subset(keep), missing=missing), unreadable


_Examined = tuple[bytes | None, str | None]  # SHA-256 of the file, None where there is none; what is wrong with it


def _examined(
    catalog: Catalog, workers: int | None, progress: Progress | None, compare: bool = True
) -> Iterator[_Examined]:
    """Each image in turn. Threads serve: Pillow, hashlib and the disk all work without Python's lock."""

    def examine(index: int) -> _Examined:
        file = catalog.file(index)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None, "there is no such file"
        except OSError as error:
            return b"", error.strerror or str(error)
        digest = hashlib.sha256(content).digest() if compare else b""
        try:
            with opened(file, io.BytesIO(content)) as image:
                upright_rgb(image)
        except ImageError as error:
            return digest, error.reason
        return digest, None

    workers = workers or os.cpu_count() or 1
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.simplefilter("ignore")  # Pillow's, about damaged metadata, which we do not need
        waiting = iter(range(len(catalog)))
        running = deque(pool.submit(examine, index) for index in islice(waiting, 4 * workers))
        for done in range(len(catalog)):
            result = running.popleft().result()
            running.extend(pool.submit(examine, index) for index in islice(waiting, 1))
            if progress is not None:
                progress(done + 1, len(catalog))
            yield result


def _duplicates(catalog: Catalog, same: dict[bytes, list[int]]) -> tuple[list[tuple[str, str]], int]:
    """Pairs across classes (the first file with each of another class), and the number of copies inside one."""
    pairs: list[tuple[str, str]] = []
    copies = 0
    for indices in same.values():
        labels = catalog.labels[indices]
        copies += len(indices) - len(np.unique(labels))
        pairs += [(catalog.paths[indices[0]], catalog.paths[i]) for i in indices if catalog.labels[i] != labels[0]]
    return pairs, copies


def _part(catalog: Catalog, split: str) -> Catalog:
    return catalog.subset(catalog.splits == split)


def _counts(catalog: Catalog, per_class: int) -> dict[str, Any]:
    sizes = catalog.class_sizes()
    return {
        "images": len(catalog),
        "classes": len(sizes),
        "images_per_class": _spread(sizes),
        "too_small": int((sizes < per_class).sum()),
    }


def _spread(values: np.ndarray[Any, Any]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _image_sizes(catalog: Catalog, sample: int) -> tuple[np.ndarray[Any, Any], int]:
    """(n, 2) widths and heights, upright, and how many of the sample could not be read."""
    chosen = np.unique(np.linspace(0, len(catalog) - 1, min(sample, len(catalog))).round().astype(int))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes = [size for index in chosen.tolist() if (size := _image_size(catalog.file(index))) is not None]
    return np.array(sizes, dtype=np.int64).reshape(-1, 2), len(chosen) - len(sizes)


def _image_size(file: Path) -> tuple[int, int] | None:
    try:
        with opened(file) as image:
            return upright_size(image)
    except ImageError:
        return None
