"""A memory of embeddings of earlier batches, which enlarges the database that a batch is ranked in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shortlist.ranking.inputs import check_count


class EmbeddingMemory(nn.Module):
    """The last embeddings of earlier batches, and their labels. They have no gradient.

    Everything is in buffers, so a checkpoint of the loss contains the memory.

    Args:
        size: Number of embeddings, at least the batch size.
        dim: Number of dimensions.
    """

    embeddings: Tensor
    labels: Tensor
    stored: Tensor  # number of embeddings that were ever stored

    def __init__(self, size: int, dim: int):
        super().__init__()
        check_count(size, "size of a memory")
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("stored", torch.zeros((), dtype=torch.int64))

    def items(self) -> tuple[Tensor, Tensor]:
        """Return the embeddings, (M, d), and the labels, (M,), that the memory holds."""
        filled = min(int(self.stored), len(self.labels))
        return self.embeddings[:filled], self.labels[:filled]

    @torch.no_grad()
    def store(self, embeddings: Tensor, labels: Tensor) -> None:
        """Store a batch in place of the oldest embeddings."""
        if len(labels) > len(self.labels):
            raise ValueError(
                f"A memory of size {len(self.labels)} cannot hold a batch of {len(labels)}: increase its size."
            )
        places = (self.stored + torch.arange(len(labels), device=labels.device)) % len(self.labels)
        self.embeddings[places] = embeddings.to(self.embeddings.dtype)
        self.labels[places] = labels.long()
        self.stored += len(labels)

    def extra_repr(self) -> str:
        return f"size={len(self.labels)}, dim={self.embeddings.shape[1]}"
