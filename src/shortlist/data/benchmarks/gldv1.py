"""Google Landmarks version 1: a million training photographs, many of which are no longer online."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.folder_hints import first_folder_with
from shortlist.data.benchmarks.lists import integers, read_csv
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

LIST, HEADER = "train.csv", ("id", "url", "landmark_id")
FOLDERS = ("train", "images", "jpg", "")  # folders that the images are commonly in
NO_LIST = f"exists, but {LIST} does not: put {LIST} next to it"
HINT = "expected train.csv of Google Landmarks 2018"


def read(root: Path) -> Catalog:
    """Read all images of `train.csv` that have a landmark."""
    file = root / LIST
    ids, landmarks = read_csv(file, "gldv1", HEADER, ("id", "landmark_id"), HINT)
    kept = np.array([landmark != "None" for landmark in landmarks])  # withdrawn photographs have none
    numbered = [landmark if keep else "0" for landmark, keep in zip(landmarks, kept, strict=True)]
    landmark_ids = integers(file, "gldv1", numbered, "landmark_id", 2)
    if not kept.any():
        raise DataError(f"gldv1: no image of {file} has a landmark; {HINT}.")
    remarks: tuple[str, ...] = ()
    if without := int((~kept).sum()):
        ids = tuple(itertools.compress(ids, kept))
        remarks = (f"images of {LIST} without a landmark, which were left out: {without:,}",)
    folder = _image_prefix(root, ids)
    paths = [f"{folder}{image}.jpg" for image in ids]
    return Catalog.from_classes("gldv1", root, paths, landmark_ids[kept].tolist(), "train", remarks=remarks)


def _image_prefix(root: Path, ids: tuple[str, ...]) -> str:
    """Return the path prefix of all images, such as "train/", or ""."""
    folder = first_folder_with(root, FOLDERS, (f"{image}.jpg" for image in ids), tried=1000)
    if folder is not None:
        return f"{folder}/" if folder else ""
    if any((root / "train" / image[0] / image[1]).is_dir() for image in ids[:100] if len(image) > 2):
        raise DataError(
            f"gldv1: the images in {root / 'train'} are in folders named by one character, as in GLDv2: open "
            "it as gldv2-clean."
        )
    return "train/" if (root / "train").is_dir() else ""


BENCHMARK = Benchmark(
    name="gldv1",
    about="Google Landmarks version 1 (2018): a million photographs of landmarks, for training",
    read=read,
    protocol="training only",
    k=(1, 5, 10),
    download="https://www.kaggle.com/google/google-landmarks-dataset (train.csv; download the images from its URLs)",
    expects=f"{LIST} and train/ with the images",
    tree="""\
train.csv                      id,url,landmark_id
train/97c0a12e07ae8dd5.jpg     or in images/, in jpg/, or next to train.csv""",
    markers=(LIST,),
    counts={"train": ImageCount(1_060_709, 12_894)},
    note="The whole list has 1,225,029 images of 14,951 landmarks; the counts above are those of the paper. Many "
    "images are no longer online: data.on_missing=skip uses the images that you have and reports how many are missing.",
    lookalikes={"train_clean.csv": "belongs to GLDv2: open it as gldv2-clean", "train": NO_LIST},
)
