"""Google Landmarks, version 1: a million photographs to train on, of which many addresses no longer answer."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, Count, Progress
from shortlist.data.benchmarks.landmark_csv import read_csv
from shortlist.data.benchmarks.lists import whole_numbers
from shortlist.data.benchmarks.places import first_with
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

LIST, HEADER = "train.csv", ("id", "url", "landmark_id")
FOLDERS = ("train", "images", "jpg", "")  # where people put the images
NO_LIST = f"is there, but {LIST} is not: it belongs beside it"
HINT = "expected is train.csv of Google Landmarks 2018"


def read(root: Path, progress: Progress | None = None) -> Catalog:
    """All images of `train.csv` that have a landmark."""
    file = root / LIST
    ids, landmarks = read_csv(file, "gldv1", HEADER, ("id", "landmark_id"), HINT)
    kept = np.array([landmark != "None" for landmark in landmarks])  # photographs that were not withdrawn
    numbered = [landmark if there else "0" for landmark, there in zip(landmarks, kept, strict=True)]
    of_each = whole_numbers(file, "gldv1", numbered, "landmark_id", 2)
    if not kept.any():
        raise DataError(f"gldv1: no image of {file} has a landmark; {HINT}")
    remarks: tuple[str, ...] = ()
    if without := int((~kept).sum()):
        ids = tuple(itertools.compress(ids, kept))
        remarks = (f"images of {LIST} without a landmark, left out: {without:,}",)
    numbers, labels = np.unique(of_each[kept], return_inverse=True)
    folder = _folder(root, ids)
    return Catalog(
        name="gldv1",
        root=root,
        paths=np.array([f"{folder}{image}.jpg" for image in ids], dtype=object),
        labels=labels,
        class_names=tuple(map(str, numbers.tolist())),
        splits=np.full(len(ids), "train"),
        remarks=remarks,
    )


def _folder(root: Path, ids: tuple[str, ...]) -> str:
    """What stands before the name of each image: "train/", say, or nothing."""
    folder = first_with(root, FOLDERS, (f"{image}.jpg" for image in ids), tried=1000)
    if folder is not None:
        return f"{folder}/" if folder else ""
    if any((root / "train" / image[0] / image[1]).is_dir() for image in ids[:100] if len(image) > 2):
        raise DataError(
            f"gldv1: the images in {root / 'train'} lie in folders of one letter: that is GLDv2, to be opened as "
            "gldv2-clean"
        )
    return "train/" if (root / "train").is_dir() else ""


BENCHMARK = Benchmark(
    name="gldv1",
    about="Google Landmarks version 1 (2018): a million photographs of landmarks, to train on",
    read=read,
    protocol="training only",
    k=(1, 5, 10),
    download="https://www.kaggle.com/google/google-landmarks-dataset (train.csv; the images by its addresses)",
    expects=f"{LIST} and train/ with the images",
    tree="""\
train.csv                      id,url,landmark_id
train/97c0a12e07ae8dd5.jpg     or images/, or jpg/, or beside train.csv""",
    marks=(LIST,),
    counts={"train": Count(1_060_709, 12_894)},
    note="The whole list has 1,225,029 images of 14,951 landmarks; the counts above are the paper's. Many addresses no "
    "longer answer: data.on_missing=skip goes on with the images that you have, and says how many are missing.",
    confused={"train_clean.csv": "belongs to GLDv2: open it as gldv2-clean", "train": NO_LIST},
)
