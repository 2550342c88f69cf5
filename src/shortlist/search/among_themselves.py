"""The exact nearest neighbours of vectors among themselves: each product is computed once and serves both.

What products have to be compared with is known from the start: the similarity that, by a sample of the vectors, a
little more than k of all will reach. Only those are looked at again. Where the sample was wrong, a query is done over.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shortlist.search.vectors import Progress, Vectors, blocks

SIDE = 4_096  # of a block: 64 MB of similarities; below 65,536, or places in it would need more than 16 bits
SAMPLE = 4_096  # vectors that the bars come from
ROOM = 1.5  # times k: for what reaches the bar; with less, the answer would not fit where the candidates were

Ints = NDArray[np.integer]


def candidates(vectors: Vectors, k: int, progress: Progress | None = None) -> Candidates:
    """At least the k nearest of each vector, but of those that `Candidates.few` names."""
    like = torch.empty(0)
    number = len(vectors)
    found = Candidates(_bars(vectors, k), k)
    products = torch.empty(min(SIDE, number) ** 2)  # used again and again: new memory costs more than what is put there
    done = 0
    for row, some in blocks([vectors], SIDE, like):
        for later, block in blocks([vectors[row:]], SIDE, like):
            column = row + later
            similarities = products[: len(some) * len(block)].view(len(some), len(block))
            found.take(row, column, torch.mm(some, block.T, out=similarities).numpy())
            done += len(some) * len(block) * (2 if later else 1)
            if progress is not None:
                progress(done, number * number)
    return found


def _bars(vectors: Vectors, k: int) -> NDArray[np.float32]:
    """(n,) what about k of all vectors reach, and rather more than fewer: by two standard deviations of the sample."""
    like, number = torch.empty(0), len(vectors)
    chosen = np.unique(np.linspace(0, number - 1, min(SAMPLE, number)).astype(np.int64))
    sample = torch.cat([block for _, block in blocks([vectors[chosen]], SIDE, like)])
    share = k * len(sample) / number
    rank = min(len(sample), int(np.ceil(share if len(sample) == number else share + 2 * share**0.5 + 1)))
    bars = [(block @ sample.T).topk(rank, sorted=False).values.amin(1) for _, block in blocks([vectors], SIDE, like)]
    return torch.cat(bars).numpy()


class Candidates:
    """What reaches the bar of each query, as it is found; where there is no room for more, the best k are kept.

    They lie where the answer will: of 4 + 4 bytes each, half as many again as k take what k of 4 + 8 bytes do.
    """

    def __init__(self, bars: NDArray[np.float32], k: int) -> None:
        self.bars, self.k = bars, k
        self.room = int(ROOM * k) + 64
        self.memory = torch.empty(len(bars), 2 * self.room)
        self.values = self.memory[:, : self.room].numpy()
        self.rows = self.memory[:, self.room :].view(torch.int32).numpy()
        self.counts = np.zeros(len(bars), dtype=np.int64)

    def take(self, row: int, column: int, similarities: NDArray[np.float32]) -> None:
        """Look at a block of similarities, (a, b), of the vectors from `row` on and those from `column` on."""
        here, there = (
            self.bars[first : first + size] for first, size in zip((row, column), similarities.shape, strict=True)
        )
        reached = torch.from_numpy(similarities) >= torch.from_numpy(here)[:, None]
        if row != column:
            reached |= torch.from_numpy(similarities) >= torch.from_numpy(there)
        places = np.flatnonzero(reached.numpy())
        values = similarities.ravel()[places]
        left = (places // similarities.shape[1]).astype(np.uint16)
        right = (places - left.astype(np.int64) * similarities.shape[1]).astype(np.uint16)
        if row == column:
            self._append(row, left, right.astype(np.int64) + column, values)
            return
        mine = values >= here[left]
        self._append(row, left[mine], right[mine].astype(np.int64) + column, values[mine])
        theirs = np.flatnonzero(values >= there[right])
        order = theirs[right[theirs].argsort(kind="stable")]  # of 16 bits: a radix sort
        self._append(column, right[order], left[order].astype(np.int64) + row, values[order])

    def _append(self, first: int, query: Ints, rows: Ints, values: NDArray[np.float32]) -> None:
        """More candidates, those of one query beside each other; `query` counts from `first`."""
        number = np.bincount(query)
        counts = self.counts[first : first + len(number)]
        starts = number.cumsum() - number
        full = np.flatnonzero(counts + number > self.room)
        for each in full.tolist():
            some = slice(starts[each], starts[each] + number[each])
            self._keep_best(first + each, rows[some], values[some])
        if len(full):
            kept = ~np.isin(query, full)
            query, rows, values = query[kept], rows[kept], values[kept]
            number[full] = 0
            starts = number.cumsum() - number
        place = np.arange(len(query)) + (counts - starts)[query]
        at = (query.astype(np.int64) + first) * 2 * self.room + place
        self.memory.view(-1).numpy()[at] = values
        self.memory.view(torch.int32).view(-1).numpy()[at + self.room] = rows
        counts += number

    def _keep_best(self, query: int, rows: Ints, values: NDArray[np.float32]) -> None:
        count = self.counts[query]
        all_values = np.concatenate((self.values[query, :count], values))
        all_rows = np.concatenate((self.rows[query, :count], rows))
        best = np.argpartition(all_values, -self.k)[-self.k :]
        self.values[query, : self.k], self.rows[query, : self.k] = all_values[best], all_rows[best]
        self.counts[query] = self.k
        self.bars[query] = all_values[best].min()

    @property
    def few(self) -> NDArray[np.int64]:
        """Queries of which fewer than k were found."""
        return np.flatnonzero(self.counts < self.k)

    def best(self) -> tuple[Tensor, Tensor]:
        """The best k of each, (n, k), in no order; the candidates are no more."""
        first = self.k + self.k % 2  # of the rows, which are of 8 bytes now
        values, rows = self.memory[:, : self.k], self.memory[:, first : first + 2 * self.k].view(torch.int64)
        for start in range(0, len(values), SIDE):
            some = slice(start, start + SIDE)
            theirs = torch.from_numpy(self.values[some])
            theirs[torch.arange(self.room) >= torch.from_numpy(self.counts[some])[:, None]] = -torch.inf
            found = theirs.topk(self.k, sorted=False)
            chosen = torch.from_numpy(self.rows[some]).gather(1, found.indices)
            values[some], rows[some] = found.values, chosen
        return values, rows
