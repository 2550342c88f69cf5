"""Validation set of Tolias et al. 2020, built from SfM-120k. Its queries are images of its database."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark
from shortlist.data.benchmarks.ground_truth import NO_CLASS, image_indices, image_names, query_judgements
from shortlist.data.catalog import Catalog, Judgement
from shortlist.data.unpickling import read_plain_pickle
from shortlist.errors import DataError

LIST = "retrieval-SfM-120k-val-eccv2020.pkl"


def read(root: Path) -> Catalog:
    """Read the queries, followed by the whole database.

    Each query has a second row in the database, which is junk for that query.
    """
    file = root / LIST
    content = read_plain_pickle(file)
    images = image_names(file, content, "cids")
    if any(len(image) < 6 for image in images):
        raise DataError(
            f"{file}: the names in 'cids' must have 6 characters or more, since the last 6 give the folders."
        )
    queries = image_indices(file, {"qidx": [], **content}, "qidx", len(images))
    if not len(queries):
        raise DataError(f"{file} has no list 'qidx' of queries: it is not the expected ground truth.")
    judged = []
    for own, truth in zip(queries.tolist(), query_judgements(file, content, len(queries)), strict=True):
        positives, junk = (image_indices(file, {"junk": [], **truth}, key, len(images)) for key in ("ok", "junk"))
        positives = positives[positives != own]
        judged.append(Judgement(positives + len(queries), np.union1d(junk, own) + len(queries)))
    paths = [_path(image) for image in [*(images[query] for query in queries), *images]]
    return Catalog.from_classes(
        "sfm120k-val",
        root,
        paths,
        [NO_CLASS] * len(paths),
        "validation",
        roles=np.repeat(["query", "gallery"], [len(queries), len(images)]),
        judgements={"": tuple(judged)},
    )


def _path(image: str) -> str:
    """Return ims/ef/cd/ab/0123abcdef for the name 0123abcdef: the last three pairs of characters are folders."""
    return f"ims/{image[-2:]}/{image[-4:-2]}/{image[-6:-4]}/{image}"


BENCHMARK = Benchmark(
    name="sfm120k-val",
    about="validation set of Tolias et al. 2020, from SfM-120k, to select the epoch of a landmark model",
    read=read,
    protocol="judged: the queries are part of the database; each is compared with all other images of it",
    k=(1, 5, 10),
    download="images: http://cmp.felk.cvut.cz/cnnimageretrieval/ (train/ims, ims.tar.gz)\n"
    f"ground truth: https://github.com/gtolias/how ({LIST})",
    expects=f"{LIST} and ims/",
    tree=f"""\
{LIST}
ims/ef/cd/ab/0123...abcdef     the last characters of the name are folders; no extension""",
    markers=(LIST,),
    judged=True,
    lookalikes={
        "retrieval-SfM-120k.pkl": f"is the training list; {LIST} is a separate file",
        "ims": f"exists, but {LIST} does not: put {LIST} next to it",
    },
)
