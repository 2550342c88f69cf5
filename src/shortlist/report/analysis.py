"""Analysis of a run's test: the results of every query, the rank of its first correct result, and all similarities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.data import Catalog
from shortlist.encoding import Encoder
from shortlist.errors import DataError, RunError, translate_arguments
from shortlist.evaluation.judged import Rows, pairs
from shortlist.evaluation.protocols import gallery_rows, query_rows
from shortlist.progress import Display, Progress
from shortlist.ranking.count_at_least import count_at_least
from shortlist.ranking.ranker import Ranker, TensorSource, rounding
from shortlist.ranking.relevance import HIDDEN
from shortlist.ranking.scratch import Scratch
from shortlist.training import RunFolder, open_encoder
from shortlist.training.datasets import EvalSet
from shortlist.training.plan import run_workers
from shortlist.training.run_evaluation import embed_test

NUM_RESULTS = 10  # results per query
NUM_BINS = 100  # number of bins of the histograms of similarities, from -1 to 1


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
        num_positives: Number of positives in the gallery, (Q,). Queries without positives are excluded from metrics.
        first_rank: Rank of the first positive, starting at 1, (Q,); 0 without a positive.
        best_positive: Similarity of the most similar positive, (Q,); -inf without a positive.
        best_negative: Similarity of the most similar negative, (Q,); -inf without a negative.
        positive_pairs: Histogram of the similarities of queries and positives from -1 to 1, (100,).
        negative_pairs: Histogram of the similarities of queries and negatives from -1 to 1, (100,).
    """

    queries: NDArray[np.int64]
    results: NDArray[np.int64]
    similarities: NDArray[np.float32]
    correct: NDArray[np.bool_]
    num_positives: NDArray[np.int64]
    first_rank: NDArray[np.int64]
    best_positive: NDArray[np.float32]
    best_negative: NDArray[np.float32]
    positive_pairs: NDArray[np.int64]
    negative_pairs: NDArray[np.int64]

    @property
    def answerable(self) -> NDArray[np.int64]:
        """Indices of the queries that have a positive."""
        return np.flatnonzero(self.num_positives)

    @property
    def margin(self) -> NDArray[np.float32]:
        """Similarity of the best positive minus that of the best negative, (Q,); 0 if either is missing."""
        exists = np.isfinite(self.best_positive) & np.isfinite(self.best_negative)
        return np.subtract(self.best_positive, self.best_negative, out=np.zeros_like(self.best_positive), where=exists)


