"""CUB-200-2011: 200 species of birds. Classes 1..100 train, 101..200 test, whatever train_test_split.txt says."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, Count, Progress
from shortlist.data.benchmarks.lists import columns, read_lines, whole_numbers
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

CLASSES, TRAINING_CLASSES = 200, 100
IMAGES, LABELS = "images.txt", "image_class_labels.txt"


def read(root: Path, progress: Progress | None = None) -> Catalog:
    """All images of `images.txt`, with the classes of `image_class_labels.txt`."""
    image_ids, paths = columns(root / IMAGES, "cub", read_lines(root / IMAGES, "cub"), "image_id path")
    file = root / LABELS
    labelled, classes = columns(file, "cub", read_lines(file, "cub"), "image_id class_id")
    number_of = dict(zip(labelled, whole_numbers(file, "cub", classes, "class_id").tolist(), strict=True))
    if lacking := [image for image in image_ids if image not in number_of]:
        raise DataError(f"cub: {file} has no class for {len(lacking)} images of {IMAGES}, such as number {lacking[0]}")
    numbers = np.array([number_of[image] for image in image_ids])
    if numbers.min() < 1 or numbers.max() > CLASSES:
        raise DataError(f"cub: the classes of {file} must be numbers from 1 to {CLASSES}")
    name_of = dict(zip(numbers.tolist(), (path.rpartition("/")[0] for path in paths), strict=True))
    return Catalog(
        name="cub",
        root=root,
        paths=np.array([f"images/{path}" for path in paths], dtype=object),
        labels=numbers - 1,
        class_names=tuple(name_of.get(number) or f"class {number:03}" for number in range(1, int(numbers.max()) + 1)),
        splits=np.where(numbers <= TRAINING_CLASSES, "train", "test"),
    )


BENCHMARK = Benchmark(
    name="cub",
    about="CUB-200-2011: 200 species of birds, the first 100 train and the other 100 test",
    read=read,
    protocol="leave-one-out",
    k=(1, 2, 4, 8),
    download="https://www.vision.caltech.edu/datasets/cub_200_2011/ (CUB_200_2011.tgz)",
    expects=f"{IMAGES}, {LABELS} and images/",
    tree="""\
images.txt
image_class_labels.txt
images/001.Black_footed_Albatross/*.jpg
images/...""",
    marks=(IMAGES, LABELS),
    counts={"train": Count(5_864, 100), "test": Count(5_924, 100)},
    note="train_test_split.txt is for classification and is not read.",
    confused={
        "train_test_split.txt": "is the split for classification and is not needed: images.txt and "
        "image_class_labels.txt are",
        "001.Black_footed_Albatross": "is inside of images/: the folder above is the one to give",
        "images": f"is there, but {IMAGES} and {LABELS} are not: they belong beside it",
    },
)
