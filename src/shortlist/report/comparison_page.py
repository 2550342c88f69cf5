"""A page of runs side by side: what differs, whether it is real, and what it looks like on the same queries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.evaluation.intervals import Difference
from shortlist.files import check_writable, write_text_atomically
from shortlist.progress import Display, default_display
from shortlist.report.analysis import Analysis, analyse
from shortlist.report.comparing import ComparedTest, Comparison, shown_p
from shortlist.report.looks import queries_to_choose
from shortlist.report.markup import Html, document, page_body, table, tag
from shortlist.report.thumbnails import Album

EACH = 12  # queries of a group
METHOD = (
    "Differences are to the first run, in percentage points. The interval is of a paired bootstrap: queries are drawn "
    "with replacement, and each brings the results of both runs, so that hard queries are hard for both. Where it "
    "excludes 0, the difference is more than luck with the queries; luck with the seed of a training is another "
    "matter. p is two-sided, and each metric is tested by itself."
)
LEGEND = (
    "A right result has a solid frame and a tick, a wrong one a dashed frame and a cross. Better and worse are by the "
    "rank of the first right result, then by the right ones among the first 10."
)


def write_comparison(comparison: Comparison, out: Path | str, display: Display | None = None) -> Path:
    """Write the page; return its path.

    Raises:
        ConfigError: it cannot be written there.
    """
    display, album, file = display or default_display(), Album(), Path(out)
    check_writable(file)
    sections: dict[str, Html] = {}
    for test in comparison.tests:
        of = "" if len(comparison.tests) == 1 else f": {test.catalog.name}"
        sections[f"Numbers{of}"] = _numbers(test, of)
        sections[f"Queries{of}"] = _queries(album, test, of, display)
    sections["Runs"] = _runs(comparison)
    title = " against ".join(reversed(comparison.runs)) if len(comparison.runs) == 2 else "Runs compared"
    verdicts = [tag("p", f"{sentence}.", class_="lead") for sentence in comparison.verdicts()]
    body = page_body(tag("header", tag("div", tag("h1", title), verdicts)), sections, "shortlist compare")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, document(f"{title}: comparison", body, album.pictures))
    return file


def _numbers(test: ComparedTest, of: str) -> Html:
    first, *others = test.tested
    reach = max(abs(end) for each in test.differences.values() for d in each.values() for end in (d.low, d.high))
    parts = []
    for run in others:
        rows = []
        for metric, found in test.differences[run].items():
            values = [f"{100 * test.means[name][metric]:.1f}" for name in (first, run)]
            rows.append([metric, *values, *_difference(found, reach), f"{test.queries[metric]:,}"])
        header = ["metric, %", first, run, "difference", "95 % interval", "", "p", "real?", "queries"]
        parts.append(table(header, rows))
    return tag("section", tag("h2", f"Numbers{of}"), parts, tag("p", METHOD, class_="note"))


def _difference(found: Difference, reach: float) -> list[Html | str]:
    value, _, interval = str(found).partition(" ")
    real = tag("b", "better" if found.value > 0 else "worse") if found.real else "open"
    return [value, interval, _interval(found, reach or 1), shown_p(found), real]


def _interval(found: Difference, reach: float) -> Html:
    """The interval about 0, which is in the middle; the text beside it says the same."""

    def at(value: float) -> str:
        return f"{50 + 46 * value / reach:.1f}%"

    kind = ("right" if found.value > 0 else "wrong") if found.real else "open"
    shapes = [
        tag("line", x1="4%", x2="96%", y1=8, y2=8, class_="grid"),
        tag("line", x1="50%", x2="50%", y1=1, y2=15, class_="zero"),
        tag("line", x1=at(found.low), x2=at(found.high), y1=8, y2=8, class_=f"span {kind}"),
        tag("circle", cx=at(found.value), cy=8, r=4, class_=f"now {kind}"),
    ]
    return tag("svg", shapes, class_="interval", width=140, height=16, aria_hidden="true")


def _queries(album: Album, test: ComparedTest, of: str, display: Display) -> Html:
    analyses: dict[str, Analysis] = {}
    for name, each in test.tested.items():
        with display.task(f"ranking {test.catalog.name} for {name}", "queries") as progress:
            analyses[name] = analyse(each.vectors, test.catalog, progress)
    with display.task("drawing the queries"):
        shown = queries_to_choose(album, test.catalog, analyses, choose_pairs(analyses), {})
    return tag("section", tag("h2", f"The same queries{of}"), tag("p", LEGEND, class_="note"), shown)


def choose_pairs(analyses: dict[str, Analysis], each: int = EACH) -> dict[str, list[int]]:
    """Numbers of queries to look at: where each run is most ahead of the first, where most behind, and random ones."""
    (first, one), *others = analyses.items()
    answerable = one.answerable
    chosen: dict[str, list[int]] = {}
    for run, other in others:
        than = f" than {first}" if len(others) > 1 else ""
        ahead = (_worth(other) - _worth(one))[answerable]
        order = np.argsort(-ahead, kind="stable")
        chosen[f"{run} better{than}"] = answerable[order[ahead[order] > 0][:each]].tolist()
        chosen[f"{run} worse{than}"] = answerable[order[ahead[order] < 0][::-1][:each]].tolist()
    chosen["random"] = np.random.default_rng(0).permutation(answerable)[:each].tolist()
    return chosen


def _worth(analysis: Analysis) -> NDArray[np.float64]:
    """1 / rank of the first right result; the right ones among the first results decide where that is equal."""
    worth: NDArray[np.float64] = 1 / np.maximum(analysis.first, 1) + 1e-6 * analysis.right.sum(1)
    return worth


def _runs(comparison: Comparison) -> Html:
    listed = []
    for name, path in comparison.runs.items():
        listed += [tag("dt", name), tag("dd", tag("code", str(path.absolute())))]
    return tag("section", tag("h2", "Runs"), tag("dl", listed, class_="facts"))
