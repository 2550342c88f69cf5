"""Minimum scores of results, so that a query without a match in the gallery finds nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shortlist.report.analysis import Analysis

MIN_FOUND = 0.5  # minimum share of the queries that still find a correct image with a recommended score
RATES = (0.01, 0.05, 0.1, 0.2)
STEPS = 1000  # per unit of similarity: a threshold has three decimals


@dataclass(frozen=True)
class Threshold:
    """A minimum score.

    Args:
        rate: Maximum rate of false matches.
        min_score: The lowest minimum score with three decimals that does not exceed this rate; at most 1.
        false_matches: Share of the queries with a wrong result of at least this score: the rate of false matches of
            queries whose class is not in the gallery.
        found: Share of the queries with a positive that have a correct result of at least this score.
    """

    rate: float
    min_score: float
    false_matches: float
    found: float


def thresholds(analysis: Analysis, rates: Sequence[float] | None = None) -> list[Threshold]:
    """Return a minimum score for each rate of false matches.

    Args:
        analysis: The analysis.
        rates: The rates. None: those of `RATES` at which at least one query may have a false match, because otherwise
            the most similar wrong image alone would determine the score.

    Returns:
        The minimum scores; none if no query has a positive or a negative.
    """
    wrong = analysis.best_negative[np.isfinite(analysis.best_negative)].astype(np.float64)
    right = analysis.best_positive[analysis.answerable].astype(np.float64)
    if not len(wrong) or not len(right):
        return []
    if rates is None:
        rates = [rate for rate in RATES if rate * len(wrong) >= 1]
    descending = np.sort(wrong)[::-1]
    found = []
    for rate in rates:
        first_excluded = descending[int(rate * len(wrong))]
        score = min(1.0, (math.floor(first_excluded * STEPS) + 1) / STEPS)
        found.append(Threshold(rate, score, float((wrong >= score).mean()), float((right >= score).mean())))
    return found


def recommended(found: Sequence[Threshold]) -> Threshold | None:
    """Return the first minimum score with which at least half of the queries still find a correct image, or None."""
    return next((each for each in found if each.found >= MIN_FOUND), None)
