"""Plots as SVG inside a page: axes with units, and values for whoever points at them or uses the arrow keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shortlist.report.markup import Html, tag

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 36
POINTS = 240  # of a line: about what a screen can show

Point = tuple[float, float]
Said = tuple[float, float, str]  # where a value is drawn, and what to say of it


@dataclass(frozen=True)
class Axis:
    """From values to places in the picture."""

    low: float
    high: float
    start: float  # where `low` is drawn
    stop: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start), 1)


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Round values about `number` steps apart that enclose everything from low to high.

    >>> ticks(0.13, 0.92)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(by * power for by in (1, 2, 2.5, 5, 10) if by * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """Means of neighbours, so that at most so many are left."""
    by = math.ceil(len(points) / most) or 1
    parts = [points[start : start + by] for start in range(0, len(points), by)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def line_plot(
    title: str, points: Sequence[Point], *, x_name: str, unit: str = "", show: Callable[[float], str] = "{:.4g}".format
) -> Html:
    """A line over steps or epochs; long ones as means of neighbours.

    Args:
        title: what is drawn.
        points: (x, y), x ascending.
        x_name: of the axis.
        unit: of y.
        show: a y as text.
    """
    drawn = thinned(points)
    marks = ticks(min(y for _, y in drawn), max(y for _, y in drawn), 4)
    across = ticks(points[0][0], points[-1][0], 5)
    x = Axis(points[0][0], max(points[-1][0], points[0][0] + 1), LEFT + 6, WIDTH - RIGHT - 6)
    y = Axis(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    said = [(x(a), y(b), f"{x_name} {a:,.0f}: {show(b)}{unit}") for a, b in drawn]
    path = "M" + " L".join(f"{a} {b}" for a, b, _ in said)
    shapes = [tag("path", d=path, class_="line")]
    if len(said) <= 30:
        shapes += [tag("circle", cx=a, cy=b, r=3, class_="dot") for a, b, _ in said]
    shown = [tick for tick in across if x.low <= tick <= x.high and tick == round(tick)]
    means = f" Each point is the mean of {math.ceil(len(points) / POINTS)}." if len(drawn) < len(points) else ""
    summary = f"{title}: from {show(points[0][1])}{unit} to {show(points[-1][1])}{unit}.{means}"
    axes = [
        *_rows(y, marks, show_ticks(marks)),
        *_columns([(x(tick), f"{tick:,.0f}") for tick in shown]),
        _below(x_name),
    ]
    return _figure(title, summary, [*axes, *shapes], said)


def bar_plot(title: str, bars: Sequence[tuple[str, float, str]], *, x_name: str, summary: str) -> Html:
    """Bars of shares in %: of each its name, its value, and what to say of it."""
    marks = ticks(0, max(value for _, value, _ in bars), 4)
    y = Axis(0, marks[-1], HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / len(bars)
    said, shapes, names = [], [], []
    every = math.ceil(len(bars) / 8)  # a name for each, or for every second
    for number, (name, value, text) in enumerate(bars):
        middle = round(LEFT + (number + 0.5) * width, 1)
        box = {"x": round(middle - 0.38 * width, 1), "y": y(value), "width": round(0.76 * width, 1)}
        shapes.append(tag("rect", **box, height=round(y(0) - y(value), 1), class_="bar"))
        said.append((middle, y(value), text))
        names += [(middle, name)] if number % every == 0 else []
    axes = [*_rows(y, marks, [f"{mark:g} %" for mark in marks]), *_columns(names), _below(x_name)]
    return _figure(title, summary, [*axes, *shapes], said)


def distributions_plot(title: str, edges: Sequence[float], shares: dict[str, Sequence[float]], summary: str) -> Html:
    """Outlines of two distributions over the same bins, the first filled and the second dashed, each with its name."""
    used = [index for index in range(len(edges) - 1) if any(each[index] > 5e-4 for each in shares.values())]
    first, last = used[0], used[-1] + 1
    across = ticks(edges[first], edges[last], 6)
    marks = ticks(0, max(max(each) for each in shares.values()) * 100, 4)
    x = Axis(edges[first], edges[last], LEFT, WIDTH - RIGHT)
    y = Axis(0, marks[-1], HEIGHT - BOTTOM, TOP)
    shapes = []
    for kind, (_, each) in zip(("right", "wrong"), shares.items(), strict=True):
        corners = [f"{x(edges[first])} {y(0)}"]
        for index in range(first, last):
            corners += [f"{x(edges[side])} {y(100 * each[index])}" for side in (index, index + 1)]
        shapes.append(tag("path", d="M" + " L".join([*corners, f"{x(edges[last])} {y(0)}"]), class_=f"area {kind}"))
    said = []
    for index in range(first, last):
        values = ", ".join(f"{100 * each[index]:.1f} % of the {name}" for name, each in shares.items())
        middle, top = (edges[index] + edges[index + 1]) / 2, max(each[index] for each in shares.values())
        said.append((x(middle), y(100 * top), f"{edges[index]:.2f} to {edges[index + 1]:.2f}: {values}"))
    shown = [(x(tick), f"{tick:g}") for tick in across if x.low - 1e-9 <= tick <= x.high + 1e-9]
    key = [tag("span", name, class_=f"key {kind}") for kind, name in zip(("right", "wrong"), shares, strict=True)]
    axes = [*_rows(y, marks, [f"{mark:g} %" for mark in marks]), *_columns(shown), _below("cosine similarity")]
    return _figure(title, summary, [*axes, *shapes], said, key)


def show_ticks(marks: Sequence[float]) -> list[str]:
    """With as many digits as they need to be read as what they are; small and large ones as powers of ten.

    >>> show_ticks([0, 2.5e-4, 5e-4]), show_ticks([9.5e-5, 1e-4, 1.05e-4])
    (['0', '2.5e-4', '5.0e-4'], ['9.50e-5', '1.00e-4', '1.05e-4'])
    """
    largest, near = max(abs(mark) for mark in marks), 1e-3 * (marks[-1] - marks[0])
    form = "{:.{}e}" if largest and not 1e-3 <= largest < 1e5 else "{:,.{}g}"
    for digits in range(1 if "e" in form else 6, 16):
        texts = [form.format(mark, digits) for mark in marks]
        if all(abs(float(text.replace(",", "")) - mark) <= near for text, mark in zip(texts, marks, strict=True)):
            break
    return [text.replace("e-0", "e-").replace("e+0", "e") if float(text.replace(",", "")) else "0" for text in texts]


def _rows(y: Axis, marks: Sequence[float], texts: Sequence[str]) -> list[Html]:
    rows = []
    for mark, text in zip(marks, texts, strict=True):
        rows.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(mark), y2=y(mark), class_="grid"))
        rows.append(tag("text", text, x=LEFT - 6, y=y(mark) + 4, text_anchor="end"))
    return rows


def _columns(names: Sequence[tuple[float, str]]) -> list[Html]:
    return [tag("text", name, x=x, y=HEIGHT - BOTTOM + 15, text_anchor="middle") for x, name in names]


def _below(name: str) -> Html:
    return tag("text", name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 4, text_anchor="middle", class_="name")


def _figure(title: str, summary: str, shapes: Sequence[Html], said: Sequence[Said], key: Sequence[Html] = ()) -> Html:
    picture = tag(
        "svg",
        shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=summary,
        tabindex=0,
        data_points=json.dumps(said),
    )
    head = tag("figcaption", tag("span", title, class_="title"), key or None, tag("output", aria_live="polite"))
    return tag("figure", head, picture, class_="plot")
