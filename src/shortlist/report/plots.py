"""Plots of the HTML pages: the coordinates and texts that a template draws as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shortlist.training.interim_tests import INTERIM_TEST

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 36
MAX_POINTS = 240  # maximum number of points of a line, about the resolution of a plot

Point = tuple[float, float]
Label = tuple[float, str]  # position and text
Tooltip = tuple[float, float, str]  # x, y and text


@dataclass(frozen=True)
class Plot:
    """A plot in SVG coordinates.

    Args:
        title: Title of the plot.
        summary: Description for screen readers.
        x_name: Name of the horizontal axis.
        x_labels: Labels of the horizontal axis.
        y_labels: Labels of the vertical axis, with grid lines.
        tooltips: Values to show at the pointer, by position.
        line: SVG path of a line.
        dots: Positions of dots.
        hollow_dots: Positions of dots that are not filled.
        bars: Bars as (x, y, width, height).
        areas: SVG paths of distributions by CSS class.
        key: Names of the distributions by CSS class.
    """

    title: str
    summary: str
    x_name: str
    x_labels: Sequence[Label]
    y_labels: Sequence[Label]
    tooltips: Sequence[Tooltip]
    line: str = ""
    dots: Sequence[Point] = ()
    hollow_dots: Sequence[Point] = ()
    bars: Sequence[tuple[float, float, float, float]] = ()
    areas: Mapping[str, str] = field(default_factory=dict)
    key: Mapping[str, str] = field(default_factory=dict)

    width, height, left, right, bottom = WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM


@dataclass(frozen=True)
class Axis:
    """Linear map from values to SVG coordinates: `low` to `start`, `high` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start), 1)


def training_curves(records: Sequence[dict[str, Any]]) -> list[Plot]:
    """Plot the metrics that a run logged at each step, and the first metric of each validation and interim test.

    The exponent of GeM is omitted if it is not trained.
    """
    steps = [record for record in records if record["kind"] == "step"]
    plots = []
    for name, (title, number_format) in _STEP_METRICS.items():
        points = [(float(record["step"]), float(record[name])) for record in steps if name in record]
        frozen = name == "gem_p" and len({value for _, value in points}) == 1
        if points and not frozen:
            plots.append(line_plot(title, points, x_name="step", show=number_format.format))
    evaluated: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if record["kind"] in ("validation", INTERIM_TEST):
            evaluated.setdefault(f"{record['kind']} {record.get('data', '')}".rstrip(), []).append(record)
    return [*plots[:1], *(_evaluation_curve(*each) for each in evaluated.items()), *plots[1:]]


def _evaluation_curve(kind: str, records: Sequence[dict[str, Any]]) -> Plot:
    metric = next(name for name in records[0] if name not in ("kind", "step", "epoch", "data"))
    points = [(float(record["step"]), 100 * record[metric]) for record in records]
    return line_plot(f"{kind} {metric}", points, x_name="step", unit=" %", show="{:.1f}".format)


_STEP_METRICS = {  # key of a step's record: title of its plot, and format of its values
    "loss": ("loss", "{:.4f}"),
    "lr": ("learning rate", "{:.3g}"),
    "images_per_second": ("images per second", "{:,.0f}"),
    "gem_p": ("GeM's p", "{:.3f}"),
    "gradient_norm": ("gradient norm", "{:.3g}"),
}


