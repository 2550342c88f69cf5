"""Minimum scores that a report recommends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shortlist.report.analysis import analyse
from shortlist.report.thresholds import RATES, Threshold, recommended, thresholds
from tests import reference
from tests.evaluation.test_evaluate import catalog, points


@pytest.mark.parametrize("seed", range(3))
def test_the_lowest_score_with_this_rate_of_false_matches(seed: int) -> None:
    which, rates = catalog([number // 3 for number in range(60)]), (0.0, 0.01, 0.05, 0.5)
    vectors = points(60, seed)
    similarities = (vectors @ vectors.T).numpy()
    same = which.labels[:, None] == which.labels
    wrong = np.where(same, -2, similarities).max(1)
    right = np.where(same & ~np.eye(60, dtype=bool), similarities, -2).max(1)
    for rate, found in zip(rates, thresholds(analyse(vectors, which), rates), strict=True):
        assert (found.rate, found.min_score) == (rate, reference.min_score(wrong.tolist(), rate))
        assert found.false_matches == pytest.approx((wrong >= found.min_score).mean())
        assert found.found == pytest.approx((right >= found.min_score).mean())


def test_a_single_wrong_image_does_not_determine_the_recommendation() -> None:
    which = catalog([number // 3 for number in range(60)])
    assert [each.rate for each in thresholds(analyse(points(60), which))] == [0.05, 0.1, 0.2]


def test_a_copy_in_another_class_needs_the_highest_score() -> None:
    (found,) = thresholds(analyse(torch.eye(4)[[0, 0, 0, 1]], catalog([0, 1, 0, 1])), [0.0])
    assert (found.min_score, found.false_matches) == (1.0, 0.75)


def test_none_without_wrong_images() -> None:
    assert thresholds(analyse(points(4), catalog([0, 0, 0, 0]))) == []
    assert thresholds(analyse(points(3), catalog([0, 1, 2]))) == []


@pytest.mark.parametrize(
    ("found", "rate"), [((0.7, 0.8, 0.9), 0.01), ((0.2, 0.5, 0.9), 0.05), ((0.1, 0.2, 0.4), None), ((), None)]
)
def test_half_of_the_queries_find_something_with_the_recommended_score(
    found: tuple[float, ...], rate: float | None
) -> None:
    best = recommended([Threshold(rate, 0.9, 0.0, share) for rate, share in zip(RATES, found, strict=False)])
    assert rate == (None if best is None else best.rate)
