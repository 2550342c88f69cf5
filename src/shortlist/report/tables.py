"""Evaluations as tables for a terminal: what was measured and, beside it, what the paper reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shortlist.evaluation import Evaluation
from shortlist.report.comparing import Comparison, shown_p


def print_evaluations(
    found: Sequence[Evaluation],
    paper: Iterable[str] = (),
    console: Console | None = None,
    ours: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """A table for each, which tests of the paper were not made, and what we got from the recipe.

    Args:
        found: what was measured.
        paper: everything that the paper has figures for.
        console: where to print; by default the standard output.
        ours: what we measured with the recipe, empty for nothing; None where that is no question.
    """
    console = console or Console()
    for each in found:
        console.print(evaluation_table(each))
        console.print(counts(each), highlight=False)
        for remark in each.remarks:
            console.print(f"note: {remark}", markup=False, highlight=False)
    others = [name for name in paper if name not in {each.data for each in found}]
    if others:
        console.print(
            f"The paper has figures for {', '.join(others)} as well, which was not tested here.", markup=False
        )
    if ours is not None:
        console.print(_by_us(ours), markup=False, highlight=False)


def _by_us(ours: Mapping[str, Mapping[str, float]]) -> str:
    if not ours:
        return "As far as we know, nobody has measured this recipe with shortlist before."
    each = (f"{test} {name} {value}" for test, figures in ours.items() for name, value in figures.items())
    return f"We measured with this recipe: {', '.join(each)}."


def evaluation_table(measured: Evaluation) -> Table:
    """A row a metric, the paper's first; with the paper's figures where it has any, and the difference to them."""
    title = escape(f"{measured.data}, {measured.split}: {measured.protocol}")
    table = Table("metric", "%", "95 % interval", title=title)
    if measured.paper:
        table.add_column("paper", justify="right")
        table.add_column("difference", justify="right")
    for name in dict.fromkeys((*measured.paper, *measured.metrics)):
        estimate = measured.metrics.get(name)
        value, _, interval = ("-", "", "not measured") if estimate is None else str(estimate).partition(" ")
        compared = [f"{measured.paper[name]:.1f}"] if name in measured.paper else []
        compared += [f"{measured.difference[name]:+.1f}"] if name in measured.difference else []
        table.add_row(name, value, interval, *compared)
    return table


def counts(measured: Evaluation) -> str:
    """How many queries and images stand behind the figures."""
    text = f"{measured.queries:,} queries, each against {measured.gallery:,} images; left out, for want of anything to "
    setups = "".join(f"; {setup}: {number:,} queries" for setup, number in measured.setups.items())
    return f"{text}find: {measured.left_out:,}{setups}"


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """A table for each test: every metric of every run, and the differences to the first; then what they say."""
    console = console or Console()
    for test in comparison.tests:
        first, *others = test.tested
        table = Table("metric", escape(f"{first}, %"), title=escape(f"{test.catalog.name}, the same queries"))
        for run in others:
            for column in (f"{run}, %", "difference [95 %]", "p"):
                table.add_column(escape(column), justify="right")
        for metric, value in test.means[first].items():
            row = [metric, f"{100 * value:.1f}"]
            for run in others:
                found = test.differences[run][metric]
                row += [f"{100 * test.means[run][metric]:.1f}", f"{found}{'' if found.real else ' ~'}", shown_p(found)]
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
    each = [found for test in comparison.tests for run in test.differences.values() for found in run.values()]
    if not all(found.real for found in each):
        console.print("~ the interval holds 0: no difference is shown", markup=False, highlight=False)
    for verdict in comparison.verdicts():
        console.print(f"{verdict}.", markup=False, highlight=False, soft_wrap=True)
