"""The commands `shortlist report` and `shortlist compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shortlist.cli.app import (
    AsJsonLines,
    AsJsonWithProgress,
    LabelSeparator,
    ModelCommand,
    ModelName,
    Root,
    app,
    keep_freed_memory,
)
from shortlist.errors import ConfigError
from shortlist.progress import display_for


@app.command(cls=ModelCommand)
def report(
    run: ModelName,
    images: Annotated[
        str | None, typer.Argument(help="Labelled images to report on. Default: the test images of the run.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write. Default: RUN/report.html; with IMAGES, report.html."),
    ] = None,
    root: Root = None,
    label_separator: LabelSeparator = None,
    on_missing: Annotated[
        str | None, typer.Option(help="For missing or unreadable IMAGES: error, or skip. Default: error.")
    ] = None,
    training_images: Annotated[
        bool,
        typer.Option(
            "--training-images", help="Embed the training images, and list test images with almost the same vector."
        ),
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Write an HTML report of a run: metrics, training curves, queries with their results, and failures.

    With IMAGES, it is a report of any model on these images, without training curves.

    The report is a single file that needs no network connection. `train` also writes it.
    """
    from shortlist.report import write_model_report, write_report
    from shortlist.training import EvalImages

    display = display_for(sys.stdout, as_json=as_json)
    given = {"root": root, "label_separator": label_separator, "on_missing": on_missing}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options and images is None:
        raise ConfigError(f"`{next(iter(options))}` is for IMAGES: give labelled images to report on, or omit it.")
    keep_freed_memory()
    if images is not None:
        file = write_model_report(run, EvalImages(images, **options), out or Path("report.html"), display)
    else:
        file = write_report(run, out, display, training_images=training_images)
    display.message(f"The report is {file}.", report=str(file))


class _CompareCommand(TyperCommand):
    """Command whose option --with takes all arguments up to the next option; each --with starts another group."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        in_group = False
        for arg in args:
            if not in_group or arg.startswith("-") or joined[-1] == "--with":
                joined.append(arg)
                in_group = arg == "--with" or (in_group and not arg.startswith("-"))
            else:
                joined[-1] += f"\n{arg}"  # an option has only one value
        return super().parse_args(ctx, joined)


@app.command(cls=_CompareCommand)
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_A RUN_B...",
            help="Folders of finished runs, glob patterns, or pretrained models (timm:NAME), which are tested on the "
            "images of the runs; or galleries. The others are compared with the first.",
        ),
    ],
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="RUN...",
            help="Folders of another group of runs. Groups are compared with the first group, paired by seed.",
        ),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGES",
            help="Labelled images to search galleries with: a folder with one sub-folder per label, or a table. "
            "Default: their own labelled images, where each image searches for the others.",
        ),
    ] = None,
    label_separator: LabelSeparator = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write. Default: comparison.html; with --json, none."),
    ] = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Compare runs on the same queries, with confidence intervals and p-values from a paired bootstrap.

    Prints a table of all metrics, and writes an HTML page that shows the same queries side by side. To compare groups
    of runs that differ in their seed:

        shortlist compare runs/rsk-* --with runs/sap-*

    To decide whether a gallery that was rebuilt with a new model should replace the current one:

        shortlist compare live gallery-2 --queries my-queries
    """
    from shortlist.files import check_writable
    from shortlist.report import compare_groups, compare_runs, write_comparison
    from shortlist.report.terminal_tables import print_comparison

    display = display_for(sys.stderr, as_json=as_json)
    if out is not None:
        check_writable(out)
    keep_freed_memory()
    if groups:
        comparison = compare_groups([runs, *(group.split("\n") for group in groups)], display)
    else:
        comparison = compare_runs(runs, display, queries=queries, label_separator=label_separator)
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        print_comparison(comparison)
    if out is not None or not as_json:
        file = out or Path("comparison.html")
        remark = ", which replaced an earlier file; --out writes to another one" if file.exists() else ""
        write_comparison(comparison, file, display)
        display.message(f"The page is {file}{remark}.", page=str(file))
