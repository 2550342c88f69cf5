"""The head of RS@k by itself."""

from __future__ import annotations

import math

import pytest
import torch

from shortlist.ranking import Ranks, RecallHead


def test_a_head_takes_any_sequence_of_k() -> None:
    assert RecallHead([1, 4], 1.0).k == (1, 4)  # type: ignore[arg-type]


def test_a_head_checks_its_settings() -> None:
    with pytest.raises(ValueError, match="k must contain positive integers, got 0"):
        RecallHead((0,), 1.0)
    with pytest.raises(ValueError, match="rank_temperature must be a finite number above 0, got 0"):
        RecallHead((1,), 0)


def test_reach() -> None:
    assert RecallHead((1, 8, 4), 0.5).reach(10) == 8 + 10 * 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_positives_that_are_almost_out_of_reach_count(dtype: torch.dtype) -> None:
    """Each changes a loss near 1 by less than its rounding error, and all of them by a hundred times as much."""
    number, rank = 1000, 1 + 2 - math.log(torch.finfo(dtype).eps)
    overall, present = torch.full((1, number), rank, dtype=dtype), torch.ones(1, number, dtype=torch.bool)
    loss = RecallHead((1,), 1.0)(Ranks(overall, overall, present, present.sum(1)))
    expected = number * torch.sigmoid(1 - overall[0, 0].double())
    assert 1 - loss.item() == pytest.approx(expected.item(), rel=0.01)
