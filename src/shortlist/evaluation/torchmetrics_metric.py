"""`retrieval_metrics` as a torchmetrics `Metric`, for training loops that collect embeddings batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shortlist.extras import extra
from shortlist.ranking.inputs import check_k
from shortlist.ranking.metrics import retrieval_metrics

with extra("torchmetrics", "RetrievalMetrics"):
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat


class RetrievalMetrics(Metric):
    """Exact retrieval metrics of all embeddings since the last `reset`; each is a query for all others.

    The embeddings and labels are the state. torchmetrics gathers them from all processes before `compute`, so that the
    result does not depend on the number of processes.

    Args:
        k: Cut-offs of r@k and recall@k.
        **kwargs: Passed to `torchmetrics.Metric`, for example `compute_on_cpu=True`, which keeps the state on the CPU.

    Example:
        >>> metric = RetrievalMetrics(k=1)
        >>> metric.update(torch.eye(2), torch.tensor([0, 1]))
        >>> metric.update(torch.eye(2), torch.tensor([0, 1]))
        >>> metric.compute()["r@1"]
        tensor(1., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    embeddings: list[Tensor]
    labels: list[Tensor]

    def __init__(self, k: int | Sequence[int] = (1, 2, 4, 8), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = check_k(k)
        self.add_state("embeddings", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Add a batch of embeddings, (B, d), and their labels, (B,)."""
        if len(embeddings) != len(labels):
            raise ValueError(f"{len(embeddings)} embeddings but {len(labels)} labels: each row needs one label")
        self.embeddings.append(embeddings.detach())
        self.labels.append(labels)

    def compute(self) -> dict[str, Tensor]:
        """Compute all metrics of `retrieval_metrics` as scalar tensors."""
        found = retrieval_metrics(dim_zero_cat(self.embeddings), dim_zero_cat(self.labels), self.k)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}
