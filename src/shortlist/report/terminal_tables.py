"""Evaluations, comparisons and sweeps as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shortlist.evaluation import Evaluation
from shortlist.report.comparison import ComparedTest, Comparison, format_p
from shortlist.report.paper_tables import landmark_means, percentages
from shortlist.report.sweep_report import describe_best, header, rows
from shortlist.training import SweepResult

PIPE_WIDTH = 200  # characters per line of a pipe or a log file


def _standard_output() -> Console:
    """Return a console for standard output. Tables are not cut to the width of a terminal if it is not one."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def print_evaluations(
    evaluations: Sequence[Evaluation],
    paper: Iterable[str] = (),
    console: Console | None = None,
    reproduced: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Print a table per evaluation, the tests of the paper that are missing, and our own results with the recipe.

    Args:
        evaluations: The evaluations.
        paper: Names of all tests that the paper reports.
        console: Console to print to. Default: standard output.
        reproduced: Our results with the recipe by test and metric, empty if there are none yet; None to omit them.
    """
    console = console or _standard_output()
    for each in evaluations:
        console.print(evaluation_table(each))
        console.print(f"{counts(each)}.", highlight=False)
        for remark in each.remarks:
            console.print(f"note: {remark}", markup=False, highlight=False)
    reported = landmark_means({each.data: each.paper for each in evaluations})
    for name, mean in landmark_means(percentages(evaluations)).items():
        compared = f" (paper {reported[name]:.2f}, {mean - reported[name]:+.2f})" if name in reported else ""
        console.print(f"Mean mAP, medium and hard, {name}: {mean:.2f}{compared}.", markup=False, highlight=False)
    untested = [name for name in paper if name not in {each.data for each in evaluations}]
    if untested:
        console.print(f"The paper also reports results on {', '.join(untested)}, not tested here.", markup=False)
    if reproduced is not None:
        console.print(_reproduced(reproduced), markup=False, highlight=False)


def _reproduced(results: Mapping[str, Mapping[str, float]]) -> str:
    if not results:
        return "The results of this recipe have not been reproduced with shortlist yet."
    listed = (f"{test} {name} {value}" for test, metrics in results.items() for name, value in metrics.items())
    return f"Our own results with this recipe: {', '.join(listed)}."


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return a table with one row per metric, those of the paper first, with the paper's values and differences."""
    images = "all images" if evaluation.split == "all" else evaluation.split
    title = escape(f"{evaluation.data}, {images}: {evaluation.protocol}")
    table = Table("metric", "%", "95 % interval", title=title)
    if evaluation.paper:
        table.add_column("paper", justify="right")
        table.add_column("difference", justify="right")
    for name in dict.fromkeys((*evaluation.paper, *evaluation.metrics)):
        estimate = evaluation.metrics.get(name)
        value, _, interval = ("-", "", "not measured") if estimate is None else str(estimate).partition(" ")
        compared = [f"{evaluation.paper[name]:.1f}"] if name in evaluation.paper else []
        compared += [f"{evaluation.difference[name]:+.1f}"] if name in evaluation.difference else []
        table.add_row(name, value, interval, *compared)
    return table


def counts(evaluation: Evaluation) -> str:
    """Return the number of queries and gallery images of an evaluation as text."""
    setups = "".join(f"; {setup}: {number:,} queries" for setup, number in evaluation.setups.items())
    return (
        f"{evaluation.queries:,} queries, each against {evaluation.gallery:,} images; "
        f"excluded (no positive in the gallery): {evaluation.left_out:,}{setups}"
    )


def print_comparison(comparison: Comparison) -> None:
    """Print a table per test with all metrics of each run or group and the differences from the first, and verdicts."""
    console = _standard_output()
    for test in comparison.tests:
        first, *others = test.runs
        table = Table("metric", escape(f"{first}, %"), title=escape(f"{test.catalog.name}, the same queries"))
        for run in others:
            for column in (f"{run}, %", "difference [95 %]", "p"):
                table.add_column(escape(column), justify="right", no_wrap=column != f"{run}, %")
        for metric, value in test.means[first].items():
            row = [metric, f"{100 * value:.1f}"]
            for run in others:
                difference = test.differences[run][metric]
                marked = f"{difference}{'' if difference.significant else ' ~'}"
                row += [f"{100 * test.means[run][metric]:.1f}", marked, format_p(difference)]
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
        if test.seeds:
            console.print(_seeds_table(test))
    every = [each for test in comparison.tests for run in test.differences.values() for each in run.values()]
    if not all(difference.significant for difference in every):
        console.print("~ not significant: the interval contains 0", markup=False, highlight=False)
    for sentence in (*comparison.verdicts(), *comparison.remarks()):
        console.print(f"{sentence}.", markup=False, highlight=False, soft_wrap=True)


def _seeds_table(test: ComparedTest) -> Table:
    """Return a table with the first metric of each seed and group."""
    metric = next(iter(test.queries))
    table = Table("seed", *(escape(f"{group}, %") for group in test.seeds), title=f"{metric} by seed")
    for seed in next(iter(test.seeds.values())):
        table.add_row(str(seed), *(f"{100 * means[seed][metric]:.1f}" for means in test.seeds.values()))
    return table


def print_sweep(result: SweepResult) -> None:
    """Print the trials of a sweep, complete trials first, then by value, and a sentence about the best one."""
    console = _standard_output()
    table = Table(*map(escape, header(result)), title=escape(f"{result.path}, {result.done} of {result.total} trials"))
    for row in rows(result):
        table.add_row(*map(escape, row))
    console.print(table)
    console.print(describe_best(result), markup=False, highlight=False, soft_wrap=True)
