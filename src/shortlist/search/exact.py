"""Exact nearest neighbours: only the result and a few blocks are held in memory."""

from __future__ import annotations

import math
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import ConfigError, DataError
from shortlist.progress import Progress
from shortlist.ranking.ranker import Ranker
from shortlist.ranking.top_k import BLOCK_SIZE, top_k
from shortlist.search.vectors import VectorReader, Vectors


def check_k(k: int) -> None:
    """Raise a ConfigError unless k is a valid number of results."""
    if not isinstance(k, Integral) or k < 1:
        raise ConfigError(f"`k`, the number of results, must be an integer of at least 1, not {k}.")


def nearest(
    queries: Vectors,
    gallery: Vectors,
    k: int,
    *,
    searchable: NDArray[np.bool_] | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the k vectors of a gallery with the largest inner product with each query, computed in float32.

    If `queries` and `gallery` are the same object, each inner product is computed once, and the two results may share
    memory. Memory-mapped vectors of float32 are read in place.

    Args:
        queries: (q, d). If it is a tensor, the search runs on its device.
        gallery: (n, d). It may be memory-mapped and in half precision.
        k: Number of results per query. If the gallery has fewer vectors, all are returned.
        searchable: Mask of the gallery rows that can be found, (n,). None: all.
        progress: Called with the number of inner products done and the total number.

    Returns:
        Similarities in descending order and the corresponding rows, (q, k) each. Among equal similarities, the lowest
        rows come first.

    Raises:
        ConfigError: `k` is less than 1.
        DataError: The dimensions differ, `searchable` does not fit the gallery, or a value is not finite.

    Example:
        >>> nearest(torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]]), k=1)[1]
        tensor([[0],
                [1]])
    """
    if queries.ndim != 2 or gallery.ndim != 2 or queries.shape[1] != gallery.shape[1]:
        raise DataError(f"The queries have shape {tuple(queries.shape)}, but the gallery {tuple(gallery.shape)}.")
    check_k(k)
    if searchable is not None and (searchable.dtype != np.bool_ or searchable.shape != (len(gallery),)):
        raise DataError(
            f"`searchable` must hold {len(gallery)} booleans, one per gallery row, "
            f"but has shape {searchable.shape} and type {searchable.dtype}."
        )
    device = queries.device if isinstance(queries, Tensor) else torch.device("cpu")
    like = torch.empty(0, dtype=torch.float32, device=device)
    query_reader, gallery_reader = VectorReader([queries], like), VectorReader([gallery], like)
    for first, block in query_reader.blocks(BLOCK_SIZE):
        _check_finite(block, first, "queries")
    excluded = None if searchable is None else torch.from_numpy(~searchable).to(like.device)
    ranker = Ranker(query_reader, gallery_reader, excluded=excluded, check=_check_gallery)
    symmetric = gallery is queries and searchable is None and like.device.type == "cpu"
    k = min(k, len(gallery) if searchable is None else int(searchable.sum()))
    return top_k(ranker, k, symmetric=symmetric, progress=progress)


def _check_gallery(similarities: Tensor, first: int) -> None:
    _check_finite(similarities[:1].T, first, "gallery")  # the first query is enough to detect it


def _check_finite(vectors: Tensor, first: int, name: str) -> None:
    if math.isfinite(vectors.sum().item()):  # much faster than to check every value
        return
    bad = ~vectors.isfinite().all(1)
    if bad.any():
        raise DataError(f"Row {first + int(bad.nonzero()[0])} of the {name} contains values that are not finite.")
