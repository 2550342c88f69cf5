"""The results of an ablation study as a table and a plot, next to the results of the paper."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shortlist.errors import RunError
from shortlist.extras import extra
from shortlist.files import atomic_replace, read_json
from shortlist.training.ablation import STUDIES

with extra("report", "The plot of a study"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = ("r@1", "mAP medium")  # the first of these that was measured is shown
# Colours of Okabe and Ito, which are distinguishable with any colour vision, and line styles.
STYLES = {
    "RS@k": ("#D55E00", "-"),
    "RS@k + SiMix": ("#D55E00", "--"),
    "SAP": ("#0072B2", "-"),
}
Curve = Mapping[str, Sequence[float]]  # value of the varied setting -> metric in % of each seed

# The right plot of the paper's figure of the two studies; the source of the paper has no numbers for the left plot.
PAPER: Mapping[str, Mapping[str, Mapping[str, Curve]]] = {
    "batch-size": {
        "Cars196, ResNet-50": {
            "RS@k": {"16": [74.60], "32": [77.04], "64": [76.67], "128": [78.92], "256": [79.14], "392": [80.72]},
            "RS@k + SiMix": {
                "16": [86.27], "32": [87.46], "64": [87.31], "128": [87.43], "256": [87.06], "392": [88.17]
            },
            "SAP": {"16": [68.9], "32": [71.91], "64": [75.64], "128": [77.92], "256": [78.48], "392": [79.50]},
        },
        "SOP, ResNet-50": {
            "RS@k": {
                "16": [72.9], "32": [77.3], "64": [79.0], "128": [79.7], "256": [80.5], "512": [81.2],
                "1024": [82.0], "2048": [82.5], "4096": [82.8], "8192": [82.4],
            },
        },
    },
}  # fmt: skip
CLAIMS = {
    "rank-temperature": "Paper: 1 is best, with and without SiMix",
    "k": "Paper: not very sensitive to k (numbers in its supplement)",
}


class _Results(BaseModel):
    """The fields of results.json that are used here."""

    study: str
    config: dict[str, Any]
    cases: list[dict[str, Any]]


def read_results(file: Path) -> dict[str, Any]:
    """Read the `results.json` of a study.

    Raises:
        RunError: No case is finished.
    """
    results: dict[str, Any] = read_json(file, _Results).model_dump()
    if not any("metrics" in case for case in results["cases"]):
        raise RunError(f"{file}: no case of this study is finished yet, so there are no results to show.")
    return results


def shown_metric(results: dict[str, Any]) -> str:
    """Return the metric to show: the first of `METRICS` that was measured, or any other."""
    measured: list[str] = next(list(case["metrics"]) for case in results["cases"] if "metrics" in case)
    return next((name for name in METRICS if name in measured), measured[0])


def curves(results: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the metric in % of every seed, by method and value, both in their order."""
    found: dict[str, dict[str, list[float]]] = {}
    metric = shown_metric(results)
    for case in results["cases"]:
        if "metrics" in case:
            by_value = found.setdefault(case["method"], {})
            by_value.setdefault(case["value"], []).append(100 * case["metrics"][metric])
    return {
        method: dict(sorted(found[method].items(), key=lambda item: _sort_key(item[0])))
        for method in STYLES
        if method in found
    }


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table: a value, and mean and standard deviation over the seeds per method."""
    by_method = curves(results)
    values = sorted({value for curve in by_method.values() for value in curve}, key=_sort_key)
    rows = [[value, *(_format_seeds(curve.get(value, [])) for curve in by_method.values())] for value in values]
    return [STUDIES[results["study"]].label, *by_method], rows


def draw(results: dict[str, Any], path: Path) -> Path:
    """Draw the plot of a study, next to those of the paper, as a PNG file.

    Returns:
        `path`.
    """
    study = results["study"]
    panels: dict[str, Mapping[str, Curve]] = {f"this study: {results['config']['name']}": curves(results)}
    labels = [shown_metric(results)]
    panels |= {f"paper: {name}": figure for name, figure in PAPER.get(study, {}).items()}
    labels += ["r@1"] * (len(panels) - 1)
    figure = Figure(figsize=(4.6 * len(panels), 4.2), dpi=150, layout="constrained")
    subplots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, label, (title, panel) in zip(subplots, labels, panels.items(), strict=True):
        _draw_panel(axes, panel)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xlabel(STUDIES[study].label)
        axes.set_ylabel(f"{label} (%)")
        axes.legend(frameon=False, fontsize=9)
    if study in CLAIMS:
        figure.supxlabel(CLAIMS[study], fontsize=9)
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _draw_panel(axes: Axes, panel: Mapping[str, Curve]) -> None:
    values = sorted({value for curve in panel.values() for value in curve}, key=_sort_key)
    numbers = all(_is_number(value) for value in values)
    position = {value: float(value) if numbers else float(index) for index, value in enumerate(values)}
    for method, curve in panel.items():
        x = [position[value] for value in curve]
        colour, line = STYLES[method]
        means = [statistics.mean(each) for each in curve.values()]
        axes.plot(x, means, label=method, linewidth=2, color=colour, linestyle=line)
        for value, seeds in zip(x, curve.values(), strict=True):
            axes.plot([value] * len(seeds), seeds, "o", markersize=4, alpha=0.7, color=colour)
    if numbers:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(position.values()), list(position), rotation=0 if numbers else 30, fontsize=8.5)
    axes.minorticks_off()
    axes.grid(axis="y", color="#ECECEC")
    axes.spines[["top", "right"]].set_visible(False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sort_key(value: str) -> tuple[float, str]:
    """Sort numbers by value, and lists of numbers by length."""
    return (float(value), "") if _is_number(value) else (value.count(","), value)


def _format_seeds(seeds: Sequence[float]) -> str:
    if not seeds:
        return "-"
    spread = f" ± {statistics.stdev(seeds):.1f}" if len(seeds) > 1 else ""
    return f"{statistics.mean(seeds):.1f}{spread}"
