"""RS@k: the recall@k surrogate loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shortlist.ranking.inputs import check_k, check_temperature
from shortlist.ranking.losses import RankingLoss, ranking_loss
from shortlist.ranking.precision import computed_dtype
from shortlist.ranking.pruning import flat_from
from shortlist.ranking.schedules import MedianRank, Schedule
from shortlist.ranking.sharing import current_sharing
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.tail import LinearTail
from shortlist.ranking.tiles import Engine, Ranks


@dataclass(frozen=True)
class RecallHead:
    """1 - smooth recall@k, averaged over k. Each positive contributes sigmoid((k - rank) / rank_temperature).

    The sum over the positives is clipped at k and divided by min(k, |P|), because at most k of the positives can be
    among the first k results. Positives beyond the head's reach contribute exactly 0.

    Args:
        k: Cut-offs to average over.
        rank_temperature: Temperature tau_1 of the sigmoid on ranks.
    """

    uses_among_positives: ClassVar[bool] = False

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
    *,
    tail: LinearTail | None = None,
) -> Tensor:
    """Compute the recall@k surrogate loss RS@k of a batch that is its own database.

    Args:
        embeddings: Embeddings of shape (B, d). They are not normalised here.
        labels: Integer labels of shape (B,). Items with equal labels are positives of each other.
        k: One or several cut-offs to average over. The paper uses 1, 2, 4, 8, 16, and 1, 2, 4, 8, 12, ..., 32 with
            SiMix.
        rank_temperature: Temperature tau_1 of the sigmoid that decides whether a rank is within the first k.
        similarity_temperature: Temperature tau_2 of the sigmoid that decides whether an item is ahead of a positive.
        virtual: SiMix's virtual examples.
        count_query: Whether a query competes in its own ranking, as in the authors' released code.
        engine: Execution settings. Default: chosen by device and batch size.
        tail: Upper bound of the step function that takes the place of the sigmoid of temperature tau_2.

    Returns:
        The loss, a scalar; 0 if the batch contains no positive pair.

    Raises:
        ValueError: If an input has the wrong shape, device or value.
        TypeError: If an input has the wrong type or dtype.

    Example:
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)  # two pairs of equal vectors: a perfect ranking,
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
        tail=tail,
    )


class _RankCollector:
    """Head that collects the ranks of all positives."""

    def __init__(self) -> None:
        self.ranks: list[Tensor] = []

    def __call__(self, ranks: Ranks) -> Tensor:
        self.ranks.append(ranks.overall[ranks.present])
        return torch.zeros_like(ranks.overall[:, 0])

    def reach(self, width: float) -> float:
        return math.inf


@torch.no_grad()
def median_rank(embeddings: Tensor, labels: Tensor, similarity_temperature: float = 0.01, **options: Any) -> float:
    """Compute the median of the smooth ranks of all positives of all queries; 0 if there is no positive.

    RS@k has no gradient if nearly all ranks exceed the largest k by many rank temperatures.

    Args:
        embeddings: Embeddings of shape (B, d).
        labels: Integer labels of shape (B,).
        similarity_temperature: Temperature tau_2 of the sigmoid on similarity differences.
        options: Further arguments of `ranking_loss`.

    Example:
        >>> apart = torch.eye(2).repeat_interleave(2, dim=0)
        >>> median_rank(apart, torch.tensor([5, 5, 9, 9]))
        1.0
    """
    collector = _RankCollector()
    ranking_loss(collector, embeddings, labels, similarity_temperature=similarity_temperature, **options)
    none = embeddings.new_empty(0, dtype=computed_dtype(embeddings))
    ranks = current_sharing().concatenate(torch.cat([none, *collector.ranks]))
    return ranks.median().item() if len(ranks) else 0.0


class RecallAtKLoss(RankingLoss):
    """RS@k as a module with the call signature of pytorch-metric-learning's losses.

    For the wrappers `CrossBatchMemory` and `DistributedLossWrapper` of that library, import it from
    `shortlist.pytorch_metric_learning`. See `recall_at_k_loss` and `RankingLoss` for the other arguments.

    A loss with a `Schedule` needs the attribute `progress`, the share of training that has passed. Set it before every
    step; the training loop of shortlist does so.

    Args:
        rank_temperature: Temperature tau_1, its schedule, or `MedianRank()`, which follows the ranks of the batch.
        simix: Generator of virtual examples for every batch, `SiMix()`, or None.

    Example:
        >>> embeddings = torch.nn.functional.normalize(torch.randn(8, 16)).requires_grad_()
        >>> value = RecallAtKLoss(k=(1, 2), simix=SiMix())(embeddings, torch.arange(8) // 4)
        >>> value.backward()
        >>> embeddings.grad.shape
        torch.Size([8, 16])
    """

    head: RecallHead

    def __init__(
        self,
        k: int | Sequence[int] = (1, 2, 4, 8, 16),
        rank_temperature: float | Schedule | MedianRank = 1.0,
        similarity_temperature: float = 0.01,
        simix: SiMix | None = None,
        count_query: bool = False,
        engine: Engine | None = None,
        *,
        tail: LinearTail | None = None,
    ):
        final = rank_temperature.end if isinstance(rank_temperature, Schedule | MedianRank) else rank_temperature
        head = RecallHead(check_k(k), final)
        super().__init__(head, similarity_temperature, simix, count_query, engine, tail=tail)
        self.rank_temperature = rank_temperature
        self.progress: float | None = None

    def extra_repr(self) -> str:
        changes = isinstance(self.rank_temperature, Schedule | MedianRank)
        return super().extra_repr() + (f", rank_temperature={self.rank_temperature}" if changes else "")

    def head_for(self, batch: Mapping[str, Any]) -> RecallHead:
        temperature = self.rank_temperature
        if isinstance(temperature, MedianRank):
            temperature = max(temperature.end, temperature.share * median_rank(**batch))
        elif isinstance(temperature, Schedule):
            if self.progress is None:
                raise ValueError(
                    "A loss with a Schedule must know the progress of training: before each step, set its attribute "
                    "`progress` to the share of training that has passed, from 0 to 1."
                )
            temperature = temperature(self.progress)
        return replace(self.head, rank_temperature=temperature)
