"""PKU VehicleID: cars as surveillance cameras see them, in three test sets, each with two protocols."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.data.benchmarks.benchmark import Benchmark, Count, Progress
from shortlist.data.benchmarks.lists import columns, read_lines, whole_numbers
from shortlist.data.catalog import Catalog

SIZES = {"small": Count(6_493, 800), "medium": Count(13_377, 1_600), "large": Count(19_777, 2_400)}
TRAIN = Count(113_346, 13_164)
HEADER = "image vehicle"
GALLERY_SEED = 0  # of the draw of one gallery image a vehicle
RE_IDENTIFICATION = "re-identification"


def reader(size: str, protocol: str | None = None) -> Callable[[Path, Progress | None], Catalog]:
    """How to read the training list and one of the test lists.

    Args:
        size: small, medium or large.
        protocol: None for leave-one-out, as the paper, or "re-identification": one image a vehicle, drawn by
            `GALLERY_SEED`, is the gallery, and the others are queries.
    """
    name = f"vehicleid-{size}" + ("-reid" if protocol else "")
    test = f"test_list_{SIZES[size].classes}.txt"

    def read(root: Path, progress: Progress | None = None) -> Catalog:
        parts = [_listed(root / "train_test_split" / file, name) for file in ("train_list.txt", test)]
        images = [image for listed, _ in parts for image in listed]
        vehicles, labels = np.unique(np.concatenate([numbers for _, numbers in parts]), return_inverse=True)
        splits = np.repeat(["train", "test"], [len(listed) for listed, _ in parts])
        roles = _roles(images, labels, splits) if protocol else None
        return Catalog(
            name=name,
            root=root,
            paths=np.array([f"image/{image}.jpg" for image in images], dtype=object),
            labels=labels,
            class_names=tuple(map(str, vehicles.tolist())),
            splits=splits,
            roles=roles,
            protocol=protocol,
        )

    return read


def _listed(file: Path, name: str) -> tuple[Sequence[str], NDArray[np.int64]]:
    """Images, 7 digits each, and the number of the vehicle on each."""
    images, vehicles = columns(file, name, read_lines(file, name), HEADER)
    whole_numbers(file, name, images, "image")
    return images, whole_numbers(file, name, vehicles, "vehicle")


def _roles(images: Sequence[str], labels: NDArray[np.int64], splits: NDArray[np.str_]) -> NDArray[np.str_]:
    """One image of each tested vehicle is the gallery: the one with the smallest hash, whatever the list's order."""
    roles = np.where(splits == "test", "query", "").astype("<U7")
    first: dict[int, tuple[str, int]] = {}
    for row in np.flatnonzero(splits == "test").tolist():
        draw = (hashlib.sha256(f"{GALLERY_SEED}/{images[row]}".encode()).hexdigest(), row)
        label = int(labels[row])
        first[label] = min(first.get(label, draw), draw)
    roles[[row for _, row in first.values()]] = "gallery"
    return roles


def _benchmark(size: str, protocol: str | None) -> Benchmark:
    tested = SIZES[size]
    return Benchmark(
        name=f"vehicleid-{size}" + ("-reid" if protocol else ""),
        about=f"PKU VehicleID: vehicles on surveillance cameras, {size} test set of {tested.classes:,}",
        read=reader(size, protocol),
        protocol=f"{protocol}: one gallery image a vehicle, drawn by seed {GALLERY_SEED}; the others are queries"
        if protocol
        else "leave-one-out",
        k=(1, 5),
        download="https://pkuml.org/resources/pku-vehicleid.html (on request)",
        expects="image/ and train_test_split/ with train_list.txt and the test lists",
        tree=f"""\
image/0279029.jpg, ...
train_test_split/train_list.txt
train_test_split/test_list_{tested.classes}.txt""",
        marks=("train_test_split",),
        counts={"train": TRAIN, "test": tested},
        note="The lists were corrected after their first publication: the counts that papers give may differ. Results "
        "of leave-one-out (the paper's) and of re-identification cannot be compared.",
        confused={"image": "is there, but the lists are not: train_test_split/ belongs beside it"},
    )


BENCHMARKS = tuple(_benchmark(size, protocol) for protocol in (None, RE_IDENTIFICATION) for size in SIZES)
