"""CUB-200-2011: 200 bird species. Classes 1 to 100 train and 101 to 200 test; train_test_split.txt is not used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.lists import columns, integers, read_lines
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

CLASSES, TRAINING_CLASSES = 200, 100
IMAGES, LABELS = "images.txt", "image_class_labels.txt"


def read(root: Path) -> Catalog:
    """Read all images of `images.txt`, with the classes of `image_class_labels.txt`."""
    image_ids, paths = columns(root / IMAGES, "cub", read_lines(root / IMAGES, "cub"), "image_id path")
    file = root / LABELS
    labelled, classes = columns(file, "cub", read_lines(file, "cub"), "image_id class_id")
    number_of = dict(zip(labelled, integers(file, "cub", classes, "class_id").tolist(), strict=True))
    if unlabelled := [image for image in image_ids if image not in number_of]:
        raise DataError(
            f"cub: {file} has no class for {len(unlabelled)} images of {IMAGES}, such as number {unlabelled[0]}."
        )
    numbers = np.array([number_of[image] for image in image_ids])
    if numbers.min() < 1 or numbers.max() > CLASSES:
        raise DataError(f"cub: the classes of {file} must be numbers from 1 to {CLASSES}.")
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
    about="CUB-200-2011: 200 bird species, the first 100 for training and the others for testing",
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
    markers=(IMAGES, LABELS),
    counts={"train": ImageCount(5_864, 100), "test": ImageCount(5_924, 100)},
    note="train_test_split.txt is the classification split and is not read.",
    lookalikes={
        "train_test_split.txt": "is the classification split and is not needed; images.txt and "
        "image_class_labels.txt are",
        "001.Black_footed_Albatross": "belongs in images/: set `root` to the folder that contains images/",
        "images": f"exists, but {IMAGES} and {LABELS} do not: put both next to it",
    },
)
