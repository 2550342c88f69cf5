"""Google Landmarks, version 2, the cleaned training list: a landmark a line, with all of its images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, Count, Progress
from shortlist.data.benchmarks.landmark_csv import read_csv
from shortlist.data.benchmarks.lists import whole_numbers
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

LIST, HEADER = "train_clean.csv", ("landmark_id", "images")
HINT = "expected is train_clean.csv of GLDv2 (train.csv is the list that was not cleaned)"


def read(root: Path, progress: Progress | None = None) -> Catalog:
    """All images of `train_clean.csv`."""
    file = root / LIST
    landmarks, images = read_csv(file, "gldv2-clean", HEADER, HEADER, HINT)
    of_each = [listed.split() for listed in images]
    ids = [image for listed in of_each for image in listed]
    if not ids:
        raise DataError(f"gldv2-clean: {file} lists no images; {HINT}")
    short = next((image for image in ids if len(image) < 3), None)
    if short is not None:
        raise DataError(f"gldv2-clean: {file} holds {short!r}, which is no name of an image; {HINT}")
    numbers, labels = np.unique(whole_numbers(file, "gldv2-clean", landmarks, "landmark_id", 2), return_inverse=True)
    return Catalog(
        name="gldv2-clean",
        root=root,
        paths=np.array([f"train/{image[0]}/{image[1]}/{image[2]}/{image}.jpg" for image in ids], dtype=object),
        labels=np.repeat(labels, [len(listed) for listed in of_each]),
        class_names=tuple(map(str, numbers.tolist())),
        splits=np.full(len(ids), "train"),
    )


BENCHMARK = Benchmark(
    name="gldv2-clean",
    about="Google Landmarks version 2, cleaned: 1.6 million photographs of landmarks, to train on",
    read=read,
    protocol="training only",
    k=(1, 5, 10),
    download="https://github.com/cvdfoundation/google-landmark (train_clean.csv and images_000.tar to images_499.tar)",
    expects=f"{LIST} and train/",
    tree="""\
train_clean.csv                      landmark_id,images
train/6/e/1/6e158a47eb2ca3f6.jpg     the first three letters of its name are folders""",
    marks=(LIST,),
    counts={"train": Count(1_580_470, 81_313)},
    confused={
        "train.csv": "is the list that was not cleaned; train_clean.csv is a file of its own",
        "train": f"is there, but {LIST} is not: it belongs beside it",
    },
)
