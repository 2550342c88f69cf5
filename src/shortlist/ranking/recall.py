"""RS@k: the recall@k surrogate loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_k, check_temperature
from shortlist.ranking.losses import RankingLoss, ranking_loss
from shortlist.ranking.pruning import flat_from
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.tiles import Engine, Ranks


@dataclass(frozen=True)
class RecallHead:
    """1 - smooth recall@k, averaged over k: a positive counts by how far its rank is inside the first k.

    The sum over the positives is clipped at k and divided by min(k, |P|): with more than k positives, all that can be
    asked is that the first k results are positives. Positives past the head's reach add exactly 0.
    """

    k: tuple[int, ...]
    rank_temperature: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_k(self.k))
        check_temperature(self.rank_temperature, "rank_temperature")

    def __call__(self, ranks: Ranks) -> Tensor:
        k = torch.tensor(self.k, dtype=ranks.overall.dtype, device=ranks.overall.device)
        gap = (k - ranks.overall.unsqueeze(2)) / self.rank_temperature  # (T, P, K)
        flat = flat_from(gap.shape[1], gap.dtype)
        inside = torch.sigmoid(torch.threshold(gap, -flat, -torch.inf))
        found = (inside * ranks.present.unsqueeze(2)).sum(1).minimum(k)
        return 1 - (found / ranks.number.unsqueeze(1).minimum(k)).mean(1)

    def reach(self, width: float) -> float:
        return max(self.k) + width * self.rank_temperature


def recall_at_k_loss(
    embeddings: Tensor,
    labels: Tensor,
    k: int | Sequence[int] = (1, 2, 4, 8, 16),
    rank_temperature: float = 1.0,
    similarity_temperature: float = 0.01,
    virtual: VirtualBatch | None = None,
    count_query: bool = False,
    engine: Engine | None = None,
) -> Tensor:
    """RS@k of a batch that is its own database: a scalar, 0 without any positive pair.

    Args:
        embeddings: (B, d), used as given.
        labels: (B,) integers; equal means positive.
        k: cut-offs to average over. The paper: 1, 2, 4, 8, 16, and 1, 2, 4, 8, 12, ..., 32 with SiMix.
        rank_temperature: tau_1, of the sigmoid that counts a positive as inside the first k.
        similarity_temperature: tau_2, of the sigmoid that counts who is ahead of a positive.
        virtual: SiMix's virtual examples.
        count_query: leave the query in its own ranking, as the authors' release does.
        engine: how to run; the default decides by itself.

    Raises:
        ValueError, TypeError: on bad input, with what is wrong and where.

    Example:
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)  # two pairs, each at one point: a perfect ranking,
        >>> recall_at_k_loss(apart, torch.tensor([5, 5, 9, 9]), k=(1, 2)).item()  # yet sigmoid(k - rank) < 1
        0.3844707...
    """
    return ranking_loss(
        RecallHead(check_k(k), rank_temperature),
        embeddings,
        labels,
        similarity_temperature=similarity_temperature,
        virtual=virtual,
        count_query=count_query,
        engine=engine,
    )


class RecallAtKLoss(RankingLoss):
    """RS@k as a module, with pytorch-metric-learning's call. Arguments as in `recall_at_k_loss`.

    Args:
        simix: draws virtual examples for every batch, `SiMix()`; None for none.

    Example:
        >>> embeddings = torch.nn.functional.normalize(torch.randn(8, 16)).requires_grad_()
        >>> value = RecallAtKLoss(k=(1, 2), simix=SiMix())(embeddings, torch.arange(8) // 4)
        >>> value.backward()
        >>> embeddings.grad.shape
        torch.Size([8, 16])
    """

    def __init__(
        self,
        k: int | Sequence[int] = (1, 2, 4, 8, 16),
        rank_temperature: float = 1.0,
        similarity_temperature: float = 0.01,
        simix: SiMix | None = None,
        count_query: bool = False,
        engine: Engine | None = None,
    ):
        super().__init__(
            RecallHead(check_k(k), rank_temperature), similarity_temperature, simix, count_query, engine=engine
        )
