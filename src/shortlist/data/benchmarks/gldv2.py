"""Google Landmarks version 2, cleaned training list: one line per landmark, with all of its images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.lists import integers, read_csv
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

LIST, HEADER = "train_clean.csv", ("landmark_id", "images")
HINT = "expected train_clean.csv of GLDv2 (train.csv is the uncleaned list)"


def read(root: Path) -> Catalog:
    """Read all images of `train_clean.csv`."""
    file = root / LIST
    landmarks, images = read_csv(file, "gldv2-clean", HEADER, HEADER, HINT)
    ids_per_landmark = [listed.split() for listed in images]
    ids = [image for listed in ids_per_landmark for image in listed]
    if not ids:
        raise DataError(f"gldv2-clean: {file} lists no images; {HINT}.")
    short = next((image for image in ids if len(image) < 3), None)
    if short is not None:
        raise DataError(f"gldv2-clean: {file} lists {short!r}, which is not the name of an image; {HINT}.")
    numbers = integers(file, "gldv2-clean", landmarks, "landmark_id", 2)
    classes = np.repeat(numbers, [len(listed) for listed in ids_per_landmark]).tolist()
    paths = [f"train/{image[0]}/{image[1]}/{image[2]}/{image}.jpg" for image in ids]
    return Catalog.from_classes("gldv2-clean", root, paths, classes, "train")


BENCHMARK = Benchmark(
    name="gldv2-clean",
    about="Google Landmarks version 2, cleaned: 1.6 million photographs of landmarks, for training",
    read=read,
    protocol="training only",
    k=(1, 5, 10),
    download="https://github.com/cvdfoundation/google-landmark (train_clean.csv and images_000.tar to images_499.tar)",
    expects=f"{LIST} and train/",
    tree="""\
train_clean.csv                      landmark_id,images
train/6/e/1/6e158a47eb2ca3f6.jpg     the first three characters of the name are folders""",
    markers=(LIST,),
    counts={"train": ImageCount(1_580_470, 81_313)},
    lookalikes={
        "train.csv": "is the uncleaned list; train_clean.csv is a separate file",
        "train": f"exists, but {LIST} does not: put {LIST} next to it",
    },
)
