"""How a training went: its records as plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shortlist.report.markup import Html, tag
from shortlist.report.plots import line_plot

_STEPS = {  # of a step's record: what it is called, its unit, and how it is shown
    "loss": ("loss", "", "{:.4f}"),
    "lr": ("learning rate", "", "{:.3g}"),
    "images_per_second": ("images a second", "", "{:,.0f}"),
    "gem_p": ("GeM's p", "", "{:.3f}"),
    "gradient_norm": ("length of the gradient", "", "{:.3g}"),
}


def curves(records: Sequence[dict[str, Any]]) -> Html:
    """A plot of everything that a run wrote down at each step, and at each validation."""
    steps = [record for record in records if record["kind"] == "step"]
    plots = []
    for name, (title, unit, form) in _STEPS.items():
        points = [(float(each["step"]), float(each[name])) for each in steps if name in each]
        if points:
            plots.append(line_plot(title, points, x_name="step", unit=unit, show=form.format))
    validated = [record for record in records if record["kind"] == "validation"]
    if validated:
        metric = next(name for name in validated[0] if name not in ("kind", "step", "epoch"))
        points = [(float(each["epoch"]), 100 * each[metric]) for each in validated]
        plots.insert(1, line_plot(f"validation {metric}", points, x_name="epoch", unit=" %", show="{:.1f}".format))
    missing = [] if validated else [tag("p", "Nothing was validated in this run.", class_="note")]
    return tag("section", tag("h2", "Curves"), missing, tag("div", plots, class_="plots"))
