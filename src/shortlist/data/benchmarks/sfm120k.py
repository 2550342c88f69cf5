"""The validation set of Tolias et al. 2020, built from SfM-120k. Its queries are images of its database."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data.benchmarks.benchmark import Benchmark, Progress
from shortlist.data.benchmarks.judged import UNLABELLED, indices, names, queries
from shortlist.data.catalog import Catalog, Judgement
from shortlist.data.unpickling import read_plain_pickle
from shortlist.errors import DataError

LIST = "retrieval-SfM-120k-val-eccv2020.pkl"


def read(root: Path, progress: Progress | None = None) -> Catalog:
    """The queries, then the whole database: a query is two rows, and its row in the database is junk for it."""
    file = root / LIST
    content = read_plain_pickle(file)
    images = names(file, content, "cids")
    if any(len(image) < 6 for image in images):
        raise DataError(f"{file}: the names in 'cids' must have 6 letters or more: their last ones are their folders")
    asked = indices(file, {"qidx": [], **content}, "qidx", len(images))
    if not len(asked):
        raise DataError(f"{file} has no list 'qidx' of queries: it is not the ground truth that was expected")
    ground_truth = queries(file, content, len(asked))
    judged = []
    for own, each in zip(asked.tolist(), ground_truth, strict=True):
        right, junk = (indices(file, {"junk": [], **each}, key, len(images)) for key in ("ok", "junk"))
        right = right[right != own]
        judged.append(Judgement(right + len(asked), np.union1d(junk, own) + len(asked)))
    paths = np.array([_path(image) for image in images], dtype=object)
    total = len(asked) + len(images)
    return Catalog(
        name="sfm120k-val",
        root=root,
        paths=np.concatenate((paths[asked], paths)),
        labels=np.zeros(total, dtype=np.int64),
        class_names=UNLABELLED,
        splits=np.full(total, "validation"),
        roles=np.repeat(["query", "gallery"], [len(asked), len(images)]),
        judgements={"": tuple(judged)},
    )


def _path(image: str) -> str:
    """ims/ef/cd/ab/0123abcdef: the last letters of the name, in pairs, are its folders. No ending."""
    return f"ims/{image[-2:]}/{image[-4:-2]}/{image[-6:-4]}/{image}"


BENCHMARK = Benchmark(
    name="sfm120k-val",
    about="the validation set of Tolias et al. 2020, from SfM-120k: to choose the epoch of a landmark model",
    read=read,
    protocol="judged: the queries lie in the database, and each is compared with all of it but itself",
    k=(1, 5, 10),
    download="images: http://cmp.felk.cvut.cz/cnnimageretrieval/ (train/ims, ims.tar.gz)\n"
    f"ground truth: https://github.com/gtolias/how ({LIST})",
    expects=f"{LIST} and ims/",
    tree=f"""\
{LIST}
ims/ef/cd/ab/0123...abcdef     the last letters of the name are folders; no ending""",
    marks=(LIST,),
    judged=True,
    confused={
        "retrieval-SfM-120k.pkl": f"is the list of its training; {LIST} is a file of its own",
        "ims": f"is there, but {LIST} is not: it belongs beside it",
    },
)
