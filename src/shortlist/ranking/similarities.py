"""Tiles of similarities, and the way a gradient at a tile goes back to the embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shortlist.ranking.simix import VirtualBatch

PullBack = Callable[[Tensor, Tensor], None]
"""Takes the gradient at some rows of a tile, (R, N), and which rows they are, (R,); adds to the embeddings' gradients."""


class Similarities(Protocol):
    """The (Q, N) matrix of similarities, of which only tiles ever exist."""

    size: int  # N, database items

    def tile(self, rows: Tensor) -> tuple[Tensor, PullBack]:
        """Similarities of the queries `rows` to every database item, (T, N), free to be written to."""
        ...


class DotProducts:
    """s(q, x) = q . x between queries and database, which may be one and the same tensor.

    Gradients gather in `query_gradient` and `database_gradient`, one buffer where the tensors are one.
    """

    def __init__(self, queries: Tensor, database: Tensor):
        self._queries, self._database = queries, database
        self.size = len(database)
        self.query_gradient = torch.zeros_like(queries)
        self.database_gradient = self.query_gradient if database is queries else torch.zeros_like(database)

    def tile(self, rows: Tensor) -> tuple[Tensor, PullBack]:
        queries = self._queries[rows]

        def pull_back(gradient: Tensor, kept: Tensor) -> None:
            self.query_gradient.index_add_(0, rows[kept], gradient @ self._database)
            self.database_gradient.addmm_(gradient.T, queries[kept])

        return queries @ self._database.T, pull_back


class MixedProducts:
    """Similarities of a batch and its virtual examples, each as query and as database item (SiMix).

    Item i of the expanded batch is weight[i] * left[i] + (1 - weight[i]) * right[i]; an original is its own parent.
    Rows and columns of a tile are mixed from those of the parents, and a gradient folds back by the same weights
    transposed, so that only the similarities and gradients of the originals ever meet the embeddings.
    """

    def __init__(self, embeddings: Tensor, virtual: VirtualBatch):
        self._products = DotProducts(embeddings, embeddings)
        self.query_gradient = self.database_gradient = self._products.query_gradient
        self._left, self._right = virtual.pairs.unbind(1)
        self._alpha = virtual.alphas.to(embeddings.dtype)
        originals = torch.arange(len(embeddings), device=embeddings.device)
        self._parents = torch.cat((originals.expand(2, -1), virtual.pairs.T), dim=1)  # (2, N)
        self._weight = torch.cat((torch.ones_like(originals, dtype=embeddings.dtype), self._alpha))[:, None]
        self.size = len(self._weight)

    def tile(self, rows: Tensor) -> tuple[Tensor, PullBack]:
        parents, place = torch.unique(self._parents[:, rows], return_inverse=True)
        left, right, weight = place[0], place[1], self._weight[rows]
        similarities, pull_back_parents = self._products.tile(parents)

        def pull_back(gradient: Tensor, kept: Tensor) -> None:
            gradient = self._fold_columns(gradient)
            folded = gradient.new_zeros(len(parents), gradient.shape[1])
            folded.index_add_(0, left[kept], gradient * weight[kept])
            folded.index_add_(0, right[kept], gradient * (1 - weight[kept]))
            pull_back_parents(folded, torch.arange(len(parents), device=rows.device))

        return self._mix_columns(torch.lerp(similarities[right], similarities[left], weight)), pull_back

    def _mix_columns(self, similarities: Tensor) -> Tensor:
        """(T, originals) -> (T, N)."""
        tile, originals = similarities.shape
        mixed = similarities.new_empty(tile, self.size)
        mixed[:, :originals] = similarities
        right = similarities.gather(1, self._right.expand(tile, -1))
        torch.lerp(right, similarities.gather(1, self._left.expand(tile, -1)), self._alpha, out=mixed[:, originals:])
        return mixed

    def _fold_columns(self, gradient: Tensor) -> Tensor:
        """(T, N) -> (T, originals): the transpose of `_mix_columns`."""
        originals = self.size - len(self._alpha)
        folded, virtual = gradient[:, :originals].clone(), gradient[:, originals:]
        folded.index_add_(1, self._left, virtual * self._alpha)
        folded.index_add_(1, self._right, virtual * (1 - self._alpha))
        return folded
