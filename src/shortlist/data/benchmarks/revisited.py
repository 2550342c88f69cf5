"""Revisited Oxford and Paris: 70 queries each, cropped to a box, with easy, hard and junk images; and R1M."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.ground_truth import NO_CLASS, image_indices, image_names, query_judgements
from shortlist.data.benchmarks.lists import read_lines
from shortlist.data.catalog import Catalog, Judgement, Judgements
from shortlist.data.unpickling import read_plain_pickle
from shortlist.errors import DataError

SETUPS = {  # setup: entries that are positives, and entries that are junk
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
R1M_LIST = "revisitop1m.txt"
MAX_COORDINATE = 2**31  # larger than any image


def read(name: str, root: Path) -> Catalog:
    """Read `roxford5k` or `rparis6k`: the queries, followed by the database."""
    file = root / f"gnd_{name}.pkl"
    content = read_plain_pickle(file)
    database, queries = image_names(file, content, "imlist"), image_names(file, content, "qimlist")
    ground_truth = query_judgements(file, content, len(queries))
    boxes = np.full((len(queries) + len(database), 4), np.nan)
    boxes[: len(queries)] = [_box(file, each) for each in ground_truth]
    return Catalog.from_classes(
        name,
        root,
        [f"jpg/{image}.jpg" for image in queries + database],
        [NO_CLASS] * len(boxes),
        "test",
        roles=np.repeat(["query", "gallery"], [len(queries), len(database)]),
        boxes=boxes,
        judgements=_judgements(file, ground_truth, len(queries), len(database)),
    )


def _box(file: Path, judged: Mapping[str, Any]) -> list[float]:
    """Return left, top, right and bottom of a query's box."""
    box = judged.get("bbx")
    if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(type(side) in (int, float) for side in box):
        raise DataError(f"{file}: the bbx of a query must be four numbers, not {box!r:.100}.")
    left, top, right, bottom = box
    if not all(abs(side) < math.inf for side in box) or left >= right or top >= bottom or max(box) > MAX_COORDINATE:
        raise DataError(f"{file}: the bbx {box!r:.200} of a query is not a valid box (left, top, right, bottom).")
    return list(box)


def _judgements(file: Path, ground_truth: list[Mapping[str, Any]], first: int, images: int) -> Judgements:
    """Return the judgements per setup; `first` is the row of the first database image."""
    parts = [
        {key: image_indices(file, each, key, images) + first for key in ("easy", "hard", "junk")}
        for each in ground_truth
    ]
    for number, part in enumerate(parts):
        judged = np.concatenate(list(part.values()))
        if len(np.unique(judged)) < len(judged):
            raise DataError(f"{file}: query {number} lists an image twice in easy, hard and junk.")

    def merge(part: Mapping[str, NDArray[np.int64]], keys: tuple[str, ...]) -> NDArray[np.int64]:
        return np.concatenate([part[key] for key in keys])

    return {
        setup: tuple(Judgement(merge(part, positives), merge(part, junk)) for part in parts)
        for setup, (positives, junk) in SETUPS.items()
    }


def read_r1m(root: Path) -> Catalog:
    """Read R1M: a million distractors, none of which is a positive of any query."""
    file = root / R1M_LIST
    lines = read_lines(file, "r1m")
    prefix = "" if lines[0].startswith("jpg/") else "jpg/"
    if "" in lines or "." not in lines[0].rpartition("/")[2]:
        raise DataError(
            f"r1m: {file} must list one path with its extension per line, such as 0/a1b2.jpg, not {lines[0]!r}."
        )
    paths, roles = [prefix + line for line in lines], np.full(len(lines), "gallery")
    return Catalog.from_classes("r1m", root, paths, [NO_CLASS] * len(lines), "test", roles=roles)


def _benchmark(name: str, city: str, images: int, download: str) -> Benchmark:
    return Benchmark(
        name=name,
        about=f"Revisited {city}: 70 queries, each a box in a photograph, and {images:,} database photographs",
        read=partial(read, name),
        protocol="revisited: mAP and mP@k for easy, medium and hard, with and without the distractors of r1m",
        k=(1, 5, 10),
        download=f"ground truth: http://cmp.felk.cvut.cz/revisitop/ (gnd_{name}.pkl)\nimages: {download}",
        expects=f"gnd_{name}.pkl and jpg/",
        tree=f"gnd_{name}.pkl\njpg/*.jpg     all images in one folder, including the queries",
        markers=(f"gnd_{name}.pkl",),
        counts={"query": ImageCount(70), "gallery": ImageCount(images)},
        judged=True,
        lookalikes={"jpg": f"exists, but gnd_{name}.pkl does not: put gnd_{name}.pkl next to it"},
    )


BENCHMARKS = (
    _benchmark("roxford5k", "Oxford", 4_993, "https://www.robots.ox.ac.uk/~vgg/data/oxbuildings/ (oxbuild_images)"),
    _benchmark("rparis6k", "Paris", 6_322, "https://www.robots.ox.ac.uk/~vgg/data/parisbuildings/ (paris_1, paris_2)"),
    Benchmark(
        name="r1m",
        about="R1M: a million distractors for Revisited Oxford and Paris",
        read=read_r1m,
        protocol="distractors only: use the folder as the distractors of a test",
        k=(),
        download="http://ptak.felk.cvut.cz/revisitop/revisitop1m/ (revisitop1m.txt and 100 files revisitop1m.N.tar.gz)",
        expects=f"{R1M_LIST} and jpg/",
        tree="revisitop1m.txt     one path per line, relative to jpg/\njpg/...",
        markers=(R1M_LIST,),
        counts={"gallery": ImageCount(1_001_001)},
        note="Some of the files are truncated JPEGs.",
        lookalikes={"jpg": f"exists, but {R1M_LIST} does not: put {R1M_LIST} next to it"},
    ),
)
