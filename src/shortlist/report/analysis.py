"""What every query of a test finds: its first results, the rank of the first right one, and all similarities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.data import Catalog, Judgement
from shortlist.errors import DataError
from shortlist.ranking.metrics import rounding
from shortlist.ranking.precision import full_precision
from shortlist.ranking.relevance import HIDDEN
from shortlist.retrieval.scores import gallery_rows, leave_one_out, query_rows

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
    answers = _Answers(catalog, queries, gallery, vectors.device)
    database = vectors if len(gallery) == len(vectors) else vectors[torch.from_numpy(gallery).to(vectors.device)]
    lengths = rounding(vectors.shape[1], vectors.dtype) * database.norm(dim=1)
    size, tiles = max(1, _TILE // max(1, len(gallery))), []
    right_pairs, all_pairs = torch.zeros(2, BINS, dtype=torch.int64)
    with full_precision(vectors.device):
        for start in range(0, len(queries), size):
            stop = min(start + size, len(queries))
            asking = vectors[torch.from_numpy(queries[start:stop]).to(vectors.device)]
            right, hidden = answers.tile(start, stop)
            similarities = asking @ database.T
            similarities -= right * (asking.norm(dim=1, keepdim=True) * lengths)  # a right one is behind what it ties
            similarities[hidden] = HIDDEN
            right_pairs += _histogram(similarities[right])
            all_pairs += _histogram(similarities)
            all_pairs[0] -= int(hidden.sum())
            tiles.append(_Tile.of(similarities, right))
            if progress is not None:
                progress(stop, len(queries))
    found = {name: torch.cat([getattr(tile, name) for tile in tiles]).cpu().numpy() for name in _Tile._fields}
    found["results"] = np.where(found["results"] < 0, -1, gallery[found["results"]])
    wrong_pairs = all_pairs - right_pairs
    return Analysis(queries, **found, right_pairs=right_pairs.numpy(), wrong_pairs=wrong_pairs.numpy())


class _Answers:
    """What is right for a query, and what is not in its ranking at all: the query itself, and junk."""

    def __init__(
        self, catalog: Catalog, queries: NDArray[np.int64], gallery: NDArray[np.int64], device: torch.device
    ) -> None:
        self.device, self.width, self.itself = device, len(gallery), leave_one_out(catalog)
        self.judged = None if not catalog.judgements else _any_setup(catalog, gallery)
        labels = torch.from_numpy(catalog.labels.copy()).to(device)
        self.asked, self.searched = labels[torch.from_numpy(queries)], labels[torch.from_numpy(gallery)]

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Two masks, (stop - start, gallery)."""
        hidden = torch.zeros(stop - start, self.width, dtype=torch.bool, device=self.device)
        if self.judged is not None:
            right = torch.zeros_like(hidden)
            for row, judgement in enumerate(self.judged[start:stop]):
                right[row, torch.from_numpy(judgement.positives).to(self.device)] = True
                hidden[row, torch.from_numpy(judgement.junk).to(self.device)] = True
            return right, hidden
        right = self.asked[start:stop, None] == self.searched
        if self.itself:
            own = torch.arange(stop - start, device=self.device)
            right[own, own + start], hidden[own, own + start] = False, True
        return right, hidden


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

    @classmethod
    def of(cls, similarities: Tensor, right: Tensor) -> _Tile:
        top = similarities.topk(min(SHOWN, similarities.shape[1]))
        there = top.values > HIDDEN
        best = similarities.masked_fill(~right, HIDDEN).amax(1)
        wrong = similarities.masked_fill(right, HIDDEN)
        to_find = right.sum(1)
        margin = best - wrong.amax(1)
        return cls(
            top.indices.masked_fill(~there, -1),
            top.values.masked_fill(~there, 0),
            right.gather(1, top.indices) & there,
            to_find,
            (1 + (wrong >= best[:, None]).sum(1)).masked_fill(to_find == 0, 0),
            margin.masked_fill(~margin.isfinite(), 0),
        )


def _histogram(similarities: Tensor) -> Tensor:
    return torch.histc(similarities.float().clamp(-1, 1), BINS, -1, 1).long().cpu()
