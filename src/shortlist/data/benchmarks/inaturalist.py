"""iNaturalist 2018 with the split of Smooth-AP: 5,690 species for training and 2,452 for testing."""

from __future__ import annotations

import re
from pathlib import Path

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.lists import read_lines
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

IMAGES = "train_val2018"
LISTS = {"Inaturalist_train_set1.txt": "train", "Inaturalist_test_set1.txt": "test"}
FOLDER = "Inat_dataset_splits"
EXAMPLE = f"{IMAGES}/Plantae/7477/0123abcd.jpg"


def read(root: Path) -> Catalog:
    """Read all images of both lists, which are in `Inat_dataset_splits` or in the root itself.

    The class of an image is its folder together with the parent folder, such as Plantae/7477.
    """
    paths: list[str] = []
    names: list[str] = []  # class of each image
    splits: list[str] = []
    folder = root / FOLDER if (root / FOLDER).is_dir() else root
    for name, split in LISTS.items():
        listed = _paths(folder / name)
        paths += listed
        names += [path[len(IMAGES) + 1 : path.rindex("/")] for path in listed]
        splits += [split] * len(listed)
    return Catalog.from_classes("inaturalist", root, paths, names, splits)


def _paths(file: Path) -> list[str]:
    lines = read_lines(file, "inaturalist")
    for number, line in enumerate(lines, start=1):
        if not line.startswith(f"{IMAGES}/") or line.count("/") != 3:
            raise DataError(f"inaturalist: {file}, line {number}: {_problem(line)}; expected a path such as {EXAMPLE}.")
    return lines


def _problem(line: str) -> str:
    if year := re.match(r"(?:train_val|train|val|test)_?(20\d\d)\b|(20\d\d)_(?:train|valid)", line):
        found = year[1] or year[2]
        if found != "2018":
            return f"{line!r} belongs to iNaturalist {found}, but the benchmark uses 2018"
    if line.startswith(("train/", "val/", "train_mini/")):
        return f"{line!r} looks like iNaturalist 2021, but the benchmark uses 2018"
    return f"{line!r} is not the path of an image of iNaturalist 2018"


_CLASSIFICATION = "is the classification split; the retrieval split is Inat_dataset_splits of Smooth-AP"

BENCHMARK = Benchmark(
    name="inaturalist",
    about="iNaturalist 2018 with the split of Smooth-AP: photographs of plants and animals, one class per species",
    read=read,
    protocol="leave-one-out",
    k=(1, 4, 16, 32),
    download="images (train_val2018.tar.gz): https://github.com/visipedia/inat_comp/tree/master/2018\n"
    "lists (Inat_dataset_splits): https://github.com/Andrew-Brown1/Smooth_AP",
    expects=f"{IMAGES}/ and {FOLDER}/ with {' and '.join(LISTS)}",
    tree="""\
Inat_dataset_splits/Inaturalist_train_set1.txt
Inat_dataset_splits/Inaturalist_test_set1.txt
train_val2018/Plantae/7477/*.jpg
train_val2018/...""",
    markers=(f"{FOLDER}/{next(iter(LISTS))}", f"{FOLDER}/Inaturalist_test_set1.txt", *LISTS),
    counts={"train": ImageCount(325_846, 5_690), "test": ImageCount(136_093, 2_452)},
    lookalikes={
        "train2018.json": _CLASSIFICATION,
        "val2018.json": _CLASSIFICATION,
        "train_val2017": "belongs to 2017, but the benchmark uses 2018",
        "train_val2019": "belongs to 2019, but the benchmark uses 2018",
        "train2019.json": "belongs to 2019, but the benchmark uses 2018",
        "train.json": "belongs to 2021, but the benchmark uses 2018",
        "train_mini.json": "belongs to 2021, but the benchmark uses 2018",
        "2021_train": "belongs to 2021, but the benchmark uses 2018",
        IMAGES: f"exists, but the lists do not: put {FOLDER} next to it",
    },
)