def line_plot(
    title: str, points: Sequence[Point], *, x_name: str, unit: str = "", show: Callable[[float], str] = "{:.4g}".format
) -> Plot:
    """Plot a line. If it has more than `MAX_POINTS` points, neighbours are averaged.

    Args:
        title: Title of the plot.
        points: Points (x, y) with ascending x.
        x_name: Name of the horizontal axis.
        unit: Unit of y.
        show: Formats a y value.
    """
    drawn = average_neighbours(points)
    marks = ticks(min(y for _, y in drawn), max(y for _, y in drawn), 4)
    x, x_labels = _whole_number_axis(points[0][0], points[-1][0])
    y = Axis(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    positions = [(x(a), y(b)) for a, b in drawn]
    means = f" Each point is the mean of {math.ceil(len(points) / MAX_POINTS)}." if len(drawn) < len(points) else ""
    return Plot(
        title,
        f"{title}: from {show(points[0][1])}{unit} to {show(points[-1][1])}{unit}.{means}",
        x_name,
        x_labels,
        [(y(mark), text) for mark, text in zip(marks, format_ticks(marks), strict=True)],
        [(x(a), y(b), f"{x_name} {a:,.0f}: {show(b)}{unit}") for a, b in drawn],
        line="M" + " L".join(f"{a} {b}" for a, b in positions),
        dots=positions if len(positions) <= 30 else (),
    )


class HistoryPoint(NamedTuple):
    """A value in a history; one that is not complete does not count as the best."""

    number: int
    value: float
    tooltip: str
    complete: bool = True


def history_plot(title: str, points: Sequence[HistoryPoint], *, x_name: str, unit: str = "") -> Plot:
    """Plot values as dots, hollow unless they are complete, and the largest complete value so far as a stepped line.

    Args:
        title: Title of the plot.
        points: The values, with ascending numbers; at least one is complete.
        x_name: Name of the horizontal axis.
        unit: Unit of the values.
    """
    values, complete = [point.value for point in points], [point for point in points if point.complete]
    best = list(itertools.accumulate((point.value for point in complete), max))
    marks = ticks(min(values), max(values), 4)
    x, x_labels = _whole_number_axis(points[0].number, points[-1].number)
    y = Axis(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    steps = [f"H{x(point.number)} V{y(value)}" for point, value in zip(complete[1:], best[1:], strict=True)]
    hollow = f" ({len(points) - len(complete)} not completed)" if len(complete) < len(points) else ""
    return Plot(
        title,
        f"{title}: the best of {len(complete)} is {best[-1]:.1f}{unit}{hollow}.",
        x_name,
        x_labels,
        [(y(mark), text) for mark, text in zip(marks, format_ticks(marks), strict=True)],
        [(x(point.number), y(point.value), point.tooltip) for point in points],
        line=" ".join([f"M{x(complete[0].number)} {y(best[0])}", *steps, f"H{x(points[-1].number)}"]),
        dots=[(x(point.number), y(point.value)) for point in complete],
        hollow_dots=[(x(point.number), y(point.value)) for point in points if not point.complete],
    )


def _whole_number_axis(first: float, last: float) -> tuple[Axis, list[Label]]:
    """Return a horizontal axis from `first` to `last`, and labels at whole numbers."""
    x = Axis(first, max(last, first + 1), LEFT + 6, WIDTH - RIGHT - 6)
    whole = [tick for tick in ticks(first, last, 5) if tick == round(tick)]
    return x, [(x(tick), f"{tick:,.0f}") for tick in whole if x.low <= tick <= x.high]


def bar_plot(title: str, bars: Sequence[tuple[str, float, str]], *, x_name: str, summary: str) -> Plot:
    """Plot bars of percentages.

    Args:
        title: Title of the plot.
        bars: Name, value in % and tooltip of each bar.
        x_name: Name of the horizontal axis.
        summary: Description for screen readers.
    """
    marks = ticks(0, max(value for _, value, _ in bars), 4)
    y = Axis(0, marks[-1], HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / len(bars)
    every = math.ceil(len(bars) / 8)  # label at most 8 bars
    middles = [round(LEFT + (number + 0.5) * width, 1) for number in range(len(bars))]
    boxes = [
        (round(x - 0.38 * width, 1), y(value), round(0.76 * width, 1), round(y(0) - y(value), 1))
        for x, (_, value, _) in zip(middles, bars, strict=True)
    ]
    labels = [(x, name) for x, (name, _, _) in zip(middles, bars, strict=True)]
    tooltips = [(x, y(value), text) for x, (_, value, text) in zip(middles, bars, strict=True)]
    y_labels = [(y(mark), f"{mark:g} %") for mark in marks]
    return Plot(title, summary, x_name, labels[::every], y_labels, tooltips, bars=boxes)


def distributions_plot(title: str, edges: Sequence[float], shares: Mapping[str, Sequence[float]], summary: str) -> Plot:
    """Plot the outlines of two distributions over the same bins, the first filled and the second dashed.

    Args:
        title: Title of the plot.
        edges: Edges of the bins.
        shares: Share of each bin, by name of the distribution.
        summary: Description for screen readers.
    """
    used = [index for index in range(len(edges) - 1) if any(each[index] > 5e-4 for each in shares.values())]
    first, last = used[0], used[-1] + 1
    marks = ticks(0, max(max(each) for each in shares.values()) * 100, 4)
    x = Axis(edges[first], edges[last], LEFT, WIDTH - RIGHT)
    y = Axis(0, marks[-1], HEIGHT - BOTTOM, TOP)
    areas = {}
    for css_class, each in zip(("right", "wrong"), shares.values(), strict=True):
        corners = [f"{x(edges[first])} {y(0)}"]
        for index in range(first, last):
            corners += [f"{x(edges[side])} {y(100 * each[index])}" for side in (index, index + 1)]
        areas[css_class] = "M" + " L".join([*corners, f"{x(edges[last])} {y(0)}"])
    tooltips = []
    for index in range(first, last):
        values = ", ".join(f"{100 * each[index]:.1f} % of the {name}" for name, each in shares.items())
        middle, top = (edges[index] + edges[index + 1]) / 2, max(each[index] for each in shares.values())
        tooltips.append((x(middle), y(100 * top), f"{edges[index]:.2f} to {edges[index + 1]:.2f}: {values}"))
    x_ticks = [tick for tick in ticks(edges[first], edges[last], 6) if x.low - 1e-9 <= tick <= x.high + 1e-9]
    return Plot(
        title,
        summary,
        "cosine similarity",
        [(x(tick), f"{tick:g}") for tick in x_ticks],
        [(y(mark), f"{mark:g} %") for mark in marks],
        tooltips,
        areas=areas,
        key=dict(zip(("right", "wrong"), shares, strict=True)),
    )


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Return round values, about `number` intervals, that enclose everything from `low` to `high`.

    Example:
        >>> ticks(0.13, 0.92)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def format_ticks(marks: Sequence[float]) -> list[str]:
    """Format tick values with as many digits as needed to distinguish them, in exponent notation if small or large.

    Example:
        >>> format_ticks([0, 2.5e-4, 5e-4]), format_ticks([9.5e-5, 1e-4, 1.05e-4])
        (['0', '2.5e-4', '5.0e-4'], ['9.50e-5', '1.00e-4', '1.05e-4'])
    """
    largest, tolerance = max(abs(mark) for mark in marks), 1e-3 * (marks[-1] - marks[0])
    form = "{:.{}e}" if largest and not 1e-3 <= largest < 1e5 else "{:,.{}g}"
    for digits in range(1 if "e" in form else 6, 16):
        texts = [form.format(mark, digits) for mark in marks]
        if all(abs(float(text.replace(",", "")) - mark) <= tolerance for text, mark in zip(texts, marks, strict=True)):
            break
    return [text.replace("e-0", "e-").replace("e+0", "e") if float(text.replace(",", "")) else "0" for text in texts]


def average_neighbours(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Average groups of neighbouring points so that at most `limit` points are left."""
    size = math.ceil(len(points) / limit) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
