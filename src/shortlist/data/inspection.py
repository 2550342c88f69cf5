"""Summarise a catalog, and check its files: missing, unreadable and duplicate images."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.data.benchmarks import BENCHMARKS
from shortlist.data.catalog import ROLES, SPLITS, Catalog
from shortlist.data.images import ImageError, open_image, upright_rgb, upright_size
from shortlist.data.near_duplicates import MIN_SIDE, VisualHash, misleading_pairs, near_duplicates, visual_hash
from shortlist.data.splits import half_validation
from shortlist.locations import as_url, open_binary
from shortlist.progress import Display, Progress, default_display

Unreadable = tuple[str, str]  # path, reason
SAMPLE = 1000


def summary(catalog: Catalog, per_class: int = 4, sample: int = SAMPLE) -> dict[str, Any]:
    """Summarise a catalog as a dict that can be written as JSON.

    Args:
        catalog: Catalog of any size.
        per_class: Number of images per class in a batch; classes with fewer images cannot be used for training.
        sample: Maximum number of images, evenly spaced, whose headers are read for their sizes; 0 reads no image.

    Returns:
        Dict with `name`, `root`, `images`, `classes`, `images_per_class` (min, median, max), `too_small` (number of
        classes with fewer than `per_class` images), `splits` (the same counts per split), `roles` (number of queries
        and gallery images, if the catalog has roles), `per_class`, `width` and `height` (min, median, max), `sampled`
        (number of headers read), `unreadable` (how many of these could not be read), `missing`, `ignored` and
        `remarks`.
    """
    sizes, unreadable = _image_sizes(catalog, sample)
    return {
        "name": catalog.name,
        "root": as_url(catalog.root),
        **_counts(catalog, per_class),
        "splits": {split: _counts(part, per_class) for split, part in _parts(catalog).items()},
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


def describe_splits(catalog: Catalog, per_class: int = 4) -> list[list[str]]:
    """Describe the training, validation and test classes as rows of a table; the first row is the header.

    `shortlist data show` and `shortlist train` print these rows. For the arguments, see `summary`.
    """
    spread, too_small = "images per class: min, median, max", f"classes with fewer than {per_class} images"
    rows = [["", "images", "classes", spread, too_small]]
    for name, part in {**_parts(catalog), "all": catalog}.items():
        counts = _counts(part, per_class)
        sizes = format_spread(counts["images_per_class"])
        rows.append([name, f"{counts['images']:,}", f"{counts['classes']:,}", sizes, f"{counts['too_small']:,}"])
    return rows


def split_as_training(catalog: Catalog) -> Catalog:
    """Return a catalog of the user's own images with the validation classes that the recipe `folder` holds out."""
    own = catalog.name not in BENCHMARKS and "validation" not in catalog.splits
    return half_validation(catalog) if own and len(catalog.subset(catalog.splits == "train").classes()) > 1 else catalog


def class_names(catalog: Catalog) -> dict[str, list[str]]:
    """Return the names of the classes of each split."""
    parts = _parts(catalog).items()
    return {split: [catalog.class_names[label] for label in part.classes()] for split, part in parts}


def format_spread(values: Mapping[str, float] | None) -> str:
    """Format minimum, median and maximum, as in a `summary`."""
    return "-" if values is None else ", ".join(f"{values[each]:g}" for each in ("min", "median", "max"))


@dataclass(frozen=True)
class LookAlikePair:
    """Two images that look the same.

    Args:
        one: Path of an image.
        other: Path of the other image.
        leak: Whether one of them is a training image, and the other is for validation or test.
    """

    one: str
    other: str
    leak: bool


