"""PKU VehicleID: vehicles in surveillance camera images, with three test sets and two protocols."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.lists import columns, integers, read_lines
from shortlist.data.catalog import Catalog

SIZES = {"small": ImageCount(6_493, 800), "medium": ImageCount(13_377, 1_600), "large": ImageCount(19_777, 2_400)}
TRAIN = ImageCount(113_346, 13_164)
HEADER = "image vehicle"
GALLERY_SEED = 0  # selects one gallery image per vehicle
RE_IDENTIFICATION = "re-identification"


def read(name: str, test: str, protocol: str | None, root: Path) -> Catalog:
    """Read the training list and one of the test lists.

    Args:
        name: Name of the benchmark.
        test: Name of the test list.
        protocol: None for leave-one-out, as in the paper, or "re-identification": one image per vehicle, selected by
            `GALLERY_SEED`, is in the gallery, and the others are queries.
        root: Folder of the benchmark.
    """
    parts = [_listed(root / "train_test_split" / file, name) for file in ("train_list.txt", test)]
    images = [image for listed, _ in parts for image in listed]
    vehicles = [vehicle for _, numbers in parts for vehicle in numbers.tolist()]
    splits = np.repeat(["train", "test"], [len(listed) for listed, _ in parts])
    roles = _roles(images, vehicles, splits) if protocol else None
    paths = [f"image/{image}.jpg" for image in images]
    return Catalog.from_classes(name, root, paths, vehicles, splits, roles=roles, protocol=protocol)


def _listed(file: Path, name: str) -> tuple[Sequence[str], NDArray[np.int64]]:
    """Return the names of the images, 7 digits each, and (n,) the number of the vehicle in each."""
    images, vehicles = columns(file, name, read_lines(file, name), HEADER)
    integers(file, name, images, "image")
    return images, integers(file, name, vehicles, "vehicle")


def _roles(images: Sequence[str], vehicles: Sequence[int], splits: NDArray[np.str_]) -> NDArray[np.str_]:
    """Return the role of each image: the image of a test vehicle with the smallest hash is its gallery image."""
    roles = np.where(splits == "test", "query", "").astype("<U7")
    smallest: dict[int, tuple[str, int]] = {}  # vehicle -> hash, row
    for row in np.flatnonzero(splits == "test").tolist():
        candidate = (hashlib.sha256(f"{GALLERY_SEED}/{images[row]}".encode()).hexdigest(), row)
        smallest[vehicles[row]] = min(smallest.get(vehicles[row], candidate), candidate)
    roles[[row for _, row in smallest.values()]] = "gallery"
    return roles


def _benchmark(size: str, protocol: str | None) -> Benchmark:
    tested, name = SIZES[size], f"vehicleid-{size}" + ("-reid" if protocol else "")
    test = f"test_list_{tested.classes}.txt"
    return Benchmark(
        name=name,
        about=f"PKU VehicleID: vehicles in surveillance camera images, {size} test set of {tested.classes:,}",
        read=partial(read, name, test, protocol),
        protocol=f"{protocol}: one gallery image per vehicle, selected by seed {GALLERY_SEED}; the others are queries"
        if protocol
        else "leave-one-out",
        k=(1, 5),
        download="https://pkuml.org/resources/pku-vehicleid.html (on request)",
        expects="image/ and train_test_split/ with train_list.txt and the test lists",
        tree=f"""\
image/0279029.jpg, ...
train_test_split/train_list.txt
train_test_split/{test}""",
        markers=("train_test_split",),
        counts={"train": TRAIN, "test": tested},
        note="The lists were corrected after their first publication, so counts in papers may differ. Results of "
        "leave-one-out (used in the paper) and re-identification are not comparable.",
        lookalikes={"image": "exists, but the lists do not: put train_test_split/ next to it"},
    )


BENCHMARKS = tuple(_benchmark(size, protocol) for protocol in (None, RE_IDENTIFICATION) for size in SIZES)
