"""Tiles of the similarity matrix, and the backward pass from the gradient of a tile to the embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shortlist.ranking.scratch import Scratch
from shortlist.ranking.simix import VirtualBatch

Rows = Tensor | slice
"""A subset of the rows of a tile: indices of shape (R,), or a slice, which avoids a copy."""

Gradients = list[tuple[Tensor, Rows]]
"""Gradients of shape (R, N) at subsets of the rows of a tile, each dense or CSR, and these rows."""

PullBack = Callable[[Gradients], None]
"""Backward pass of a tile: adds the contribution of the tile's gradients to the gradients of the embeddings."""


class Similarities(Protocol):
    """The similarity matrix of shape (Q, N), which exists only as tiles."""

    size: int  # N, number of database items
    device: torch.device
    dtype: torch.dtype

    def tile(self, rows: Tensor, scratch: Scratch) -> tuple[Tensor, PullBack]:
        """Compute the similarities of some queries to every database item.

        Args:
            rows: Query indices of shape (T,).
            scratch: Buffers to compute in.

        Returns:
            Similarities of shape (T, N), which the caller may overwrite, and the backward pass of the tile.
        """
        ...


class DotProducts:
    """Dot products of queries and database items.

    Gradients accumulate in `query_gradient` and `database_gradient`. Without a separate database, both are the same
    tensor. A gradient that is not needed is None.

    Args:
        queries: Queries of shape (Q, d).
        database: Separate database of shape (N, d). If None, the queries are the database.
        needs_gradient: Whether the queries and the database need a gradient.
    """

    def __init__(
        self, queries: Tensor, database: Tensor | None = None, *, needs_gradient: Sequence[bool] = (True, True)
    ):
        self._queries, self._database = queries, queries if database is None else database
        self.size, self.device, self.dtype = len(self._database), queries.device, queries.dtype
        self.query_gradient = torch.zeros_like(queries) if needs_gradient[0] else None
        self.database_gradient = self.query_gradient
        if database is not None:
            self.database_gradient = torch.zeros_like(database) if needs_gradient[1] else None

    def tile(self, rows: Tensor, scratch: Scratch) -> tuple[Tensor, PullBack]:
        queries = self._queries[rows]

        def pull_back(gradients: Gradients) -> None:
            # The columns of a CSR gradient are neither sorted nor distinct. Products do not need that.
            with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
                for gradient, subset in gradients:
                    self._add(gradient, rows[subset], queries[subset])

        out = scratch("similarities", len(rows), self.size)
        return torch.mm(queries, self._database.T, out=out), pull_back

    def _add(self, gradient: Tensor, rows: Tensor, queries: Tensor) -> None:
        """Add the contribution of a gradient at the similarities of some queries, (R, N)."""
        if self.query_gradient is not None and self._is_whole(gradient):
            # A single product serves every item both as a query and as a database item.
            square = torch.empty_like(gradient).index_copy_(0, rows, gradient)
            self.query_gradient.addmm_(square + square.t(), self._queries)
            return
        if self.query_gradient is not None:
            self.query_gradient.index_add_(0, rows, gradient @ self._database)
        if self.database_gradient is not None:
            self.database_gradient.addmm_(gradient.t(), queries)

    def _is_whole(self, gradient: Tensor) -> bool:
        """Return whether this is the dense gradient at all similarities of a batch to itself."""
        itself = self._database is self._queries
        return itself and gradient.layout is torch.strided and len(gradient) == self.size


class MixedProducts:
    """Similarities of a batch extended by SiMix's virtual examples, which are both queries and database items.

    Item i of the extended batch is weight[i] * left[i] + (1 - weight[i]) * right[i]; an original item is its own
    parent. The rows and columns of a tile are mixtures of those of the parents, and the backward pass applies the
    transposed mixture. Hence matrix products are needed for the original embeddings only.

    Args:
        embeddings: Original embeddings of shape (B, d).
        virtual: V virtual examples; the extended batch has N = B + V items.
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
        parents, parent_row = torch.unique(self._parents[:, rows], return_inverse=True)  # (2, T) rows among the parents
        weight = self._weight[rows]
        similarities, pull_back_parents = self._products.tile(parents, scratch)
        left, right = (
            torch.index_select(similarities, 0, side, out=scratch(name, len(rows), self._originals))
            for name, side in zip(("left", "right"), parent_row, strict=True)
        )
        mixed = self._mix_columns(torch.lerp(right, left, weight.unsqueeze(1), out=left), scratch)

        def pull_back(gradients: Gradients) -> None:
            folded = scratch("folded", len(parents), self._originals).zero_()
            for gradient, subset in gradients:
                if gradient.layout is torch.strided:
                    self._fold_dense(gradient, parent_row[:, subset], weight[subset], folded, scratch)
                else:
                    self._fold_sparse(gradient, parent_row[:, subset], weight[subset], folded)
            pull_back_parents([(folded, slice(None))])

        return mixed, pull_back

    def _mix_columns(self, similarities: Tensor, scratch: Scratch) -> Tensor:
        """Extend similarities to the originals, (T, B), to the whole extended batch, (T, N)."""
        tile = len(similarities)
        mixed = scratch("mixed", tile, self.size)
        mixed[:, : self._originals] = similarities
        left, right = (
            torch.gather(similarities, 1, side.expand(tile, -1), out=scratch(name, tile, len(side)))
            for name, side in zip(("left column", "right column"), self._pairs, strict=True)
        )
        torch.lerp(right, left, self._alphas, out=mixed[:, self._originals :])
        return mixed

    def _fold_dense(
        self, gradient: Tensor, parent_row: Tensor, weight: Tensor, folded: Tensor, scratch: Scratch
    ) -> None:
        """Add a dense gradient, (R, N), to the gradient at the parents of its rows, `folded`, (parents, B)."""
        virtual = gradient[:, self._originals :]
        columns = gradient[:, : self._originals]
        share = scratch("share", *virtual.shape)
        for side, alphas in zip(self._pairs, (self._alphas, 1 - self._alphas), strict=True):
            columns.index_add_(1, side, torch.mul(virtual, alphas, out=share))
        share = scratch("share", *columns.shape)
        for side, part in zip(parent_row, (weight, 1 - weight), strict=True):
            folded.index_add_(0, side, torch.mul(columns, part.unsqueeze(1), out=share))

    def _fold_sparse(self, gradient: Tensor, parent_row: Tensor, weight: Tensor, folded: Tensor) -> None:
        """Add a CSR gradient: each entry is shared by the two parents of its row and the two of its column."""
        row, column, value = gradient.crow_indices().diff(), gradient.col_indices(), gradient.values()
        row, alpha = torch.repeat_interleave(row), self._weight[column]
        for side, part in zip(parent_row, (weight, 1 - weight), strict=True):
            start, share = side[row] * self._originals, part[row] * value
            folded.view(-1).index_add_(0, start + self._parents[0, column], share * alpha)
            folded.view(-1).index_add_(0, start + self._parents[1, column], share * (1 - alpha))
