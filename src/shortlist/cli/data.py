"""The commands `shortlist data`: inspect images and benchmarks."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import AsJson, AsJsonWithProgress, LabelSeparator, Root, Source, app, untruncated_column
from shortlist.errors import check_known, shorten_list
from shortlist.progress import display_for, format_count

SHOWN_PAIRS = 50  # maximum number of pairs of each kind that are printed

SplitSeed = Annotated[int | None, typer.Option(help="Same as data.split_seed in training.")]

data_app = typer.Typer(help="Inspect images and benchmarks before training.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def list_benchmarks(as_json: AsJson = False) -> None:
    """List the supported benchmarks."""
    from shortlist.data.benchmarks import BENCHMARKS

    if as_json:
        print(json.dumps([benchmark.facts() for benchmark in BENCHMARKS.values()], indent=2))
        return
    protocols = {name: benchmark.protocol.partition(":")[0] for name, benchmark in BENCHMARKS.items()}
    table = Table(
        untruncated_column("name", BENCHMARKS), "description", untruncated_column("protocol", protocols.values())
    )
    for name, benchmark in BENCHMARKS.items():
        table.add_row(name, benchmark.about, protocols[name])
    console = Console(highlight=False)
    console.print(table)
    console.print("Run `shortlist data about NAME` for the files to download and the expected folder.")


@data_app.command()
def about(name: Annotated[str, typer.Argument(help="Name of the benchmark.")], as_json: AsJson = False) -> None:
    """Describe a benchmark: its images, where to download them, and the expected folder structure."""
    from shortlist.data.benchmarks import BENCHMARKS

    check_known("benchmark", name, BENCHMARKS)
    benchmark = BENCHMARKS[name]
    print(json.dumps(benchmark.facts(), indent=2) if as_json else benchmark.description())


@data_app.command()
def show(
    source: Source,
    root: Root = None,
    split_seed: SplitSeed = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Also print the names of the training and test classes.")
    ] = False,
    label_separator: LabelSeparator = None,
    as_json: AsJson = False,
) -> None:
    """Print the number of images and classes, their division by `shortlist train folder`, and the image sizes."""
    from shortlist.data import open_catalog
    from shortlist.data.inspection import class_names, describe_splits, format_spread, split_as_training, summary

    catalog = split_as_training(
        open_catalog(source, root=root, on_missing="skip", split_seed=split_seed, label_separator=label_separator)
    )
    facts = summary(catalog) | ({"class_names": class_names(catalog)} if classes else {})
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    header, *rows = describe_splits(catalog)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(f"{catalog.name} in {catalog.root}", markup=False)
    console.print(table)
    if "validation" in facts["splits"]:
        console.print(
            "The validation classes choose the epoch. `shortlist train --final RUN` then trains on all classes."
        )
    for split, names in facts.get("class_names", {}).items():
        console.print(f"{split}: {', '.join(names)}", markup=False)
    sizes = "; ".join(f"{side}: {format_spread(facts[side])}" for side in ("width", "height"))
    console.print(f"{sizes} (min, median, max of {facts['sampled']:,} images)")
    if facts["unreadable"]:
        console.print(f"unreadable: {facts['unreadable']:,} of these images; shortlist data check gives the reasons")
    if "roles" in facts:
        console.print("; ".join(f"{role}: {number:,} images" for role, number in facts["roles"].items()))
    for kind in ("missing", "ignored"):
        if facts[kind]:
            console.print(f"{kind}: {len(facts[kind]):,} ({shorten_list(facts[kind], 5)})", markup=False)
    for remark in facts["remarks"]:
        console.print(f"note: {remark}", markup=False)


@data_app.command()
def check(
    source: Source,
    root: Root = None,
    split_seed: SplitSeed = None,
    label_separator: LabelSeparator = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Decode all images, and list missing files, unreadable files and duplicates. Exits with 1 if there are any.

    Different files that look the same are listed as well if they are in two classes, or if one is a training image and
    the other is not, because results on such test images are too good.
    """
    from shortlist.data import inspection, open_catalog

    display = display_for(sys.stderr, as_json=as_json)
    with display.task("unpacking", "images", later=True) as progress:
        catalog = open_catalog(
            source,
            root=root,
            on_missing="skip",
            split_seed=split_seed,
            label_separator=label_separator,
            progress=progress,
        )
    report = inspection.check(inspection.split_as_training(catalog), display=display)
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "ok": report.ok}, indent=2))
    else:
        for path in report.missing:
            print(f"missing: {path}")
        for path, reason in report.unreadable:
            print(f"unreadable: {path}: {reason}")
        for one, other in report.duplicates:
            print(f"the same image in two classes: {one} and {other}")
        for one, other in report.copies[:SHOWN_PAIRS]:
            print(f"the same image twice in a class: {one} and {other}")
        _print_rest(len(report.copies), "the same image twice in a class")
        for pair in report.look_alikes[:SHOWN_PAIRS]:
            problem = "one is a training image, the other is not" if pair.leak else "they are in two classes"
            print(f"looks the same; {problem}: {pair.one} and {pair.other}")
        _print_rest(len(report.look_alikes), "images that look the same")
        duplicates, copies, alike = (len(each) for each in (report.duplicates, report.copies, report.look_alikes))
        print(
            f"{format_count(report.images, 'images')} checked: {len(report.missing):,} missing, "
            f"{len(report.unreadable):,} unreadable, {format_count(duplicates, 'duplicates')} across classes, "
            f"{format_count(copies, 'duplicates')} within a class, "
            f"{format_count(alike, 'pairs')} of images that look the same"
        )
    raise typer.Exit(0 if report.ok else 1)


def _print_rest(number: int, kind: str) -> None:
    """Print how many pairs of a kind are not printed."""
    if number > SHOWN_PAIRS:
        print(f"{format_count(number - SHOWN_PAIRS, 'more pairs')} ({kind}): --json lists all")
