"""A study's results as a table and as the paper's plot, beside the paper's own numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shortlist.errors import RunError
from shortlist.extras import extra
from shortlist.files import read_json
from shortlist.training.ablation import STUDIES

with extra("report", "The plot of a study"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = ("r@1", "mAP medium")  # what a study is shown by: the first that was measured
# Okabe and Ito's palette: told apart with any kind of colour vision.
LOOKS = {
    "RS@k": ("#D55E00", "-"),
    "RS@k + SiMix": ("#D55E00", "--"),
    "SAP": ("#0072B2", "-"),
}
Curve = Mapping[str, Sequence[float]]  # value -> the metric in %, one for each seed

# The right plot of the paper's figure of the two studies; of the left one its source has no numbers.
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
    "rank-temperature": "The paper: 1 is best, with and without SiMix",
    "k": "The paper: not very sensitive to k (its supplement has the numbers)",
}


def read_results(file: Path) -> dict[str, Any]:
    """A study's `results.json`.

    Raises:
        RunError: no case is finished.
    """
    results: dict[str, Any] = read_json(file)
    if not any("metrics" in case for case in results["cases"]):
        raise RunError(f"{file}: no case of this study is finished, so there is nothing to show yet.")
    return results


def metric(results: dict[str, Any]) -> str:
    """What the study is shown by: r@1 or, where that was not measured, another one that was."""
    measured: list[str] = next(list(case["metrics"]) for case in results["cases"] if "metrics" in case)
    return next((name for name in METRICS if name in measured), measured[0])


def curves(results: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By method and value, the metric in % of every seed; methods and values in their order."""
    found: dict[str, dict[str, list[float]]] = {}
    shown = metric(results)
    for case in results["cases"]:
        if "metrics" in case:
            by_value = found.setdefault(case["method"], {})
            by_value.setdefault(case["value"], []).append(100 * case["metrics"][shown])
    return {
        method: dict(sorted(found[method].items(), key=lambda item: _order(item[0])))
        for method in LOOKS
        if method in found
    }


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a value, and for each method the mean and the standard deviation over the seeds."""
    by_method = curves(results)
    values = sorted({value for curve in by_method.values() for value in curve}, key=_order)
    rows = [[value, *(_mean(curve.get(value, [])) for curve in by_method.values())] for value in values]
    return [STUDIES[results["study"]].label, *by_method], rows


def draw(results: dict[str, Any], path: Path) -> Path:
    """The plot of a study, and those of the paper beside it, as a PNG."""
    study = results["study"]
    panels: dict[str, Mapping[str, Curve]] = {f"here: {results['config']['name']}": curves(results)}
    labels = [metric(results)]
    panels |= {f"the paper: {name}": figure for name, figure in PAPER.get(study, {}).items()}
    labels += ["r@1"] * (len(panels) - 1)
    figure = Figure(figsize=(4.6 * len(panels), 4.2), dpi=150, layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, label, (title, panel) in zip(places, labels, panels.items(), strict=True):
        _panel(axes, panel)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xlabel(STUDIES[study].label)
        axes.set_ylabel(f"{label} (%)")
        axes.legend(frameon=False, fontsize=9)
    if study in CLAIMS:
        figure.supxlabel(CLAIMS[study], fontsize=9)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return path


def _panel(axes: Axes, panel: Mapping[str, Curve]) -> None:
    values = sorted({value for curve in panel.values() for value in curve}, key=_order)
    numbers = all(_is_number(value) for value in values)
    at = {value: float(value) if numbers else float(index) for index, value in enumerate(values)}
    for method, curve in panel.items():
        x = [at[value] for value in curve]
        colour, line = LOOKS[method]
        means = [statistics.mean(each) for each in curve.values()]
        axes.plot(x, means, label=method, linewidth=2, color=colour, linestyle=line)
        for place, seeds in zip(x, curve.values(), strict=True):
            axes.plot([place] * len(seeds), seeds, "o", markersize=4, alpha=0.7, color=colour)
    if numbers:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(at.values()), list(at), rotation=0 if numbers else 30, fontsize=8.5)
    axes.minorticks_off()
    axes.grid(axis="y", color="#ECECEC")
    axes.spines[["top", "right"]].set_visible(False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _order(value: str) -> tuple[float, str]:
    """Numbers by size, lists of numbers by length."""
    return (float(value), "") if _is_number(value) else (value.count(","), value)


def _mean(seeds: Sequence[float]) -> str:
    if not seeds:
        return "-"
    spread = f" ± {statistics.stdev(seeds):.1f}" if len(seeds) > 1 else ""
    return f"{statistics.mean(seeds):.1f}{spread}"
