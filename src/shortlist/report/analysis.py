"""What every query of a test finds: its first results, the rank of the first right one, and all similarities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.data import Catalog, Judgement
from shortlist.errors import DataError
from shortlist.evaluation.protocols import gallery_rows, leave_one_out, query_rows
from shortlist.ranking.count_at_least import count_at_least
from shortlist.ranking.metrics import rounding
from shortlist.ranking.precision import full_precision
from shortlist.ranking.relevance import HIDDEN
from shortlist.ranking.scratch import Scratch

SHOWN = 10  # results of a query
BINS = 100  # of the similarities, from -1 to 1
_TILE = 2**22  # similarities alive at once


@dataclass(frozen=True, eq=False)
class Analysis:
    """What each query finds, all of a catalog's queries in their order. Images are rows of the catalog.

    Args:
        queries: (Q,) the images that query.
        results: (Q, 10) the most similar images, the best first; -1 where there are no more.
        similarities: (Q, 10) to the query.
        right: (Q, 10) whether a result is what the query should find.
        to_find: (Q,) how many images it should find; 0: the query counts in no metric.
        first: (Q,) rank of the first right image, from 1; 0 where there is none.
        margin: (Q,) the best right similarity less the best wrong one; 0 where there are not both.
        right_pairs: (100,) how many pairs of a query and a right image have which similarity, from -1 to 1.
        wrong_pairs: (100,) the same of wrong ones.
    """

    queries: NDArray[np.int64]
    results: NDArray[np.int64]
    similarities: NDArray[np.float32]
    right: NDArray[np.bool_]
    to_find: NDArray[np.int64]
    first: NDArray[np.int64]
    margin: NDArray[np.float32]
    right_pairs: NDArray[np.int64]
    wrong_pairs: NDArray[np.int64]

    @property
    def answerable(self) -> NDArray[np.int64]:
        """The numbers of the queries that have anything to find."""
        return np.flatnonzero(self.to_find)


def analyse(vectors: Tensor, catalog: Catalog, progress: Callable[[int, int], None] | None = None) -> Analysis:
    """Rank the images of a catalog for each of its queries, in memory for the vectors and a tile of similarities.

    By class, or as judged: what is right in any setup is right, and what is junk in all of them is left out. Ties count
    against the query, as in the metrics, so that `first` <= k is its r@k.

    Args:
        vectors: (n, d) in the order of the catalog, on any device.
        catalog: labels, and roles and judgements where there are any.
        progress: called with the number of queries done and of all.

    Raises:
        DataError: the vectors are not those of the catalog.
    """
    if len(vectors) != len(catalog):
        raise DataError(f"{len(vectors)} embeddings for the {len(catalog)} images of {catalog.name}")
    queries, gallery = query_rows(catalog), gallery_rows(catalog)
    answers = _Answers(catalog, queries, gallery)
    database = vectors if len(gallery) == len(vectors) else vectors[torch.from_numpy(gallery).to(vectors.device)]
    lengths = rounding(vectors.shape[1], vectors.dtype) * database.norm(dim=1)
    size, tiles = max(1, _TILE // max(1, len(gallery))), []
    scratch = Scratch(vectors.device, vectors.dtype)
    with full_precision(vectors.device):
        for start in range(0, len(queries), size):
            stop = min(start + size, len(queries))
            asking = vectors[torch.from_numpy(queries[start:stop]).to(vectors.device)]
            similarities = torch.matmul(asking, database.T, out=scratch("similarities", len(asking), len(database)))
            similarities[answers.hidden(start, stop, vectors.device)] = HIDDEN
            right = answers.right(start, stop, vectors.device)
            # A right image is behind what it ties with.
            similarities[right] -= asking.norm(dim=1)[right[0]] * lengths[right[1]]
            tiles.append(_Tile.of(similarities, right, scratch))
            if progress is not None:
                progress(stop, len(queries))
    found = {name: [getattr(tile, name).cpu() for tile in tiles] for name in _Tile._fields}
    pairs = {name: torch.stack(found.pop(name)).sum(0).numpy() for name in ("right_pairs", "wrong_pairs")}
    rows = {name: torch.cat(values).numpy() for name, values in found.items()}
    rows["results"] = np.where(rows["results"] < 0, -1, gallery[rows["results"]])
    return Analysis(queries, **rows, **pairs)


Places = tuple[Tensor, Tensor]  # rows and columns of a tile


class _Answers:
    """What is right for a query, and what is not in its ranking at all: the query itself, and junk."""

    def __init__(self, catalog: Catalog, queries: NDArray[np.int64], gallery: NDArray[np.int64]) -> None:
        self.itself = leave_one_out(catalog)
        self.judged = None if not catalog.judgements else _any_setup(catalog, gallery)
        labels = catalog.labels[gallery]
        self.members = np.argsort(labels, kind="stable")  # places in the gallery, class by class
        self.first, self.last = (
            np.searchsorted(labels[self.members], catalog.labels[queries], side) for side in ("left", "right")
        )

    def right(self, start: int, stop: int, device: torch.device) -> Places:
        """Where a tile of the queries from `start` to `stop` against the gallery holds right images."""
        if self.judged is not None:
            return _places([each.positives for each in self.judged[start:stop]], device)
        found = [self.members[self.first[query] : self.last[query]] for query in range(start, stop)]
        if self.itself:
            found = [places[places != start + row] for row, places in enumerate(found)]
        return _places(found, device)

    def hidden(self, start: int, stop: int, device: torch.device) -> Places:
        """Where it holds what is not in the ranking."""
        if self.judged is not None:
            return _places([each.junk for each in self.judged[start:stop]], device)
        own = torch.arange(start, stop if self.itself else start, device=device)
        return own - start, own


def _places(columns: Sequence[NDArray[np.int64]], device: torch.device) -> Places:
    """From the columns of each row."""
    rows = np.repeat(np.arange(len(columns)), [len(each) for each in columns])
    joined = np.concatenate(columns)
    return torch.from_numpy(rows).to(device), torch.from_numpy(joined).to(device)


def _any_setup(catalog: Catalog, gallery: NDArray[np.int64]) -> list[Judgement]:
    """For each query, what is right in any setup, and what is junk in some and right in none: places in the gallery."""
    assert catalog.judgements is not None
    place = np.full(len(catalog), -1)
    place[gallery] = np.arange(len(gallery))
    found = []
    for each in zip(*catalog.judgements.values(), strict=True):
        right = np.unique(np.concatenate([one.positives for one in each]))
        junk = np.setdiff1d(np.concatenate([one.junk for one in each]), right)
        found.append(Judgement(place[right], place[junk]))
    return found


class _Tile(NamedTuple):
    """Of some queries: as in `Analysis`, with places in the gallery."""

    results: Tensor
    similarities: Tensor
    right: Tensor
    to_find: Tensor
    first: Tensor
    margin: Tensor
    right_pairs: Tensor
    wrong_pairs: Tensor

    @classmethod
    def of(cls, similarities: Tensor, right: Places, scratch: Scratch) -> _Tile:
        """Spoils the (T, N) similarities: a pass over them costs, and a copy more."""
        at = similarities[right]
        to_find = torch.bincount(right[0], minlength=len(similarities))
        best = torch.full_like(similarities[:, 0], HIDDEN).scatter_reduce_(0, right[0], at, "amax")
        top = similarities.topk(min(SHOWN, similarities.shape[1]))
        similarities[right] = HIDDEN  # only wrong ones are left
        found = similarities.gather(1, top.indices) < top.values  # what has just been hidden
        there = top.values > HIDDEN
        margin = best - similarities.amax(1)
        first = 1 + count_at_least(similarities, best[:, None])[:, 0]
        return cls(
            top.indices.masked_fill(~there, -1),
            top.values.masked_fill(~there, 0),
            found & there,
            to_find,
            first.masked_fill(to_find == 0, 0),
            margin.masked_fill(~margin.isfinite(), 0),
            _histogram(at, scratch),
            _histogram(similarities, scratch),
        )


def _histogram(similarities: Tensor, scratch: Scratch) -> Tensor:
    """How many of the similarities, which are spoilt, are in each bin from -1 to 1; what is hidden is in none."""
    places = similarities.add_(1 + 1e-5).mul_(BINS / 2).add_(1).clamp_(0, BINS)  # 0: hidden, and no rounding below -1
    whole = scratch("bins", *places.shape, dtype=torch.int32).copy_(places)
    return torch.bincount(whole.view(-1), minlength=BINS + 1)[1:]
