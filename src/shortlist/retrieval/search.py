"""The exact nearest neighbours, in a stream of blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.errors import DataError
from shortlist.retrieval.vectors import Vectors, blocks


def nearest(
    queries: Vectors,
    gallery: Vectors,
    k: int,
    *,
    competes: NDArray[np.bool_] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Similarities and rows of the k nearest (fewer if there are fewer), (q, k) each, the best first, ties by row."""
    wanted = torch.as_tensor(np.asarray(queries), dtype=torch.float32)
    if wanted.shape[1] != gallery.shape[1]:
        raise DataError(f"the queries have {wanted.shape[1]} dimensions, but the gallery {gallery.shape[1]}")
    rows = torch.arange(len(gallery)) if competes is None else torch.from_numpy(np.flatnonzero(competes))
    similarities = torch.cat([wanted @ block.T for _, block in blocks([gallery], 4096, wanted)], dim=1)[:, rows]
    best = similarities.sort(dim=1, descending=True, stable=True)
    return best.values[:, :k], rows[best.indices[:, :k]]