@dataclass(frozen=True)
class CheckReport:
    """Result of `check`.

    Args:
        images: Number of images checked.
        missing: Paths of files that do not exist.
        unreadable: (path, reason) of files that cannot be decoded.
        duplicates: Pairs of paths with equal bytes and different classes: at least one of the labels is wrong.
        copies: Pairs of paths with equal bytes and the same class: the first such file of the class, and a copy of it.
            Harmless, but they count twice.
        look_alikes: Near-duplicates with different bytes that are in different classes, or where exactly one is a
            training image; see `near_duplicates`. They can be legitimate, so they do not affect `ok`.
    """

    images: int
    missing: tuple[str, ...]
    unreadable: tuple[Unreadable, ...]
    duplicates: tuple[tuple[str, str], ...]
    copies: tuple[tuple[str, str], ...]
    look_alikes: tuple[LookAlikePair, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every image of the source can be used for training and has only one label."""
        return not (self.missing or self.unreadable or self.duplicates)


def check(catalog: Catalog, workers: int | None = None, display: Display | None = None) -> CheckReport:
    """Decode every image, compare the bytes of all files, and find images that look the same.

    Args:
        catalog: Catalog opened with `on_missing="skip"`, so that missing files are reported with the other problems.
        workers: Number of threads. None uses one per core.
        display: Display that shows the progress. None uses the default display.
    """
    missing, unreadable = list(catalog.missing), []
    indices_by_digest: dict[bytes, list[int]] = {}
    hashes: dict[int, VisualHash] = {}
    with (display or default_display()).task(f"opening {catalog.name}", "images") as progress:
        decoded = _decode_all(catalog, workers, progress, digests=True, hashes=True)
        for index, (digest, reason, visual) in enumerate(decoded):
            path = str(catalog.paths[index])
            if visual is not None:
                hashes[index] = visual
            if digest is None:
                missing.append(path)
            elif reason is None:
                indices_by_digest.setdefault(digest, []).append(index)
            else:
                unreadable.append((path, reason))
    duplicates, copies = _duplicates(catalog, indices_by_digest)
    alike = tuple(
        LookAlikePair(str(catalog.paths[one]), str(catalog.paths[other]), leak)
        for (one, other), leak in select_look_alikes(catalog, hashes, indices_by_digest.values())
    )
    return CheckReport(len(catalog), tuple(missing), tuple(unreadable), tuple(duplicates), tuple(copies), alike)


def find_look_alikes(catalog: Catalog, progress: Progress | None = None) -> list[tuple[tuple[int, int], bool]]:
    """Decode every image, JPEGs at a reduced size, and find those that look the same; see `select_look_alikes`."""
    decoded = _decode_all(catalog, None, progress, hashes=True, at_least=MIN_SIDE)
    return select_look_alikes(
        catalog, {index: visual for index, (_, _, visual) in enumerate(decoded) if visual is not None}
    )


def select_look_alikes(
    catalog: Catalog, hashes: Mapping[int, VisualHash], copies: Iterable[Sequence[int]] = ()
) -> list[tuple[tuple[int, int], bool]]:
    """Find images that look the same but are in different classes, or where exactly one is a training image.

    Args:
        catalog: The images.
        hashes: Perceptual hashes and thumbnails of images, by row.
        copies: Groups of rows of images with equal bytes. Only the first image of a group in each class and split is
            compared, and pairs of one group in different classes are left out.

    Returns:
        Pairs of rows, and whether exactly one of the two is a training image; those come first.
    """
    group = {row: number for number, rows in enumerate(copies) for row in rows if len(rows) > 1}
    seen, rows = set(), []
    for row in hashes:
        key = group.get(row, -1 - row), int(catalog.labels[row]), str(catalog.splits[row])
        if key not in seen:
            rows.append(row)
        seen.add(key)
    pairs = np.array(rows, dtype=np.int64)[near_duplicates([hashes[row] for row in rows])]
    found, leaks = misleading_pairs(catalog, pairs)
    return [
        ((one, other), leak)
        for (one, other), leak in zip(found.tolist(), leaks.tolist(), strict=True)
        if group.get(one, -1) != group.get(other, -2) or catalog.labels[one] == catalog.labels[other]
    ]


def find_unreadable(catalog: Catalog, workers: int | None = None, progress: Progress | None = None) -> list[Unreadable]:
    """Decode every image, and return the path of each that cannot be decoded, with the reason.

    Args:
        catalog: The images.
        workers: Number of threads. None uses one per core.
        progress: Callback that is called with (done, total).
    """
    decoded = zip(catalog.paths, _decode_all(catalog, workers, progress), strict=True)
    return [(str(path), reason) for path, (_, reason, _) in decoded if reason is not None]


# SHA-256 of the file, None if it does not exist; the problem, if any; perceptual hash and thumbnail
_Decoded = tuple[bytes | None, str | None, VisualHash | None]


def _decode_all(
    catalog: Catalog,
    workers: int | None,
    progress: Progress | None,
    *,
    digests: bool = False,
    hashes: bool = False,
    at_least: int | None = None,
) -> Iterator[_Decoded]:
    """Decode the images in order, JPEGs at a reduced size with at least the given shorter side.

    Threads suffice, because Pillow, hashlib and file reads release the GIL.
    """

    def decode(index: int) -> _Decoded:
        file = catalog.file(index)
        try:
            with open_binary(file) as stream:
                content = stream.read()
        except FileNotFoundError:
            return None, "the file does not exist", None
        except OSError as error:
            return b"", error.strerror or str(error), None
        digest = hashlib.sha256(content).digest() if digests else b""
        try:
            with open_image(file, io.BytesIO(content)) as image:
                if at_least is not None:
                    image.draft(None, (at_least, at_least))
                rgb = upright_rgb(image)
        except ImageError as error:
            return digest, error.reason, None
        return digest, None, visual_hash(rgb) if hashes else None

    workers = workers or os.cpu_count() or 1
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about damaged metadata, which is not used
        waiting = iter(range(len(catalog)))
        running = deque(pool.submit(decode, index) for index in islice(waiting, 4 * workers))
        for done in range(len(catalog)):
            result = running.popleft().result()
            running.extend(pool.submit(decode, index) for index in islice(waiting, 1))
            if progress is not None:
                progress(done + 1, len(catalog))
            yield result


Pairs = list[tuple[str, str]]


def _duplicates(catalog: Catalog, indices_by_digest: dict[bytes, list[int]]) -> tuple[Pairs, Pairs]:
    """Return pairs of equal files in different classes, and pairs of equal files in the same class."""
    pairs: Pairs = []
    copies: Pairs = []
    for indices in indices_by_digest.values():
        firsts: dict[int, int] = {}  # first file of each class
        for index in indices:
            first = firsts.setdefault(int(catalog.labels[index]), index)
            if first != index:
                copies.append((str(catalog.paths[first]), str(catalog.paths[index])))
            if catalog.labels[index] != catalog.labels[indices[0]]:
                pairs.append((str(catalog.paths[indices[0]]), str(catalog.paths[index])))
    return pairs, copies


def _parts(catalog: Catalog) -> dict[str, Catalog]:
    """Return the images of each split that has any."""
    return {split: catalog.subset(catalog.splits == split) for split in SPLITS if split in catalog.splits}


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
    """Return (n, 2) widths and heights of upright images, and the number of sampled images that cannot be read."""
    chosen = np.unique(np.linspace(0, len(catalog) - 1, min(sample, len(catalog))).round().astype(int))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes = [size for index in chosen.tolist() if (size := _image_size(catalog.file(index))) is not None]
    return np.array(sizes, dtype=np.int64).reshape(-1, 2), len(chosen) - len(sizes)


def _image_size(file: Path) -> tuple[int, int] | None:
    try:
        with open_image(file) as image:
            return upright_size(image)
    except ImageError:
        return None
