"""The numbers of a run at the top of its report: before and after training, and beside them the paper's."""

from __future__ import annotations

from collections.abc import Sequence

from shortlist.evaluation import Estimate, Evaluation
from shortlist.report.markup import Child, Html, join, table, tag
from shortlist.report.tables import counts


def gauge_key(after: Sequence[Evaluation], before: Sequence[Evaluation]) -> str:
    """What the marks in the tiles mean, as far as there are any."""
    marks = ["the dot is the value", "the bar its 95 % interval"]
    marks += ["the ring the value before training"] if before else []
    marks += ["the upright line the paper's"] if any(each.difference for each in after) else []
    return f"In each tile, on a line from 0 to 100 %: {', '.join(marks)}."


def lead(after: Evaluation, before: Evaluation | None) -> Html:
    """The most important number, in a sentence; of judged queries one for each setup."""
    values = {name: tag("b", f"{100 * estimate.value:.1f} %") for name, estimate in after.headline.items()}
    if "r@1" in values:
        was = "" if before is None else f"; before training it was {_value(before, 'r@1')} %"
        of = f" of {after.queries - after.left_out:,} queries of {after.data}{was}."
        return tag("p", "The nearest image is a right one for ", values["r@1"], of, class_="lead")
    each = [join(", " if number else "", name, " ", value) for number, (name, value) in enumerate(values.items())]
    return tag("p", f"On {after.data}: ", each, ".", class_="lead")


def numbers(after: Evaluation, before: Evaluation | None) -> Html:
    """Tiles of the metrics by which the test is known, and a table of all."""
    return join(
        tag("div", [_tile(name, each, after, before) for name, each in after.headline.items()], class_="tiles"),
        tag("p", f"{counts(after)}.", class_="note"),
        [tag("p", f"Note: {remark}", class_="note") for remark in after.remarks],
        tag("details", tag("summary", "All metrics"), _table(after, before)),
    )


def _tile(name: str, estimate: Estimate, after: Evaluation, before: Evaluation | None) -> Html:
    value, _, interval = str(estimate).partition(" ")
    than: list[Html] = []
    if interval:
        than.append(tag("p", f"95 % {interval}", class_="than"))
    if before is not None and name in before.metrics:
        gained = 100 * (estimate.value - before.metrics[name].value)
        than.append(tag("p", f"before {_value(before, name)} ({gained:+.1f})", class_="than"))
    if name in after.paper:
        than.append(tag("p", f"paper {after.paper[name]:.1f} ({after.difference[name]:+.1f})", class_="than"))
    return tag(
        "div",
        tag("p", name, class_="name"),
        tag("p", value, tag("small", " %"), class_="value"),
        _gauge(estimate, before.metrics.get(name) if before else None, after.paper.get(name)),
        than,
        class_="tile",
    )


def _gauge(estimate: Estimate, before: Estimate | None, paper: float | None) -> Html:
    """From 0 to 100 %: the value, its interval, and those it is compared with. The texts beside it say the same."""

    def at(share: float) -> str:
        return f"{3 + 94 * share:.1f}%"

    shapes = [tag("line", x1=at(0), x2=at(1), y1=6, y2=6, class_="track")]
    if estimate.low is not None and estimate.high is not None:
        shapes.append(tag("line", x1=at(estimate.low), x2=at(estimate.high), y1=6, y2=6, class_="span"))
    if paper is not None:
        shapes.append(tag("line", x1=at(paper / 100), x2=at(paper / 100), y1=0, y2=12, class_="paper"))
    if before is not None:
        shapes.append(tag("circle", cx=at(before.value), cy=6, r=3.5, class_="before"))
    shapes.append(tag("circle", cx=at(estimate.value), cy=6, r=4.5, class_="now"))
    return tag("svg", shapes, height=12, aria_hidden="true")


def _table(after: Evaluation, before: Evaluation | None) -> Html:
    header = ["metric, %", *(["before"] if before else []), "after", "95 % interval"]
    header += ["paper", "difference"] if after.paper else []
    rows: list[Sequence[Child]] = []
    for name in dict.fromkeys((*after.paper, *after.metrics)):
        estimate = after.metrics.get(name)
        value, _, interval = ("-", "", "not measured") if estimate is None else str(estimate).partition(" ")
        row = [name, *([_value(before, name)] if before else []), value, interval]
        if after.paper:
            row.append(f"{after.paper[name]:.1f}" if name in after.paper else "")
            row.append(f"{after.difference[name]:+.1f}" if name in after.difference else "")
        rows.append(row)
    return table(header, rows)


def _value(measured: Evaluation, name: str) -> str:
    return f"{100 * measured.metrics[name].value:.1f}" if name in measured.metrics else "-"
