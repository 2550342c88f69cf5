"""What a test's searches look like: queries with their first results, to choose from by group and by class."""

from __future__ import annotations

import numpy as np

from shortlist.data import Catalog
from shortlist.progress import Display
from shortlist.report.analysis import Analysis, analyse
from shortlist.report.failures import why_it_fails
from shortlist.report.findings import choose
from shortlist.report.looks import queries_to_choose
from shortlist.report.markup import Html, join, tag
from shortlist.report.opening import Tested
from shortlist.report.thumbnails import Album

CLASSES = 150  # of which a query is shown, over all tests: with the others 2,000 thumbnails, some MB
LEGEND = (
    "Queries with their 10 nearest images. A right one has a solid frame and a tick, a wrong one a dashed frame and a "
    "cross; below it stand its similarity and, if it is wrong, its class."
)
JUDGED_LEGEND = (
    "Queries with their 10 nearest images. What is right in any setup has a solid frame and a tick, what is wrong a "
    "dashed frame and a cross; junk is left out. Below stands the similarity. Distractors are not searched here."
)


def results(album: Album, tested: Tested, tests: int, display: Display) -> dict[str, Html]:
    """Two sections of a report by their names: what a test looks like, and why it fails."""
    catalog = tested.catalog
    with display.task(f"ranking {catalog.name}", "queries") as progress:
        analysis = analyse(tested.vectors, catalog, progress)
    with display.task("drawing the queries"):
        shown = _queries(album, tested, analysis, max(20, CLASSES // tests))
    with display.task("looking for pictures with two labels", "pairs") as progress:
        failures = why_it_fails(album, catalog, analysis, tested.k, progress)
    of = "" if tests == 1 else f": {catalog.name}"
    return {
        f"Results{of}": tag("section", tag("h2", f"What it looks like{of}"), shown),
        f"Failures{of}": tag("section", tag("h2", f"Why it fails{of}"), failures),
    }


def _queries(album: Album, tested: Tested, analysis: Analysis, classes: int) -> Html:
    catalog = tested.catalog
    chosen = choose(analysis, catalog, classes=classes)
    says = {"every class": _says(catalog, analysis, len(chosen["every class"]))}
    legend = tag("p", JUDGED_LEGEND if catalog.judgements else LEGEND, class_="note")
    return join(legend, queries_to_choose(album, catalog, {"": analysis}, chosen, says))


def _says(catalog: Catalog, analysis: Analysis, shown: int) -> str:
    """What the button of the largest group says."""
    if catalog.judgements:
        return "many"
    classes = len(np.unique(catalog.labels[analysis.queries[analysis.answerable]]))
    return "one of every class" if shown == classes else f"one of each of {shown} classes"
