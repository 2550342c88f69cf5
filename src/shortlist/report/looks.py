"""How queries and their results look in a page: right and wrong by mark, by frame and by colour."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from shortlist.data import Catalog
from shortlist.report.analysis import Analysis
from shortlist.report.markup import Html, join, tag
from shortlist.report.thumbnails import Album


def class_name(catalog: Catalog, row: int) -> str:
    return catalog.class_names[int(catalog.labels[row])]


def queries_to_choose(
    album: Album,
    catalog: Catalog,
    rankings: Mapping[str, Analysis],
    chosen: Mapping[str, Sequence[int]],
    says: Mapping[str, str],
) -> Html:
    """Queries with their results, of which a reader sees a group or, unless answers are judged, a class.

    Args:
        album: of the page.
        catalog: what was tested.
        rankings: as of `query_card`.
        chosen: numbers of queries by group.
        says: what is on a group's button, where that is not its name.
    """
    groups: dict[int, list[str]] = {}
    for group, members in chosen.items():
        for number in members:
            groups.setdefault(number, []).append(group)
    cards = [query_card(album, catalog, rankings, number, names) for number, names in groups.items()]
    queries = next(iter(rankings.values())).queries
    classes = set() if catalog.judgements else {class_name(catalog, queries[number]) for number in groups}
    buttons = [(group, says.get(group, group), len(members)) for group, members in chosen.items()]
    return join(chooser(catalog.name, buttons, sorted(classes)), cards)


def query_card(
    album: Album,
    catalog: Catalog,
    rankings: Mapping[str, Analysis],
    number: int,
    groups: Iterable[str] = (),
) -> Html:
    """A query and its first results in one ranking or, with names, in several.

    Args:
        album: of the page.
        catalog: what was tested.
        rankings: by name, all of the same queries; a single one needs no name.
        number: of the query.
        groups: what a reader may choose it by.
    """
    some = next(iter(rankings.values()))
    row = int(some.queries[number])
    name, path = _called(catalog, row), str(catalog.paths[row])
    said = "" if len(rankings) > 1 else f"{first_right(some, number)}; "
    lists = [_ranking(album, catalog, each, number, title) for title, each in rankings.items()]
    text = tag(
        "div",
        tag("p", name, class_="class"),
        tag("p", f"{said}{int(some.to_find[number]):,} to find", class_="said"),
        None if name == path else tag("p", path, class_="path", title=path),
        class_="about",
    )
    picture = tag("div", album.show(catalog, row, f"query: {name}"), class_="asks")
    return tag(
        "article", tag("div", picture, text, class_="query"), tag("div", lists, class_="rankings"),
        class_="card", data_groups=json.dumps(list(groups)), data_class=name,
    )  # fmt: skip


def first_right(analysis: Analysis, number: int) -> str:
    """Where the first right result stands."""
    first = int(analysis.first[number])
    return "right at once" if first == 1 else f"first right result at rank {first:,}"


def _ranking(album: Album, catalog: Catalog, analysis: Analysis, number: int, title: str) -> Html:
    results = []
    for place, row in enumerate(analysis.results[number].tolist()):
        if row >= 0:
            right, similarity = bool(analysis.right[number, place]), float(analysis.similarities[number, place])
            results.append(_result(album, catalog, row, right, similarity, place + 1))
    head = tag("p", tag("b", title), f" {first_right(analysis, number)}", class_="run") if title else None
    return tag("div", head, tag("ol", results, class_="results"), class_="ranking")


def _result(album: Album, catalog: Catalog, row: int, right: bool, similarity: float, place: int) -> Html:
    name, kind = _called(catalog, row), "right" if right else "wrong"
    below = tag("span", f"{similarity:.2f}", class_="similarity")
    wrong = None if right or catalog.judgements else tag("span", name, class_="instead")
    picture = tag("span", album.show(catalog, row, f"{place}, {kind}: {name}"), class_="frame")
    return tag("li", picture, below, wrong, class_=kind, title=f"{kind}: {name}, {catalog.paths[row]}")


def _called(catalog: Catalog, row: int) -> str:
    """The class or, where answers are judged, the file."""
    return str(catalog.paths[row]) if catalog.judgements else class_name(catalog, row)


def chooser(name: str, groups: Sequence[tuple[str, str, int]], classes: Sequence[str]) -> Html:
    """What is shown of the queries: a group, by its button, or a class, by its name.

    Args:
        name: of what it chooses from.
        groups: of each its value, what the button says, and how many queries it has.
        classes: to choose from; with none there is no field for them.
    """
    buttons = [
        tag("button", says, tag("small", f" {number}"), type="button", data_group=value, aria_pressed="false")
        for value, says, number in groups
    ]
    field = None
    if classes:
        options = [tag("option", value=name) for name in classes]
        field = tag(
            "label", "class ", tag("input", type="search", list=f"classes-{quote(name)}", placeholder="all", size=14),
            tag("datalist", options, id=f"classes-{quote(name)}"),
        )  # fmt: skip
    shown = tag("output", aria_live="polite")
    return tag("div", tag("div", buttons, class_="buttons", role="group"), field, shown, class_="chooser", hidden=True)
