"""Derived numbers in the paper's tables: means over the landmark tests, and relative reductions of the error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

from shortlist.config import RunConfig
from shortlist.evaluation import Evaluation

Results = Mapping[str, Mapping[str, float]]  # test -> metric -> %

# The best results of earlier methods that the paper underlines, by the dimension of the embeddings. For r@100 on SOP at
# dimension 512, it underlines 96.6 although its row of ProxyNCA++ has 96.7.
PREVIOUS_BEST: Mapping[int, Results] = {
    128: {
        "inaturalist": {"r@1": 61.6, "r@4": 77.4, "r@16": 87.0, "r@32": 90.7},
        "sop": {"r@1": 80.6, "r@10": 91.6, "r@100": 96.2, "r@1000": 98.7},
        "vehicleid-small": {"r@1": 94.7, "r@5": 96.8},
        "vehicleid-medium": {"r@1": 93.7, "r@5": 95.8},
        "vehicleid-large": {"r@1": 93.0, "r@5": 95.8},
        "cars196": {"r@1": 79.6, "r@2": 86.5, "r@4": 91.9, "r@8": 95.1},
    },
    512: {
        "inaturalist": {"r@1": 67.2, "r@4": 81.8, "r@16": 90.3, "r@32": 93.1},
        "sop": {"r@1": 80.7, "r@10": 92.5, "r@100": 96.6, "r@1000": 99.0},
        "vehicleid-small": {"r@1": 94.9, "r@5": 97.6},
        "vehicleid-medium": {"r@1": 93.4, "r@5": 96.4},
        "vehicleid-large": {"r@1": 93.0, "r@5": 96.2},
        "cars196": {"r@1": 86.5, "r@2": 92.5, "r@4": 95.7, "r@8": 97.7},
    },
}
LANDMARK_MEANS = {  # columns of the landmark table: name -> tests, each with its medium and hard setup
    "all": ("roxford5k", "roxford5k+r1m", "rparis6k", "rparis6k+r1m"),
    "R1M": ("roxford5k+r1m", "rparis6k+r1m"),
}


def percentages(evaluations: Iterable[Evaluation]) -> Results:
    """Return the metrics of evaluations in %, by test."""
    return {each.data: {name: 100 * value for name, value in each.values.items()} for each in evaluations}


def error_reduction(value: float, reference: float) -> float | None:
    """Return the relative reduction in % from the error 100 - reference to 100 - value; None if the former is 0.

    Example:
        >>> round(error_reduction(88.2, 86.5)), round(error_reduction(97.4, 97.7))
        (13, -13)
    """
    return 100 * (value - reference) / (100 - reference) if reference < 100 else None


def reductions_to_previous_best(config: RunConfig, results: Results) -> dict[str, dict[str, float | None]]:
    """Return the error reductions to the best earlier method in the paper's table, by test and metric.

    Empty unless the configuration is a row of that table: with a ResNet-50, and with results of the paper.

    Args:
        config: Configuration of the run.
        results: Results of the run.
    """
    if not config.model.backbone.startswith("resnet50"):
        return {}
    previous = PREVIOUS_BEST.get(config.model.dim or 0, {})
    return {
        test: {
            name: error_reduction(values[name], reference)
            for name, reference in previous[test].items()
            if name in values
        }
        for test, values in results.items()
        if test in previous and test in config.paper
    }


def landmark_means(results: Results) -> dict[str, float]:
    """Return the mean mAP over all landmark tests and over those with R1M. A mean with a missing result is left out.

    Example:
        >>> landmark_means({test: {"mAP medium": 60.0, "mAP hard": 30.0} for test in ("roxford5k+r1m", "rparis6k+r1m")})
        {'R1M': 45.0}
    """
    means = {}
    for name, tests in LANDMARK_MEANS.items():
        values = [results.get(test, {}).get(f"mAP {setup}") for test in tests for setup in ("medium", "hard")]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            means[name] = fmean(known)
    return means
