"""Tiles of similarities, and the way a gradient at a tile goes back to the embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shortlist.ranking.scratch import Scratch
from shortlist.ranking.simix import VirtualBatch

Rows = Tensor | slice
"""Some rows of a tile: their indices, (R,), or a slice, which costs no copy."""

Gradients = list[tuple[Tensor, Rows]]
"""Gradients at some rows of a tile, each (R, N), dense or CSR, and which rows."""

PullBack = Callable[[Gradients], None]
"""Takes the gradients at a tile and adds what follows from them to the embeddings' gradients."""


class Similarities(Protocol):
    """The (Q, N) matrix of similarities, of which only tiles ever exist."""

    size: int  # N, database items
    device: torch.device
    dtype: torch.dtype

    def tile(self, rows: Tensor, scratch: Scratch) -> tuple[Tensor, PullBack]:
        """Similarities of the queries `rows` to every database item, (T, N), free to be written to."""
        ...


class DotProducts:
    """s(q, x) = q . x between queries and a database; without one, the queries are each other's.

    Gradients gather in `query_gradient` and `database_gradient`: one buffer where there is no other database, None
    where nobody wants to know.
    """

    def __init__(self, queries: Tensor, database: Tensor | None = None, wanted: tuple[bool, bool] = (True, True)):
        self._queries, self._database = queries, queries if database is None else database
        self.size, self.device, self.dtype = len(self._database), queries.device, queries.dtype
        self.query_gradient = torch.zeros_like(queries) if wanted[0] else None
        self.database_gradient = self.query_gradient
        if database is not None:
            self.database_gradient = torch.zeros_like(database) if wanted[1] else None

    def tile(self, rows: Tensor, scratch: Scratch) -> tuple[Tensor, PullBack]:
        queries = self._queries[rows]

        def pull_back(gradients: Gradients) -> None:
            for gradient, kept in gradients:
                if self.query_gradient is not None:
                    self.query_gradient.index_add_(0, rows[kept], gradient @ self._database)
                if self.database_gradient is not None:
                    self.database_gradient.addmm_(gradient.t(), queries[kept])

        out = scratch("similarities", len(rows), self.size)
        return torch.mm(queries, self._database.T, out=out), pull_back


class MixedProducts:
    """Similarities of a batch and its virtual examples, each as query and as database item (SiMix).

    Item i of the expanded batch is weight[i] * left[i] + (1 - weight[i]) * right[i]; an original is its own parent.
    Rows and columns of a tile are mixed from those of the parents, and a gradient folds back by the same weights
    transposed, so that only the similarities and gradients of the originals ever meet the embeddings.
    """

    def __init__(self, embeddings: Tensor, virtual: VirtualBatch):
        self._products = DotProducts(embeddings)
        self.query_gradient = self.database_gradient = self._products.query_gradient
        self._pairs = virtual.pairs.T.contiguous()  # (2, V)
        self._alphas = virtual.alphas.to(embeddings.dtype)
        self._originals = len(embeddings)
        originals = torch.arange(self._originals, device=embeddings.device).expand(2, -1)
        self._parents = torch.cat((originals, self._pairs), dim=1)  # (2, N)
        self._weight = torch.cat((torch.ones_like(embeddings[:, 0]), self._alphas))  # (N,)
        self.size, self.device, self.dtype = len(self._weight), embeddings.device, embeddings.dtype

    def tile(self, rows: Tensor, scratch: Scratch) -> tuple[Tensor, PullBack]:
        parents, place = torch.unique(self._parents[:, rows], return_inverse=True)
        weight = self._weight[rows]
        similarities, pull_back_parents = self._products.tile(parents, scratch)
        left, right = (
            torch.index_select(similarities, 0, side, out=scratch(name, len(rows), self._originals))
            for name, side in zip(("left", "right"), place, strict=True)
        )
        mixed = self._mix_columns(torch.lerp(right, left, weight.unsqueeze(1), out=left), scratch)

        def pull_back(gradients: Gradients) -> None:
            folded = scratch("folded", len(parents), self._originals).zero_()
            for gradient, kept in gradients:
                if gradient.layout is torch.strided:
                    self._fold_dense(gradient, place[:, kept], weight[kept], folded, scratch)
                else:
                    self._fold_sparse(gradient, place[:, kept], weight[kept], folded)
            pull_back_parents([(folded, slice(None))])

        return mixed, pull_back

    def _mix_columns(self, similarities: Tensor, scratch: Scratch) -> Tensor:
        """(T, originals) -> (T, N)."""
        tile = len(similarities)
        mixed = scratch("mixed", tile, self.size)
        mixed[:, : self._originals] = similarities
        left, right = (
            torch.gather(similarities, 1, side.expand(tile, -1), out=scratch(name, tile, len(side)))
            for name, side in zip(("left column", "right column"), self._pairs, strict=True)
        )
        torch.lerp(right, left, self._alphas, out=mixed[:, self._originals :])
        return mixed

    def _fold_dense(self, gradient: Tensor, place: Tensor, weight: Tensor, folded: Tensor, scratch: Scratch) -> None:
        """Add a gradient, (R, N), to that at the parents of its rows, (parents, originals)."""
        virtual = gradient[:, self._originals :]
        columns = gradient[:, : self._originals]
        share = scratch("share", *virtual.shape)
        for side, alphas in zip(self._pairs, (self._alphas, 1 - self._alphas), strict=True):
            columns.index_add_(1, side, torch.mul(virtual, alphas, out=share))
        share = scratch("share", *columns.shape)
        for side, part in zip(place, (weight, 1 - weight), strict=True):
            folded.index_add_(0, side, torch.mul(columns, part.unsqueeze(1), out=share))

    def _fold_sparse(self, gradient: Tensor, place: Tensor, weight: Tensor, folded: Tensor) -> None:
        """The same for a CSR gradient: each entry goes to the two parents of its row and of its column."""
        row, column, value = gradient.crow_indices().diff(), gradient.col_indices(), gradient.values()
        row, alpha = torch.repeat_interleave(row), self._weight[column]
        for side, part in zip(place, (weight, 1 - weight), strict=True):
            start, share = side[row] * self._originals, part[row] * value
            folded.view(-1).index_add_(0, start + self._parents[0, column], share * alpha)
            folded.view(-1).index_add_(0, start + self._parents[1, column], share * (1 - alpha))
