"""Look at runs: the report of one, and several compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shortlist.cli.app import app


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file. Default: RUN/report.html.")] = None,
) -> None:
    """Write a page about a run: its numbers and curves, what its searches look like, and why they fail.

    One HTML file with everything inside: it opens from disk, and can be sent. `train` writes it as well.
    """
    from shortlist.report.run_report import write_report
    from shortlist.training.display import display_for

    display = display_for(sys.stdout)
    file = write_report(run, out, display)
    display.message(f"The report is {file}.", report=str(file))
