"""SiMix: virtual examples between items of a batch, represented by pairs of items and mixing weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_count, check_labels
from shortlist.ranking.relevance import SharedLabel


class VirtualBatch(NamedTuple):
    """V virtual examples of a batch.

    Virtual example v is alphas[v] * x + (1 - alphas[v]) * z, where (x, z) = pairs[v] are two items with the same label.
    Its embedding is never computed, because its similarities are the same mixture of those of x and z.
    """

    pairs: Tensor  # (V, 2) indices of items of the batch
    alphas: Tensor  # (V,) mixing weights from 0 to 1

    def shared_labels(self, labels: Tensor) -> Tensor:
        """Return the labels of each virtual example: those that both of its items have.

        Args:
            labels: Labels of the batch, of shape (B, L), padded with negative numbers.

        Returns:
            Labels of shape (V, L), padded with -1.
        """
        left, right = labels[self.pairs].unbind(1)
        return left.masked_fill((left[:, :, None] != right[:, None]).all(2), -1)

    def check(self, labels: Tensor) -> None:
        """Require valid shapes, dtypes, devices and values, and pairs of items with equal labels, or a shared one.

        Args:
            labels: Integer labels of the batch, of shape (B,), or (B, L) for items with several labels.
        """
        pairs, alphas = self
        if pairs.ndim != 2 or pairs.shape[1] != 2 or alphas.shape != pairs.shape[:1]:
            shapes = f"{tuple(pairs.shape)} and {tuple(alphas.shape)}"
            raise ValueError(f"A virtual batch needs pairs (V, 2) and alphas (V,), got {shapes}.")
        check_labels(pairs.flatten(), "Virtual pairs")
        for each in self:
            if each.device != labels.device:
                raise ValueError(f"The virtual batch is on {each.device} but the labels on {labels.device}.")
        if not len(pairs):
            return
        if not 0 <= int(pairs.min()) <= int(pairs.max()) < len(labels):
            raise ValueError(f"Virtual pairs contain an index outside the batch 0..{len(labels) - 1}.")
        if not ((alphas >= 0) & (alphas <= 1)).all():
            raise ValueError("Virtual alphas must lie between 0 and 1.")
        if labels.ndim > 1:
            left = self._replace(pairs=pairs.long()).shared_labels(labels).amax(1)
            self._check_labels(left, left.clamp(min=0))
        else:
            self._check_labels(*labels[pairs.long()].unbind(1))

    def _check_labels(self, left: Tensor, right: Tensor) -> None:
        mixed = (left != right).nonzero()
        if len(mixed):
            raise ValueError(
                f"Virtual pair {mixed[0].item()} mixes two labels: use VirtualBatchWithNegatives if it is to be a "
                "negative of the other classes."
            )


class VirtualBatchWithNegatives(VirtualBatch):
    """Virtual examples, some of which mix two labels.

    Such an example is a negative of the queries of all other labels. It is neither a positive nor a query, and the
    queries of its two labels ignore it.
    """

    def _check_labels(self, left: Tensor, right: Tensor) -> None:
        """Accept all pairs."""

    def shared_labels(self, labels: Tensor) -> Tensor:
        """Raise a ValueError: it is not defined which queries would ignore an example."""
        raise ValueError("Virtual negatives need items with one label each: do not use them with labels of (B, L).")


class SiMix:
    """Generator of virtual batches: virtual examples for each unordered pair of positives, with random alphas.

    The alphas are uniform in (0, 1). A class with m items yields m (m - 1) / 2 virtual examples per alpha. If items
    have several labels, each pair that shares a label is mixed, and the virtual example has the labels that they share.

    Args:
        generator: Random number generator of the alphas, on any device. Default: torch's default generator of the
            labels' device.
        alphas: Number of virtual examples per pair. The paper uses one.
        negatives: Number of virtual negatives per item of the batch: mixtures of the item with random items of other
            labels. The paper uses none.

    Example:
        >>> SiMix()(torch.tensor([7, 7, 3, 7])).pairs.tolist()
        [[0, 1], [0, 3], [1, 3]]
    """

    def __init__(self, generator: torch.Generator | None = None, alphas: int = 1, negatives: int = 0):
        self.generator = generator
        self.alphas = check_count(alphas, "alphas")
        self.negatives = check_count(negatives, "negatives", least=0)

    def __call__(self, labels: Tensor) -> VirtualBatch:
        """Generate the virtual batch for integer labels of shape (B,), or (B, L) for items with several labels."""
        check_labels(labels, several=True)
        labels = labels.long()
        if labels.ndim > 1:
            return self._for_several_labels(labels)
        members = labels.argsort(stable=True)
        position = torch.arange(len(labels), device=labels.device)
        by_label = labels[members]
        end = torch.searchsorted(by_label, by_label, right=True)
        partners = end - position - 1  # later items of the same class
        left = torch.repeat_interleave(position, partners)
        right = left + 1 + torch.arange(len(left), device=labels.device) - (partners.cumsum(0) - partners)[left]
        pairs = torch.stack((left, right), dim=1).repeat_interleave(self.alphas, dim=0)
        if not self.negatives:
            return VirtualBatch(members[pairs], self._random(len(pairs), labels.device))
        start = torch.searchsorted(by_label, by_label)
        mixed = torch.cat((pairs, self._negative_pairs(start, end)))
        return VirtualBatchWithNegatives(members[mixed], self._random(len(mixed), labels.device))

    def _for_several_labels(self, labels: Tensor) -> VirtualBatch:
        if self.negatives:
            raise ValueError("Virtual negatives need items with one label each: do not use them with labels of (B, L).")
        relevance = SharedLabel(labels)
        rows = relevance.queries.sort().values
        others, present = relevance.positives(rows, max(relevance.counts, default=0))
        row, column = (present & (others > rows[:, None])).nonzero(as_tuple=True)
        pairs = torch.stack((rows[row], others[row, column]), dim=1).repeat_interleave(self.alphas, dim=0)
        return VirtualBatch(pairs, self._random(len(pairs), labels.device))

    def _negative_pairs(self, start: Tensor, end: Tensor) -> Tensor:
        """Pair every item with random items of other classes, given where its class starts and ends."""
        others = len(start) - (end - start)
        left = torch.arange(len(start), device=start.device)[others > 0].repeat_interleave(self.negatives)
        right = (self._random(len(left), start.device) * others[left]).long().minimum(others[left] - 1)
        return torch.stack((left, right + (end - start)[left] * (right >= start[left])), dim=1)  # skips its own class

    def _random(self, number: int, device: torch.device) -> Tensor:
        source = device if self.generator is None else self.generator.device
        return torch.rand(number, generator=self.generator, device=source, dtype=torch.float32).to(device)

    def __repr__(self) -> str:
        defaults = {"alphas": 1, "negatives": 0}
        changed = [f"{name}={getattr(self, name)}" for name in defaults if getattr(self, name) != defaults[name]]
        return f"SiMix({', '.join(changed)})"
