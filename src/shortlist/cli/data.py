"""Look at images before training on them."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import AsJson, AsJsonWithProgress, Root, Source, app, whole_column
from shortlist.errors import ConfigError, did_you_mean

data_app = typer.Typer(help="Look at images before training on them.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def list_benchmarks(as_json: AsJson = False) -> None:
    """List the benchmarks that are known by name."""
    from shortlist.data.benchmarks import BENCHMARKS

    if as_json:
        print(json.dumps([benchmark.facts() for benchmark in BENCHMARKS.values()], indent=2))
        return
    protocols = {name: benchmark.protocol.partition(":")[0] for name, benchmark in BENCHMARKS.items()}
    table = Table(whole_column("name", BENCHMARKS), "what it is", whole_column("protocol", protocols.values()))
    for name, benchmark in BENCHMARKS.items():
        table.add_row(name, benchmark.about, protocols[name])
    console = Console(highlight=False)
    console.print(table)
    console.print("shortlist data about NAME says what to download and where to put it.")


@data_app.command()
def about(name: Annotated[str, typer.Argument(help="A benchmark's name.")], as_json: AsJson = False) -> None:
    """Print what a benchmark is, where to download it, and what its folder must look like."""
    from shortlist.data.benchmarks import BENCHMARKS

    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}, {did_you_mean(name, BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    print(json.dumps(benchmark.facts(), indent=2) if as_json else benchmark.description())


@data_app.command()
def show(source: Source, root: Root = None, as_json: AsJson = False) -> None:
    """Print what is in a source: images, classes, sizes."""
    from shortlist.data import open_catalog
    from shortlist.data.inspection import summary

    catalog = open_catalog(source, root=root, on_missing="skip")
    facts = summary(catalog)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(
        "", "images", "classes", "images a class: min, median, max", f"classes below {facts['per_class']} images"
    )
    for name, part in {**facts["splits"], "all": facts}.items():
        table.add_row(
            name,
            f"{part['images']:,}",
            f"{part['classes']:,}",
            _spread(part["images_per_class"]),
            str(part["too_small"]),
        )
    console = Console(highlight=False)
    console.print(f"{catalog.name} in {catalog.root}", markup=False)
    console.print(table)
    console.print(
        f"width: {_spread(facts['width'])}; height: {_spread(facts['height'])} (of {facts['sampled']:,} images)"
    )
    if "roles" in facts:
        console.print("; ".join(f"{role}: {number:,} images" for role, number in facts["roles"].items()))
    for what in ("missing", "ignored"):
        if facts[what]:
            console.print(f"{what}: {_some(facts[what])}", markup=False)
    for remark in facts["remarks"]:
        console.print(f"note: {remark}", markup=False)


@data_app.command()
def check(source: Source, root: Root = None, as_json: AsJsonWithProgress = False) -> None:
    """Open every image, and list missing and unreadable files and duplicates. Ends with 1 if there is any problem."""
    from shortlist.data import inspection, open_catalog
    from shortlist.progress import display_for

    display = display_for(sys.stderr, as_json=as_json)
    with display.task("unpacking", "images", later=True) as progress:
        catalog = open_catalog(source, root=root, on_missing="skip", progress=progress)
    report = inspection.check(catalog, display=display)
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "ok": report.ok}, indent=2))
    else:
        for path in report.missing:
            print(f"missing: {path}")
        for path, why in report.unreadable:
            print(f"unreadable: {path}: {why}")
        for one, other in report.duplicates:
            print(f"the same image in two classes: {one} and {other}")
        print(
            f"{report.images:,} images opened: {len(report.missing)} missing, {len(report.unreadable)} unreadable, "
            f"{len(report.duplicates)} pairs across classes, {report.copies} copies within a class"
        )
    raise typer.Exit(0 if report.ok else 1)


def _spread(values: dict[str, float] | None) -> str:
    return "-" if values is None else ", ".join(f"{values[each]:g}" for each in ("min", "median", "max"))


def _some(names: list[str], shown: int = 5) -> str:
    return f"{len(names)} ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"
