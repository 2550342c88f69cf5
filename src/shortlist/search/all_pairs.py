"""Candidates for the exact nearest neighbours of vectors among themselves, where each inner product is computed once.

A similarity threshold per vector is estimated from a sample, such that slightly more than k vectors are expected to
reach it. Only those are kept as candidates. Vectors with fewer than k candidates have to be searched again.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.progress import Progress
from shortlist.search.vectors import Vectors, blocks

BLOCK_SIZE = 4_096  # rows and columns: 64 MB of similarities; below 65,536, so that positions fit into 16 bits
SAMPLE_SIZE = 4_096  # vectors from which the thresholds are estimated
CAPACITY_FACTOR = 1.5  # candidates per vector, times k; with less, the result would not fit into their memory

Ints = NDArray[np.integer]


def find_candidates(vectors: Vectors, k: int, progress: Progress | None = None) -> Candidates:
    """Find at least the k nearest neighbours of each vector, except for those in `Candidates.incomplete`.

    Args:
        vectors: (n, d).
        k: Number of neighbours, at most n.
        progress: Called with the number of inner products done and the total number.
    """
    like = torch.empty(0)
    number = len(vectors)
    candidates = Candidates(_thresholds(vectors, k), k)
    buffer = torch.empty(min(BLOCK_SIZE, number) ** 2)  # reused, since allocating memory is slower than filling it
    done = 0
    for row, left in blocks([vectors], BLOCK_SIZE, like):
        for offset, right in blocks([vectors[row:]], BLOCK_SIZE, like):
            similarities = buffer[: len(left) * len(right)].view(len(left), len(right))
            candidates.update(row, row + offset, torch.mm(left, right.T, out=similarities).numpy())
            done += len(left) * len(right) * (2 if offset else 1)
            if progress is not None:
                progress(done, number * number)
    return candidates


def _thresholds(vectors: Vectors, k: int) -> NDArray[np.float32]:
    """Estimate the similarity that k of all vectors reach, (n,), lowered by two standard deviations of the sample."""
    like, number = torch.empty(0), len(vectors)
    rows = np.unique(np.linspace(0, number - 1, min(SAMPLE_SIZE, number)).astype(np.int64))
    sample = torch.cat([block for _, block in blocks([vectors[rows]], BLOCK_SIZE, like)])
    expected = k * len(sample) / number
    rank = min(len(sample), int(np.ceil(expected if len(sample) == number else expected + 2 * expected**0.5 + 1)))
    thresholds = [
        (block @ sample.T).topk(rank, sorted=False).values.amin(1) for _, block in blocks([vectors], BLOCK_SIZE, like)
    ]
    return torch.cat(thresholds).numpy()


class Candidates:
    """Vectors that reach the threshold of each query. When the memory of a query is full, its best k are kept.

    A candidate takes 4 + 4 bytes, so that 1.5 k candidates take the memory of k results of 4 + 8 bytes: `best` stores
    the results in place of the candidates.

    Args:
        thresholds: Initial threshold per query, (n,).
        k: Number of neighbours to find.
    """

    def __init__(self, thresholds: NDArray[np.float32], k: int) -> None:
        self.thresholds, self.k = thresholds, k
        self.capacity = int(CAPACITY_FACTOR * k) + 64
        self.memory = torch.empty(len(thresholds), 2 * self.capacity)
        self.values = self.memory[:, : self.capacity].numpy()
        self.rows = self.memory[:, self.capacity :].view(torch.int32).numpy()
        self.counts = np.zeros(len(thresholds), dtype=np.int64)

    def update(self, row: int, column: int, similarities: NDArray[np.float32]) -> None:
        """Add the candidates of a block of similarities (a, b) between vectors from `row` on and from `column` on."""
        row_thresholds = self.thresholds[row : row + similarities.shape[0]]
        column_thresholds = self.thresholds[column : column + similarities.shape[1]]
        reached = torch.from_numpy(similarities) >= torch.from_numpy(row_thresholds)[:, None]
        if row != column:
            reached |= torch.from_numpy(similarities) >= torch.from_numpy(column_thresholds)
        positions = np.flatnonzero(reached.numpy())
        values = similarities.ravel()[positions]
        left = (positions // similarities.shape[1]).astype(np.uint16)
        right = (positions - left.astype(np.int64) * similarities.shape[1]).astype(np.uint16)
        if row == column:
            self._append(row, left, right.astype(np.int64) + column, values)
            return
        for_rows = values >= row_thresholds[left]
        self._append(row, left[for_rows], right[for_rows].astype(np.int64) + column, values[for_rows])
        for_columns = np.flatnonzero(values >= column_thresholds[right])
        order = for_columns[right[for_columns].argsort(kind="stable")]  # 16-bit integers: a radix sort
        self._append(column, right[order], left[order].astype(np.int64) + row, values[order])

    def _append(self, first: int, query: Ints, rows: Ints, values: NDArray[np.float32]) -> None:
        """Append candidates that are sorted by query, where query 0 is the vector `first`."""
        new = np.bincount(query)
        counts = self.counts[first : first + len(new)]
        starts = new.cumsum() - new
        full = np.flatnonzero(counts + new > self.capacity)
        for each in full.tolist():
            its = slice(starts[each], starts[each] + new[each])
            self._keep_best(first + each, rows[its], values[its])
        if len(full):
            remaining = ~np.isin(query, full)
            query, rows, values = query[remaining], rows[remaining], values[remaining]
            new[full] = 0
            starts = new.cumsum() - new
        slot = np.arange(len(query)) + (counts - starts)[query]
        position = (query.astype(np.int64) + first) * 2 * self.capacity + slot
        self.memory.view(-1).numpy()[position] = values
        self.memory.view(torch.int32).view(-1).numpy()[position + self.capacity] = rows
        counts += new

    def _keep_best(self, query: int, rows: Ints, values: NDArray[np.float32]) -> None:
        """Keep the best k of a query's candidates and these, and raise its threshold."""
        count = self.counts[query]
        all_values = np.concatenate((self.values[query, :count], values))
        all_rows = np.concatenate((self.rows[query, :count], rows))
        best = np.argpartition(all_values, -self.k)[-self.k :]
        self.values[query, : self.k], self.rows[query, : self.k] = all_values[best], all_rows[best]
        self.counts[query] = self.k
        self.thresholds[query] = all_values[best].min()

    @property
    def incomplete(self) -> NDArray[np.int64]:
        """Queries with fewer than k candidates."""
        return np.flatnonzero(self.counts < self.k)

    def best(self) -> tuple[Tensor, Tensor]:
        """Return similarities and rows of the best k per query, (n, k) each, unsorted. Overwrites the candidates."""
        first = self.k + self.k % 2  # the 8-byte rows start at an even 4-byte position
        values, rows = self.memory[:, : self.k], self.memory[:, first : first + 2 * self.k].view(torch.int64)
        for start in range(0, len(values), BLOCK_SIZE):
            block = slice(start, start + BLOCK_SIZE)
            similarities = torch.from_numpy(self.values[block])
            similarities[torch.arange(self.capacity) >= torch.from_numpy(self.counts[block])[:, None]] = -torch.inf
            found = similarities.topk(self.k, sorted=False)
            chosen = torch.from_numpy(self.rows[block]).gather(1, found.indices)
            values[block], rows[block] = found.values, chosen
        return values, rows