def open_finished_run(path: Path | str, model: nn.Module | None = None) -> tuple[RunFolder, RunConfig, Encoder]:
    """Open a finished run.

    Args:
        path: Folder of the run.
        model: The model, if it was given in Python; see `Encoder.from_run`.

    Returns:
        The run's folder, its configuration and its encoder.

    Raises:
        RunError: The folder contains no run, or the run is not finished.
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
        vectors = embed_test(encoder, eval_set.catalog, run_workers(config), folder, progress)
    return EmbeddedTest(eval_set.catalog, eval_set.k, vectors.to(next(encoder.embedder.parameters()).device))


def analyse(vectors: Tensor, catalog: Catalog, progress: Progress | None = None) -> Analysis:
    """Rank the gallery for every query of a catalog, with the memory of the vectors and one tile of similarities.

    Positives are images of the same class or, if images have several labels, that share one. For judged queries, they
    are the positives of any setup; images that are junk in a setup and positive in none are ignored. Ties count against
    the query, as in the metrics, so that `first_rank <= k` is the query's r@k.

    Args:
        vectors: Vectors in the order of the catalog, (n, d) on any device.
        catalog: Images with labels, and roles and judgements if any.
        progress: Called with the number of queries done and the total number.

    Raises:
        DataError: The number of vectors is not the number of images.
    """
    if len(vectors) != len(catalog):
        raise DataError(f"{len(vectors)} embeddings for the {len(catalog)} images of {catalog.name}.")
    queries, gallery, device = query_rows(catalog), gallery_rows(catalog), vectors.device
    positives, hidden = _relevance(catalog, queries, gallery)
    database = vectors if len(gallery) == len(vectors) else vectors[torch.from_numpy(gallery).to(device)]
    lengths = rounding(vectors.shape[1], vectors.dtype) * database.norm(dim=1)
    query_source = TensorSource(vectors, torch.from_numpy(queries).to(device))
    ranker = Ranker(query_source, TensorSource(database), pairs(hidden, device))
    scratch, tiles = Scratch(device, vectors.dtype), []
    for tile in ranker.rankings():
        row, column = pairs(positives[tile.queries], device)
        ranked = tile.similarities[row, column] > HIDDEN  # excludes the query itself
        row, column = row[ranked], column[ranked]
        # Rank positives behind negatives whose similarity is equal up to rounding.
        tile.similarities[row, column] -= tile.vectors.norm(dim=1)[row] * lengths[column]
        tiles.append(_analyse_tile(tile.similarities, (row, column), scratch))
        if progress is not None:
            progress(tile.queries.stop, len(queries))
    fields = {name: [tile[name].cpu() for tile in tiles] for name in tiles[0]}
    histograms = {name: torch.stack(fields.pop(name)).sum(0).numpy() for name in ("positive_pairs", "negative_pairs")}
    rows = {name: torch.cat(values).numpy() for name, values in fields.items()}
    rows["results"] = np.where(rows["results"] < 0, -1, gallery[rows["results"]])
    return Analysis(queries, **rows, **histograms)


def _relevance(catalog: Catalog, queries: Rows, gallery: Rows) -> tuple[list[Rows], list[Rows]]:
    """Return, for each query, the gallery positions of its positives and of images that are not in its ranking.

    The latter are junk that is positive in no setup or, for a query in the gallery, the query itself, which is also
    listed as a positive. The position of an image that is not in the gallery is -1.
    """
    position = np.full(len(catalog), -1)
    position[gallery] = np.arange(len(gallery))
    if catalog.judgements:
        setups = list(zip(*catalog.judgements.values(), strict=True))
        positives = [np.unique(np.concatenate([each.positives for each in setup])) for setup in setups]
        junk = [np.concatenate([each.junk for each in setup]) for setup in setups]
        junk = [np.setdiff1d(*each) for each in zip(junk, positives, strict=True)]
        return [position[rows] for rows in positives], [position[rows] for rows in junk]
    if catalog.label_sets is not None:
        return _positives_by_shared_label(catalog.label_sets, queries, gallery), list(position[queries, None])
    labels = catalog.labels[gallery]
    by_class = np.argsort(labels, kind="stable")
    bounds = (np.searchsorted(labels[by_class], catalog.labels[queries], side) for side in ("left", "right"))
    return [by_class[first:last] for first, last in zip(*bounds, strict=True)], list(position[queries, None])


def _positives_by_shared_label(label_sets: NDArray[np.object_], queries: Rows, gallery: Rows) -> list[Rows]:
    """Return the gallery positions of the images that share a label with each query."""
    positions: dict[int, list[int]] = {}  # by label
    for position, row in enumerate(gallery.tolist()):
        for label in label_sets[row]:
            positions.setdefault(label, []).append(position)
    return [np.unique([each for label in label_sets[row] for each in positions.get(label, ())]) for row in queries]


def _analyse_tile(similarities: Tensor, positives: tuple[Tensor, Tensor], scratch: Scratch) -> dict[str, Tensor]:
    """Compute the fields of `Analysis` for a tile (T, N), which is overwritten. Results are gallery positions."""
    of_positives = similarities[positives]
    num_positives = torch.bincount(positives[0], minlength=len(similarities))
    best = torch.full_like(similarities[:, 0], HIDDEN).scatter_reduce_(0, positives[0], of_positives, "amax")
    top = similarities.topk(min(NUM_RESULTS, similarities.shape[1]))
    similarities[positives] = HIDDEN  # only negatives are left
    correct = similarities.gather(1, top.indices) < top.values  # those that have just been hidden
    exists = top.values > HIDDEN
    first_rank = 1 + count_at_least(similarities, best[:, None])[:, 0]
    return {
        "results": top.indices.masked_fill(~exists, -1),
        "similarities": top.values.masked_fill(~exists, 0),
        "correct": correct & exists,
        "num_positives": num_positives,
        "first_rank": first_rank.masked_fill(num_positives == 0, 0),
        "best_positive": best,
        "best_negative": similarities.amax(1),
        "positive_pairs": _histogram(of_positives, scratch),
        "negative_pairs": _histogram(similarities, scratch),
    }


def _histogram(similarities: Tensor, scratch: Scratch) -> Tensor:
    """Count the similarities per bin from -1 to 1, without hidden ones. Overwrites `similarities`."""
    # Bin 0 takes hidden similarities; the 1e-5 keeps -1 with a rounding error out of it.
    bins = similarities.add_(1 + 1e-5).mul_(NUM_BINS / 2).add_(1).clamp_(0, NUM_BINS)
    indices = scratch("bins", *bins.shape, dtype=torch.int32).copy_(bins)
    return torch.bincount(indices.view(-1), minlength=NUM_BINS + 1)[1:]
