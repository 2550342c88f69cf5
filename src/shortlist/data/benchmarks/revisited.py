"""Revisited Oxford and Paris: 70 queries each, cropped to a box, with easy, hard and junk images; and R1M."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.data.benchmarks.benchmark import Benchmark, Count, Progress
from shortlist.data.benchmarks.judged import UNLABELLED, indices, names, queries
from shortlist.data.benchmarks.lists import read_lines
from shortlist.data.catalog import Catalog, Judgement, Judgements
from shortlist.data.unpickling import read_plain_pickle
from shortlist.errors import DataError

SETUPS = {  # setup: what counts as right, and what is taken out of the ranking
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
R1M_LIST = "revisitop1m.txt"
LARGEST = 2**31  # pixels, beyond any image


def reader(name: str) -> Callable[[Path, Progress | None], Catalog]:
    """How to read `roxford5k` or `rparis6k`: the queries, then the database."""

    def read(root: Path, progress: Progress | None = None) -> Catalog:
        file = root / f"gnd_{name}.pkl"
        content = read_plain_pickle(file)
        database, asked = names(file, content, "imlist"), names(file, content, "qimlist")
        ground_truth = queries(file, content, len(asked))
        boxes = np.full((len(asked) + len(database), 4), np.nan)
        boxes[: len(asked)] = [_box(file, each) for each in ground_truth]
        return Catalog(
            name=name,
            root=root,
            paths=np.array([f"jpg/{image}.jpg" for image in asked + database], dtype=object),
            labels=np.zeros(len(boxes), dtype=np.int64),
            class_names=UNLABELLED,
            splits=np.full(len(boxes), "test"),
            roles=np.repeat(["query", "gallery"], [len(asked), len(database)]),
            boxes=boxes,
            judgements=_judgements(file, ground_truth, len(asked), len(database)),
        )

    return read


def _box(file: Path, judged: Mapping[str, Any]) -> list[float]:
    """Left, top, right, bottom."""
    box = judged.get("bbx")
    if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(type(side) in (int, float) for side in box):
        raise DataError(f"{file}: the bbx of a query must be four numbers, not {box!r:.100}")
    if not all(abs(side) < math.inf for side in box) or box[0] >= box[2] or box[1] >= box[3] or max(box) > LARGEST:
        raise DataError(f"{file}: the bbx {box!r:.200} of a query is no box: left, top, right, bottom")
    return list(box)


def _judgements(file: Path, ground_truth: list[Mapping[str, Any]], first: int, images: int) -> Judgements:
    """By setup; the database begins at the row `first`."""
    parts = [
        {key: indices(file, each, key, images) + first for key in ("easy", "hard", "junk")} for each in ground_truth
    ]
    for number, part in enumerate(parts):
        judged = np.concatenate(list(part.values()))
        if len(np.unique(judged)) < len(judged):
            raise DataError(f"{file}: an image of query {number} is in two of easy, hard and junk, or twice in one")

    def together(part: Mapping[str, NDArray[np.int64]], keys: tuple[str, ...]) -> NDArray[np.int64]:
        return np.concatenate([part[key] for key in keys])

    return {
        setup: tuple(Judgement(together(part, right), together(part, junk)) for part in parts)
        for setup, (right, junk) in SETUPS.items()
    }


def read_r1m(root: Path, progress: Progress | None = None) -> Catalog:
    """A million images that answer no query."""
    file = root / R1M_LIST
    lines = read_lines(file, "r1m")
    inside = "" if lines[0].startswith("jpg/") else "jpg/"
    paths = np.array([inside + line for line in lines], dtype=object)
    if "" in lines or "." not in lines[0].rpartition("/")[2]:
        raise DataError(f"r1m: {file} must list a path with its ending a line, such as 0/a1b2.jpg, not {lines[0]!r}")
    return Catalog(
        name="r1m",
        root=root,
        paths=paths,
        labels=np.zeros(len(paths), dtype=np.int64),
        class_names=UNLABELLED,
        splits=np.full(len(paths), "test"),
        roles=np.full(len(paths), "gallery"),
    )


def _benchmark(name: str, city: str, images: int, download: str) -> Benchmark:
    return Benchmark(
        name=name,
        about=f"Revisited {city}: 70 queries, each a box in a photograph, against {images:,} photographs",
        read=reader(name),
        protocol="revisited: easy, medium and hard, by mAP and mP@k, with and without the distractors of r1m",
        k=(1, 5, 10),
        download=f"ground truth: http://cmp.felk.cvut.cz/revisitop/ (gnd_{name}.pkl)\nimages: {download}",
        expects=f"gnd_{name}.pkl and jpg/",
        tree=f"gnd_{name}.pkl\njpg/*.jpg     all images in this one folder, the queries' too",
        marks=(f"gnd_{name}.pkl",),
        counts={"query": Count(70), "gallery": Count(images)},
        judged=True,
        confused={"jpg": f"is there, but gnd_{name}.pkl is not: it belongs beside it"},
    )


BENCHMARKS = (
    _benchmark("roxford5k", "Oxford", 4_993, "https://www.robots.ox.ac.uk/~vgg/data/oxbuildings/ (oxbuild_images)"),
    _benchmark("rparis6k", "Paris", 6_322, "https://www.robots.ox.ac.uk/~vgg/data/parisbuildings/ (paris_1, paris_2)"),
    Benchmark(
        name="r1m",
        about="R1M: a million distractors for Revisited Oxford and Paris",
        read=read_r1m,
        protocol="distractors only: give the folder to a test as its distractors",
        k=(),
        download="http://ptak.felk.cvut.cz/revisitop/revisitop1m/ (revisitop1m.txt and 100 files revisitop1m.N.tar.gz)",
        expects=f"{R1M_LIST} and jpg/",
        tree="revisitop1m.txt     a path a line, from jpg/ on\njpg/...",
        marks=(R1M_LIST,),
        counts={"gallery": Count(1_001_001)},
        note="Some of its files are truncated JPEGs.",
        confused={"jpg": f"is there, but {R1M_LIST} is not: it belongs beside it"},
    ),
)
