"""Analysis of a run's test: the results of every query, the rank of its first correct result, and all similarities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.data import Catalog, Judgement
from shortlist.encoding import Encoder
from shortlist.errors import DataError, RunError, translate_arguments
from shortlist.evaluation.protocols import gallery_rows, leave_one_out, query_rows
from shortlist.progress import Display
from shortlist.ranking.count_at_least import count_at_least
from shortlist.ranking.metrics import rounding
from shortlist.ranking.precision import full_precision
from shortlist.ranking.relevance import HIDDEN
from shortlist.ranking.scratch import Scratch
from shortlist.training import RunFolder, open_encoder
from shortlist.training.datasets import EvalSet
from shortlist.training.plan import decoding_workers
from shortlist.training.run_evaluation import embed_test

NUM_RESULTS = 10  # results per query
NUM_BINS = 100  # of the histograms of similarities, from -1 to 1
_TILE = 2**22  # maximum number of similarities in memory


@dataclass(frozen=True, eq=False)
class EmbeddedTest:
    """Images that a run was tested on, and their vectors.

    Args:
        catalog: The images.
        k: Cut-offs of r@k.
        vectors: Vectors in the order of the catalog, (n, d) on the run's device.
    """

    catalog: Catalog
    k: tuple[int, ...]
    vectors: Tensor


@dataclass(frozen=True, eq=False)
class Analysis:
    """Results of all queries of a catalog, in the order of the catalog. Images are given as rows of the catalog.

    Args:
        queries: Images used as queries, (Q,).
        results: The most similar images, best first, (Q, 10); -1 if there are fewer than 10.
        similarities: Similarities of the results to the query, (Q, 10).
        correct: Whether a result is a positive of the query, (Q, 10).
        num_positives: Number of positives in the gallery, (Q,). Queries with 0 count in no metric.
        first_rank: Rank of the first positive, starting at 1, (Q,); 0 without a positive.
        margin: Similarity of the best positive minus that of the best negative, (Q,); 0 if either is missing.
        positive_pairs: Histogram of the similarities of queries and positives from -1 to 1, (100,).
        negative_pairs: Histogram of the similarities of queries and negatives from -1 to 1, (100,).
    """

    queries: NDArray[np.int64]
    results: NDArray[np.int64]
    similarities: NDArray[np.float32]
    correct: NDArray[np.bool_]
    num_positives: NDArray[np.int64]
    first_rank: NDArray[np.int64]
    margin: NDArray[np.float32]
    positive_pairs: NDArray[np.int64]
    negative_pairs: NDArray[np.int64]

    @property
    def answerable(self) -> NDArray[np.int64]:
        """Indices of the queries that have a positive."""
        return np.flatnonzero(self.num_positives)


def open_finished_run(path: Path | str, model: nn.Module | None = None) -> tuple[RunFolder, RunConfig, Encoder]:
    """Open a finished run.

    Args:
        path: Folder of the run.
        model: The model, if it was given in Python; see `Encoder.from_run`.

    Returns:
        The run's folder, its configuration and its encoder.

    Raises:
        RunError: There is no run, or it is not finished.
    """
    folder = RunFolder.open(Path(path))
    config = folder.config()
    if not folder.evaluation_file.exists():
        raise RunError(f"The run in {folder.path} is not finished. To finish it: {folder.resume_command}")
    return folder, config, open_encoder(folder.path, model)


@translate_arguments(CONFIG_KEYS)
def open_test(
    folder: RunFolder, config: RunConfig, encoder: Encoder, eval_set: EvalSet, display: Display
) -> EmbeddedTest:
    """Load the vectors that the run saved when it was tested. Images that have changed since are embedded again."""
    with display.task(f"embedding {eval_set.name}", "images") as progress:
        vectors = embed_test(encoder, eval_set.catalog, decoding_workers(config), folder, progress)
    return EmbeddedTest(eval_set.catalog, eval_set.k, vectors.to(next(encoder.embedder.parameters()).device))


def analyse(vectors: Tensor, catalog: Catalog, progress: Callable[[int, int], None] | None = None) -> Analysis:
    """Rank the gallery for every query of a catalog. Memory is needed for the vectors and one tile of similarities.

    Positives are images of the same class. For judged queries, they are the positives of any setup; images that are
    junk in a setup and positive in none are ignored. Ties count against the query, as in the metrics, so that
    `first_rank <= k` is the query's r@k.

    Args:
        vectors: Vectors in the order of the catalog, (n, d) on any device.
        catalog: Images with labels, and roles and judgements if any.
        progress: Called with the number of queries done and the total number.

    Raises:
        DataError: The number of vectors is not the number of images.
    """
    if len(vectors) != len(catalog):
        raise DataError(f"{len(vectors)} embeddings for the {len(catalog)} images of {catalog.name}")
    queries, gallery = query_rows(catalog), gallery_rows(catalog)
    relevance = _Relevance(catalog, queries, gallery)
    database = vectors if len(gallery) == len(vectors) else vectors[torch.from_numpy(gallery).to(vectors.device)]
    lengths = rounding(vectors.shape[1], vectors.dtype) * database.norm(dim=1)
    size, tiles = max(1, _TILE // max(1, len(gallery))), []
    scratch = Scratch(vectors.device, vectors.dtype)
    with full_precision(vectors.device):
        for start in range(0, len(queries), size):
            stop = min(start + size, len(queries))
            query_vectors = vectors[torch.from_numpy(queries[start:stop]).to(vectors.device)]
            shape = len(query_vectors), len(database)
            similarities = torch.matmul(query_vectors, database.T, out=scratch("similarities", *shape))
            similarities[relevance.ignored(start, stop, vectors.device)] = HIDDEN
            positives = relevance.positives(start, stop, vectors.device)
            # Rank positives behind negatives whose similarity is equal up to rounding.
            similarities[positives] -= query_vectors.norm(dim=1)[positives[0]] * lengths[positives[1]]
            tiles.append(_Tile.of(similarities, positives, scratch))
            if progress is not None:
                progress(stop, len(queries))
    fields = {name: [getattr(tile, name).cpu() for tile in tiles] for name in _Tile._fields}
    pairs = {name: torch.stack(fields.pop(name)).sum(0).numpy() for name in ("positive_pairs", "negative_pairs")}
    rows = {name: torch.cat(values).numpy() for name, values in fields.items()}
    rows["results"] = np.where(rows["results"] < 0, -1, gallery[rows["results"]])
    return Analysis(queries, **rows, **pairs)


Cells = tuple[Tensor, Tensor]  # rows and columns of a tile


class _Relevance:
    """The positives of each query, and the images that are not part of its ranking: the query itself, and junk."""

    def __init__(self, catalog: Catalog, queries: NDArray[np.int64], gallery: NDArray[np.int64]) -> None:
        self.leave_one_out = leave_one_out(catalog)
        self.judgements = None if not catalog.judgements else _merge_setups(catalog, gallery)
        labels = catalog.labels[gallery]
        self.by_class = np.argsort(labels, kind="stable")  # gallery positions, class by class
        self.first, self.last = (
            np.searchsorted(labels[self.by_class], catalog.labels[queries], side) for side in ("left", "right")
        )

    def positives(self, start: int, stop: int, device: torch.device) -> Cells:
        """Return the cells of positives in the tile of queries `start` to `stop` against the gallery."""
        if self.judgements is not None:
            return _cells([each.positives for each in self.judgements[start:stop]], device)
        members = [self.by_class[self.first[query] : self.last[query]] for query in range(start, stop)]
        if self.leave_one_out:
            members = [columns[columns != start + row] for row, columns in enumerate(members)]
        return _cells(members, device)

    def ignored(self, start: int, stop: int, device: torch.device) -> Cells:
        """Return the cells of images that are not part of the ranking."""
        if self.judgements is not None:
            return _cells([each.junk for each in self.judgements[start:stop]], device)
        itself = torch.arange(start, stop if self.leave_one_out else start, device=device)
        return itself - start, itself


def _cells(columns: Sequence[NDArray[np.int64]], device: torch.device) -> Cells:
    """Convert a list of columns per row to cells."""
    rows = np.repeat(np.arange(len(columns)), [len(each) for each in columns])
    return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(columns)).to(device)


def _merge_setups(catalog: Catalog, gallery: NDArray[np.int64]) -> list[Judgement]:
    """Return for each query the gallery positions of images positive in any setup, and of junk positive in none."""
    assert catalog.judgements is not None
    position = np.full(len(catalog), -1)
    position[gallery] = np.arange(len(gallery))
    merged = []
    for setups in zip(*catalog.judgements.values(), strict=True):
        positives = np.unique(np.concatenate([setup.positives for setup in setups]))
        junk = np.setdiff1d(np.concatenate([setup.junk for setup in setups]), positives)
        merged.append(Judgement(position[positives], position[junk]))
    return merged


class _Tile(NamedTuple):
    """The fields of `Analysis` for a tile of queries, with gallery positions as results."""

    results: Tensor
    similarities: Tensor
    correct: Tensor
    num_positives: Tensor
    first_rank: Tensor
    margin: Tensor
    positive_pairs: Tensor
    negative_pairs: Tensor

    @classmethod
    def of(cls, similarities: Tensor, positives: Cells, scratch: Scratch) -> _Tile:
        """Analyse a tile of similarities (T, N), which is overwritten because a copy would cost time and memory."""
        of_positives = similarities[positives]
        num_positives = torch.bincount(positives[0], minlength=len(similarities))
        best = torch.full_like(similarities[:, 0], HIDDEN).scatter_reduce_(0, positives[0], of_positives, "amax")
        top = similarities.topk(min(NUM_RESULTS, similarities.shape[1]))
        similarities[positives] = HIDDEN  # only negatives are left
        correct = similarities.gather(1, top.indices) < top.values  # those that have just been hidden
        exists = top.values > HIDDEN
        margin = best - similarities.amax(1)
        first_rank = 1 + count_at_least(similarities, best[:, None])[:, 0]
        return cls(
            top.indices.masked_fill(~exists, -1),
            top.values.masked_fill(~exists, 0),
            correct & exists,
            num_positives,
            first_rank.masked_fill(num_positives == 0, 0),
            margin.masked_fill(~margin.isfinite(), 0),
            _histogram(of_positives, scratch),
            _histogram(similarities, scratch),
        )


def _histogram(similarities: Tensor, scratch: Scratch) -> Tensor:
    """Count the similarities per bin from -1 to 1, without hidden ones. Overwrites `similarities`."""
    # Bin 0 takes hidden similarities; the 1e-5 keeps -1 with a rounding error out of it.
    bins = similarities.add_(1 + 1e-5).mul_(NUM_BINS / 2).add_(1).clamp_(0, NUM_BINS)
    indices = scratch("bins", *bins.shape, dtype=torch.int32).copy_(bins)
    return torch.bincount(indices.view(-1), minlength=NUM_BINS + 1)[1:]
