"""Arguments that are not given have the documented defaults, and arguments that are given are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shortlist.ranking import (
    BinnedAPLoss,
    BlackboxAPLoss,
    Engine,
    RecallAtKLoss,
    SmoothAPLoss,
    binned_ap_loss,
    blackbox_ap_loss,
    recall_at_k_loss,
    smooth_ap_loss,
)
from tests.ranking.losses import unit, value_and_gradient

VECTORS, LABELS = unit(60, 4), torch.arange(60) // 20  # 19 positives, more than the largest k
RECALL = {"k": (1, 2, 4, 8, 16), "rank_temperature": 1.0, "similarity_temperature": 0.01}
SMOOTH_AP = {"similarity_temperature": 0.01, "count_query": False}
BLACKBOX = {"blackbox_lambda": 4.0, "margin": 0.02}


def of_module(kind: type[torch.nn.Module]) -> Callable[..., torch.Tensor]:
    return lambda vectors, labels, **settings: kind(**settings)(vectors, labels)


DEFAULTS = {
    "recall_at_k_loss": (recall_at_k_loss, {**RECALL, "count_query": False}),
    "RecallAtKLoss": (of_module(RecallAtKLoss), {**RECALL, "count_query": False}),
    "smooth_ap_loss": (smooth_ap_loss, SMOOTH_AP),
    "SmoothAPLoss": (of_module(SmoothAPLoss), SMOOTH_AP),
    "binned_ap_loss": (binned_ap_loss, {"bins": 20}),
    "BinnedAPLoss": (of_module(BinnedAPLoss), {"bins": 20}),
    "blackbox_ap_loss": (blackbox_ap_loss, BLACKBOX),
    "BlackboxAPLoss": (of_module(BlackboxAPLoss), BLACKBOX),
}


@pytest.mark.parametrize(("loss", "defaults"), DEFAULTS.values(), ids=DEFAULTS)
def test_defaults(loss: Callable[..., torch.Tensor], defaults: dict[str, Any]) -> None:
    """Value and gradient are those of the defaults, and differ from those of any other value of an argument."""
    value, gradient = value_and_gradient(loss, VECTORS, LABELS)
    again = value_and_gradient(loss, VECTORS, LABELS, **defaults)
    assert torch.equal(value, again[0])
    assert torch.equal(gradient, again[1])
    for name, default in defaults.items():
        changed = (
            default[:-1] if isinstance(default, tuple) else not default if isinstance(default, bool) else 2 * default
        )
        other = value_and_gradient(loss, VECTORS, LABELS, **{name: changed})
        assert (other[1] - gradient).abs().max() > 1e-6, name


@dataclass(frozen=True)
class Counting(Engine):
    runs: list[int] = field(default_factory=list)

    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        self.runs.append(1)
        return super().run(*args, **options)


@pytest.mark.parametrize("loss", [recall_at_k_loss, smooth_ap_loss, of_module(RecallAtKLoss), of_module(SmoothAPLoss)])
def test_the_given_engine_is_used(loss: Callable[..., torch.Tensor]) -> None:
    engine = Counting()
    loss(VECTORS, LABELS, engine=engine)
    assert engine.runs == [1]
