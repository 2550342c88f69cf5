"""Escaping of text in pages, and plots."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError

from shortlist.report.comparison import Comparison, format_p
from shortlist.report.pages import render
from shortlist.report.plots import (
    Plot,
    average_neighbours,
    bar_plot,
    distributions_plot,
    format_ticks,
    line_plot,
    ticks,
    training_curves,
)

NASTY = "</script><script>alert(1)</script> & \"quotes\" 'too' <b>"


class Texts(HTMLParser):
    """The texts of a page, and its elements with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def rendered(**changes: Any) -> str:
    """A comparison without tests, as the simplest whole page."""
    comparison = Comparison({"one": Path(NASTY)}, [])
    context: dict[str, Any] = {"title": NASTY, "sections": ["Runs"], "tests": [], "pictures": ["abc", "</script>"]}
    return render("comparison.html", comparison=comparison, format_p=format_p, **(context | changes))


@settings(deadline=None, max_examples=20)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_text_is_escaped(text: str) -> None:
    page = Texts(rendered(title=text))
    assert text in page.texts
    assert [name for name, _ in page.elements] == [name for name, _ in Texts(rendered(title="title")).elements]


def test_json_cannot_end_its_script() -> None:
    (data,) = re.findall(r'id="pictures">(.*?)</script>', rendered())
    assert json.loads(data) == ["abc", "</script>"]


def test_a_page_loads_nothing_from_the_network() -> None:
    page = rendered()
    elements = Texts(page).elements
    assert page.startswith("<!doctype html>")
    assert [name for name, _ in elements].count("script") == 2
    assert [each["href"] for _, each in elements if "src" in each or "href" in each] == ["#section-1"]
    assert "@import" not in page
    assert "color-scheme: dark" in page  # the style is part of the page
    (policy,) = [each["content"] for name, each in elements if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_missing_variables_are_errors() -> None:
    with pytest.raises(UndefinedError):
        render("comparison.html", pictures=[])


numbers = st.floats(-1e6, 1e6).map(lambda number: round(number, 6))


@given(numbers, numbers, st.integers(2, 8))
def test_ticks_are_round_and_enclose(one: float, other: float, number: int) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high, number)
    tolerance = 1e-6 * max(1.0, abs(low), abs(high))
    assert found[0] <= low + tolerance
    assert found[-1] >= high - tolerance
    assert found == sorted(set(found))
    assert 2 <= len(found) <= number + 3
    if high - low > 1e-3:
        step = found[1] - found[0]
        digits = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(digits - each) for each in (1, 2, 2.5, 5, 10)) < 1e-3


@given(numbers, st.floats(1e-4, 1e6), st.integers(2, 8))
def test_tick_labels_differ(low: float, wide: float, number: int) -> None:
    found = ticks(low, low + wide, number)
    texts = format_ticks(found)
    assert len(set(texts)) == len(found)
    assert [float(text.replace(",", "")) for text in texts] == pytest.approx(found, rel=0, abs=wide / 100)


@settings(max_examples=50)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=300), st.integers(1, 50))
def test_averaging_keeps_the_mean(points: list[tuple[float, float]], limit: int) -> None:
    found = average_neighbours(points, limit)
    assert 1 <= len(found) <= limit
    if len(points) % len(found) == 0:
        assert sum(y for _, y in found) / len(found) == pytest.approx(sum(y for _, y in points) / len(points), abs=1e-3)


def record(kind: str, step: int, epoch: int, value: float, **more: str) -> dict[str, object]:
    return {"kind": kind, "step": step, "epoch": epoch, **more, "r@1": value, "r@2": 1.0}


def test_curves_of_validations_and_of_tests_during_training() -> None:
    test = "test during training"
    by_epoch = [record("validation", 3, 1, 0.5), record("validation", 6, 2, 0.25)]
    by_step = [record("validation", 2, 1, 0.5), record("validation", 3, 1, 0.25)]
    tests = [record(test, 3, 1, 0.1, data="small"), record(test, 3, 1, 0.2, data="large")]
    assert [(plot.title, tooltips(plot)) for plot in training_curves([*by_epoch, *tests])] == [
        ("validation r@1", ["step 3: 50.0 %", "step 6: 25.0 %"]),
        ("test during training small r@1", ["step 3: 10.0 %"]),
        ("test during training large r@1", ["step 3: 20.0 %"]),
    ]
    (curve,) = training_curves(by_step)
    assert tooltips(curve) == ["step 2: 50.0 %", "step 3: 25.0 %"]


@pytest.mark.parametrize(("values", "drawn"), [((3.0, 3.0), False), ((3.0, 3.1), True)])
def test_an_exponent_that_is_not_trained_is_not_drawn(values: tuple[float, float], drawn: bool) -> None:
    steps = [{"kind": "step", "step": step, "gem_p": value} for step, value in enumerate(values)]
    assert [plot.title for plot in training_curves(steps)] == ["GeM's p"] * drawn


def tooltips(plot: Plot) -> list[str]:
    return [text for _, _, text in plot.tooltips]


class TestPlots:
    def test_values_of_a_line(self) -> None:
        plot = line_plot("loss", [(1, 2.0), (2, 1.5), (3, 0.25)], x_name="step", show="{:.2f}".format)
        assert tooltips(plot) == ["step 1: 2.00", "step 2: 1.50", "step 3: 0.25"]
        assert "from 2.00 to 0.25" in plot.summary

    @pytest.mark.parametrize("points", [[(1.0, 5.0)], [(1.0, 0.0), (2.0, 0.0)], [(0.0, 1e-7), (9.0, 2e-7)]])
    def test_flat_and_short_lines(self, points: list[tuple[float, float]]) -> None:
        plot = line_plot("rate", points, x_name="step")
        assert "nan" not in plot.line
        assert len(tooltips(plot)) == len(points)

    def test_a_long_line_is_averaged(self) -> None:
        plot = line_plot("loss", [(step, 1.0) for step in range(5000)], x_name="step")
        assert len(tooltips(plot)) <= 240
        assert "the mean of 21" in plot.summary

    def test_bars_and_distributions(self) -> None:
        bars = bar_plot("ranks", [("1", 60.0, "rank 1"), ("2", 40.0, "rank 2")], x_name="rank", summary=NASTY)
        assert tooltips(bars) == ["rank 1", "rank 2"]
        shares = {"right": [0.0, 0.0, 0.5, 0.5], "wrong": [0.0, 0.9, 0.1, 0.0]}
        both = distributions_plot("similarity", [-1.0, -0.5, 0.0, 0.5, 1.0], shares, "summary")
        assert tooltips(both)[0] == "-0.50 to 0.00: 0.0 % of the right, 90.0 % of the wrong"
        assert len(tooltips(both)) == 3  # empty bins at the ends are not drawn
