"""The head of RS@k by itself."""

from __future__ import annotations

import pytest

from shortlist.ranking import RecallHead


def test_a_head_takes_any_sequence_of_k() -> None:
    assert RecallHead([1, 4], 1.0).k == (1, 4)  # type: ignore[arg-type]


def test_a_head_checks_its_settings() -> None:
    with pytest.raises(ValueError, match="k must contain positive integers, got 0"):
        RecallHead((0,), 1.0)
    with pytest.raises(ValueError, match="rank_temperature must be a finite number above 0, got 0"):
        RecallHead((1,), 0)


def test_reach_is_where_the_largest_k_is_flat() -> None:
    assert RecallHead((1, 8, 4), 0.5).reach(10) == 8 + 10 * 0.5
