"""Stanford Online Products: photographs of products, one class per product, with a training and a test list."""

from __future__ import annotations

from pathlib import Path

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.lists import columns, integers, read_lines
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

HEADER = "image_id class_id super_class_id path"
LISTS = {"Ebay_train.txt": "train", "Ebay_test.txt": "test"}


def read(root: Path) -> Catalog:
    """Read all images of both lists."""
    paths: list[str] = []
    numbers: list[int] = []  # class of each image
    splits: list[str] = []
    for name, split in LISTS.items():
        file = root / name
        lines = read_lines(file, "sop")
        if lines[0].split() != HEADER.split():
            raise DataError(f"sop: {file} must start with the line {HEADER!r}, not with {lines[0]!r}.")
        _, classes, _, listed = columns(file, "sop", lines[1:], HEADER, first_line=2)
        paths += listed
        numbers += integers(file, "sop", classes, "class_id", first_line=2).tolist()
        splits += [split] * len(listed)
    return Catalog.from_classes("sop", root, paths, numbers, splits)


BENCHMARK = Benchmark(
    name="sop",
    about="Stanford Online Products: 22,634 products with a few photographs each",
    read=read,
    protocol="leave-one-out",
    k=(1, 10, 100, 1000),
    download="https://cvgl.stanford.edu/projects/lifted_struct/ (Stanford_Online_Products.zip)",
    expects="Ebay_train.txt, Ebay_test.txt and the folders bicycle_final/, cabinet_final/, ...",
    tree="""\
Ebay_train.txt
Ebay_test.txt
bicycle_final/111085122871_0.JPG, ...
cabinet_final/...
... (12 such folders)""",
    markers=tuple(LISTS),
    counts={"train": ImageCount(59_551, 11_318), "test": ImageCount(60_502, 11_316)},
    lookalikes={"Ebay_info.txt": "is the list of all images, without splits"},
)
