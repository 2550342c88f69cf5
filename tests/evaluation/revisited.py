"""The real ground truth of Revisited Oxford and Paris as a catalog, and synthetic descriptors for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.data import Catalog, Judgement
from shortlist.data.unpickling import read_plain_pickle

GROUND_TRUTH = Path(__file__).parents[1] / "revisited"
SETUPS = {  # keys of the positives and of the junk
    "easy": (["easy"], ["junk", "hard"]),
    "medium": (["easy", "hard"], ["junk"]),
    "hard": (["hard"], ["junk", "easy"]),
}


def ground_truth(name: str) -> tuple[list[dict[str, list[int]]], int]:
    """Return the judgements of each query, and the number of database images."""
    found = read_plain_pickle(GROUND_TRUTH / f"gnd_{name}.pkl")
    return found["gnd"], len(found["imlist"])


def catalog(queries: list[dict[str, list[int]]], database: int, *, last: bool = False) -> Catalog:
    """Build a catalog with the queries first or last. Indices into the database become rows of the catalog."""
    first = 0 if last else len(queries)
    roles = ["query"] * len(queries), ["gallery"] * database
    number = len(queries) + database

    def rows(query: dict[str, list[int]], keys: list[str]) -> NDArray[np.int64]:
        return first + np.array([index for key in keys for index in query[key]], dtype=np.int64)

    return Catalog(
        name="roxford5k",
        root=Path(),
        paths=np.array([f"{row}.jpg" for row in range(number)], dtype=object),
        labels=np.zeros(number, dtype=np.int64),
        class_names=("unlabelled",),
        splits=np.array(["test"] * number),
        roles=np.array([*roles[1], *roles[0]] if last else [*roles[0], *roles[1]]),
        judgements={
            setup: tuple(Judgement(rows(query, right), rows(query, junk)) for query in queries)
            for setup, (right, junk) in SETUPS.items()
        },
    )


def descriptors(
    queries: list[dict[str, list[int]]], database: int, *, noise: float, seed: int = 0, dimensions: int = 32
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return integer descriptors of the queries and the database, whose products are exact, also in half precision.

    Easy images are near their queries, hard images are farther away, junk is in between. Noise makes retrieval harder.
    """
    random = np.random.default_rng(seed)
    asked = random.normal(size=(len(queries), dimensions))
    known = noise * random.normal(size=(database, dimensions))
    for vector, query in zip(asked, queries, strict=True):
        for key, share in {"easy": 0.7, "junk": 0.5, "hard": 0.3}.items():
            known[query[key]] += share * vector
    return np.rint(4 * asked).clip(-15, 15), np.rint(4 * known).clip(-15, 15)
