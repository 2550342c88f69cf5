"""Look at runs: the report of one, and several compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shortlist.cli.app import AsJsonLines, AsJsonWithProgress, app


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file. Default: RUN/report.html.")] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Write a page about a run: its numbers and curves, what its searches look like, and why they fail.

    One HTML file with everything inside: it opens from disk, and can be sent. `train` writes it as well.
    """
    from shortlist.progress import display_for
    from shortlist.report.run_report import write_report

    display = display_for(sys.stdout, as_json=as_json)
    file = write_report(run, out, display)
    display.message(f"The report is {file}.", report=str(file))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_A RUN_B...", help="Folders of finished runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page. Default: comparison.html here; with --json, none.")
    ] = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Compare runs on the same queries, each with the first: whether the difference is real, by a paired bootstrap.

    Prints a table of every metric, and writes a page of the same queries side by side.
    """
    from shortlist.progress import display_for
    from shortlist.report.comparison import compare_runs, write_comparison
    from shortlist.report.tables import print_comparison

    display = display_for(sys.stderr, as_json=as_json)
    comparison = compare_runs(runs, display)
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        print_comparison(comparison)
    if out is not None or not as_json:
        file = write_comparison(comparison, out or Path("comparison.html"), display)
        display.message(f"The page is {file}.", page=str(file))
