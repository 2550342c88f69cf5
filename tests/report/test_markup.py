"""HTML that no text can break, and plots that hold what they are given."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortlist.report.markup import document, inline_json, join, tag
from shortlist.report.plots import bar_plot, distributions_plot, line_plot, show_ticks, thinned, ticks

NASTY = "</script><script>alert(1)</script> & \"quotes\" 'too' <b>"


class Texts(HTMLParser):
    """All texts and attributes of a page, and the names of its elements."""

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


@given(st.text())
def test_text_comes_out_as_it_went_in(text: str) -> None:
    text = text.replace("\r", "")
    page = Texts(tag("p", text, title=text))
    assert "".join(page.texts) == text
    ((name, attributes),) = page.elements
    assert (name, attributes["title"]) == ("p", text)


def test_elements() -> None:
    assert tag("p", tag("b", "x"), " ", [1, None, "y"]) == "<p><b>x</b> 1y</p>"
    assert tag("input", data_of=3, class_="a", hidden=True, size=None, checked=False) == (
        '<input data-of="3" class="a" hidden>'
    )
    assert join("<", tag("br")) == "&lt;<br>"


def test_json_cannot_end_its_script() -> None:
    found = inline_json([NASTY])
    assert "<" not in found
    assert json.loads(found) == [NASTY]


def test_a_document_asks_for_nothing_outside() -> None:
    page = document(NASTY, tag("p", NASTY), ["abc", "</script>"])
    elements = Texts(page).elements
    assert [name for name, _ in elements].count("script") == 2
    assert not [each for _, each in elements if "src" in each or "href" in each]
    assert "@import" not in page
    (policy,) = [each["content"] for name, each in elements if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


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
def test_ticks_can_be_told_apart(low: float, wide: float, number: int) -> None:
    found = ticks(low, low + wide, number)
    texts = show_ticks(found)
    assert len(set(texts)) == len(found)
    assert [float(text.replace(",", "")) for text in texts] == pytest.approx(found, rel=0, abs=wide / 100)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=300), st.integers(1, 50))
def test_thinned_keeps_the_mean(points: list[tuple[float, float]], most: int) -> None:
    found = thinned(points, most)
    assert 1 <= len(found) <= most
    if len(points) % len(found) == 0:
        assert sum(y for _, y in found) / len(found) == pytest.approx(sum(y for _, y in points) / len(points), abs=1e-3)


def said(plot: str) -> list[str]:
    (points,) = [each["data-points"] for _, each in Texts(plot).elements if "data-points" in each]
    return [text for _, _, text in json.loads(points or "")]


class TestPlots:
    def test_a_line_says_its_values(self) -> None:
        plot = line_plot("loss", [(1, 2.0), (2, 1.5), (3, 0.25)], x_name="step", show="{:.2f}".format)
        assert said(plot) == ["step 1: 2.00", "step 2: 1.50", "step 3: 0.25"]
        assert "from 2.00 to 0.25" in plot

    @pytest.mark.parametrize("points", [[(1.0, 5.0)], [(1.0, 0.0), (2.0, 0.0)], [(0.0, 1e-7), (9.0, 2e-7)]])
    def test_flat_and_short_lines(self, points: list[tuple[float, float]]) -> None:
        plot = line_plot("rate", points, x_name="step")
        assert "nan" not in plot
        assert len(said(plot)) == len(points)

    def test_a_long_line_is_thinned_and_says_so(self) -> None:
        plot = line_plot("loss", [(step, 1.0) for step in range(5000)], x_name="step")
        assert len(said(plot)) <= 240
        assert "the mean of 21" in plot

    def test_bars_and_distributions(self) -> None:
        bars = bar_plot("ranks", [("1", 60.0, "rank 1"), ("2", 40.0, "rank 2")], x_name="rank", summary=NASTY)
        assert said(bars) == ["rank 1", "rank 2"]
        shares = {"right": [0.0, 0.0, 0.5, 0.5], "wrong": [0.0, 0.9, 0.1, 0.0]}
        both = distributions_plot("similarity", [-1.0, -0.5, 0.0, 0.5, 1.0], shares, "summary")
        assert said(both)[0] == "-0.50 to 0.00: 0.0 % of the right, 90.0 % of the wrong"
        assert len(said(both)) == 3  # nothing is drawn where nothing is
