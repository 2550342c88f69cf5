"""Why a search fails: confused classes, ranks, similarities, class sizes, and pictures with two labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shortlist.data import Catalog
from shortlist.report.analysis import BINS, Analysis
from shortlist.report.findings import (
    Confusion,
    Duplicates,
    by_size,
    confusions,
    duplicates,
    first_ranks,
    separation,
)
from shortlist.report.looks import class_name
from shortlist.report.markup import Html, join, table, tag
from shortlist.report.plots import bar_plot, distributions_plot
from shortlist.report.thumbnails import Album

SHOWN_PAIRS = 24  # of pictures with two labels


def why_it_fails(
    album: Album,
    catalog: Catalog,
    analysis: Analysis,
    k: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> Html:
    """Everything that is known of the failures of a test."""
    return join(
        tag("div", _ranks(analysis), _similarities(analysis), class_="plots"),
        _nearer(analysis),
        _by_size(analysis, k, "By the number of right images" if catalog.judgements else "By class size"),
        _confused(album, catalog, analysis, confusions(analysis, catalog)),
        _twice(album, catalog, duplicates(analysis, catalog, progress)),
    )


def _ranks(analysis: Analysis) -> Html:
    shares, number = first_ranks(analysis), len(analysis.answerable)
    bars = [
        (
            f"{each.high:,}",
            100 * each.queries / number,
            f"rank {each.name}: {each.queries:,} queries, {100 * each.queries / number:.1f} %",
        )
        for each in shares
    ]
    median = int(np.median(analysis.first[analysis.answerable]))
    summary = f"Rank of the first right result: half of the queries have it at rank {median:,} or before."
    return bar_plot("rank of the first right result", bars, x_name="rank, up to", summary=summary)


def _similarities(analysis: Analysis) -> Html:
    edges = np.linspace(-1, 1, BINS + 1).tolist()
    pairs = {"right pairs": analysis.right_pairs, "wrong pairs": analysis.wrong_pairs}
    shares = {name: (each / max(1, each.sum())).tolist() for name, each in pairs.items()}
    return distributions_plot("similarity", edges, shares, "Similarities of right and wrong pairs.")


def _by_size(analysis: Analysis, k: Sequence[int], title: str) -> Html:
    rows = [
        [each.name, f"{each.queries:,}", *(_share(value) for value in each.r_at_k)] for each in by_size(analysis, k)
    ]
    header = ["images to find", "queries", *(f"r@{cut}, %" for cut in k)]
    return join(tag("h3", title), table(header, rows))


def _nearer(analysis: Analysis) -> Html | None:
    found = separation(analysis)
    if found is None:
        return None
    text = f"Of a right and a wrong pair of any queries, the right one is nearer in {100 * found:.1f} % of all cases. "
    return tag("p", text, "Searching is harder: the nearest of all wrong ones counts.", class_="note")


def _share(value: float) -> Html:
    return join(f"{100 * value:.1f}", tag("span", class_="meter", style=f"--share:{100 * value:.1f}%"))


def _confused(album: Album, catalog: Catalog, analysis: Analysis, found: Sequence[Confusion]) -> Html | None:
    if catalog.judgements:
        return None
    title = tag("h3", "Classes confused most")
    if not found:
        return join(title, tag("p", "None: every query has an image of its own class first.", class_="note"))
    what = "Queries of the first class whose nearest image is of the second, with the most certain mistakes."
    items = []
    for each in found:
        share = f"{each.times:,} of {each.queries:,} queries ({100 * each.times / each.queries:.0f} %)"
        names = [tag("b", catalog.class_names[each.asked]), " taken for ", tag("b", catalog.class_names[each.found])]
        examples = [_example(album, catalog, analysis, number) for number in each.examples]
        text = tag("p", names, tag("br"), tag("span", share, class_="count"))
        items.append(tag("li", text, tag("div", examples, class_="examples")))
    return join(title, tag("p", what, class_="note"), tag("ul", items, class_="pairs"))


def _example(album: Album, catalog: Catalog, analysis: Analysis, number: int) -> Html:
    query, result = int(analysis.queries[number]), int(analysis.results[number, 0])
    asks = album.show(catalog, query, f"query: {class_name(catalog, query)}")
    found = album.show(catalog, result, f"wrong: {class_name(catalog, result)}")
    return tag(
        "span", tag("span", asks, class_="asks"), "→", tag("span", tag("span", found, class_="frame"), class_="wrong"),
        class_="pair", title=f"{catalog.paths[query]} finds {catalog.paths[result]}",
    )  # fmt: skip


def _twice(album: Album, catalog: Catalog, found: Duplicates) -> Html | None:
    if catalog.judgements:
        return None
    title = tag("h3", "The same picture in two classes")
    unchecked = f" {found.unchecked:,} more pairs have equal vectors, and were not compared." if found.unchecked else ""
    if not found.pairs:
        text = f"None among the first results of the queries.{unchecked}"
        return join(
            title, tag("p", text, " ", tag("code", "shortlist data check"), " looks at all files.", class_="note")
        )
    more = f" The first {SHOWN_PAIRS} of them:" if len(found.pairs) > SHOWN_PAIRS else ""
    pairs = "pair of images has" if len(found.pairs) == 1 else "pairs of images have"
    text = f"{len(found.pairs):,} {pairs} equal pixels and different labels: at least one label of each is wrong.{more}"
    items = []
    for pair in found.pairs[:SHOWN_PAIRS]:
        shown = [tag("span", album.show(catalog, row, class_name(catalog, row)), class_="asks") for row in pair]
        names = join(*(join(tag("b", class_name(catalog, row)), f" {catalog.paths[row]}", tag("br")) for row in pair))
        items.append(tag("li", tag("p", names, class_="count"), tag("span", shown, class_="pair")))
    return join(title, tag("p", f"{text}{unchecked}", class_="note"), tag("ul", items, class_="pairs"))
