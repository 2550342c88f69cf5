"""In-shop Clothes Retrieval (DeepFashion), whose test split has disjoint queries and gallery images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.folder_hints import first_folder_with
from shortlist.data.benchmarks.lists import columns, read_lines
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError, did_you_mean

LIST = "list_eval_partition.txt"
HEADER = "image_name item_id evaluation_status"
STATUSES = ("train", "query", "gallery")
OTHER_HEADERS = {
    "image_pair_name_1 image_pair_name_2 item_id evaluation_status": "Consumer-to-shop",
    "image_name evaluation_status": "Category and Attribute Prediction",
}


def read(root: Path) -> Catalog:
    """Read all images of the list. The list is in the root or in `Eval`, and the images in the root or in `Img`."""
    file = root / LIST if (root / LIST).is_file() else root / "Eval" / LIST
    names, items, statuses = columns(file, "inshop", _rows(file), HEADER, first_line=3)
    for line, value in enumerate(statuses, start=3):
        if value not in STATUSES:
            raise DataError(
                f"inshop: {file}, line {line}: unknown evaluation_status {value!r}; {did_you_mean(value, STATUSES)}"
            )
    training, folder = np.array(statuses) == "train", first_folder_with(root, ("", "Img"), names)
    paths = [f"{folder}/{name}" if folder else name for name in names]
    splits, roles = np.where(training, "train", "test"), np.where(training, "", statuses)
    return Catalog.from_classes("inshop", root, paths, items, splits, roles=roles)


def _rows(file: Path) -> list[str]:
    """Check the count and the header, and return the lines after them."""
    number, *lines = read_lines(file, "inshop")
    header = " ".join(lines[0].split()) if lines else ""
    if other := OTHER_HEADERS.get(header):
        raise DataError(
            f"inshop: {file} belongs to the DeepFashion benchmark {other}; the list of In-shop Clothes Retrieval has "
            f"the columns {HEADER}."
        )
    if not number.isdecimal() or header != HEADER:
        raise DataError(
            f"inshop: {file} must start with the number of images and the line {HEADER!r}, not with {number!r} and "
            f"{header!r}."
        )
    rows = lines[1:]
    if len(rows) != int(number):
        raise DataError(f"inshop: {file} should list {number} images but lists {len(rows)}; download it again.")
    return rows


BENCHMARK = Benchmark(
    name="inshop",
    about="In-shop Clothes Retrieval of DeepFashion: 7,982 clothing items in several views",
    read=read,
    protocol="query/gallery",
    k=(1, 10, 20, 30),
    download="https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html (img.zip and Eval/)",
    expects=f"{LIST} (or Eval/{LIST}) and img/",
    tree="""\
list_eval_partition.txt            or Eval/list_eval_partition.txt
img/WOMEN/.../id_00000001/*.jpg    or Img/img/...
img/MEN/...""",
    markers=(LIST, f"Eval/{LIST}"),
    counts={
        "train": ImageCount(25_882, 3_997),
        "query": ImageCount(14_218, 3_985),
        "gallery": ImageCount(12_612, 3_985),
    },
    lookalikes={
        "img": f"exists, but {LIST} does not: it is in Eval/ of the download",
        "Img": f"exists, but {LIST} does not: it is in Eval/ of the download",
    },
)
