"""The command line: parses, calls, prints. No logic lives here."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from shortlist.config import RunConfig
from shortlist.errors import ConfigError, Interrupted, ShortlistError, did_you_mean

app = typer.Typer(
    help="Train image embeddings so that the right answers land in the first k results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at images before training on them.", no_args_is_help=True)
app.add_typer(data_app, name="data")
recipes_app = typer.Typer(help="Look at the recipes before training one.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as optimizer.lr=1e-4 data.root=cars.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Source = Annotated[
    str, typer.Argument(help="A benchmark's name, a folder with a sub-folder a class, or a .csv or .parquet file.")
]
Root = Annotated[
    Path | None, typer.Option(help="The folder of a benchmark, or the one that a table's paths are relative to.")
]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="A packaged recipe's name, or a YAML file.")] = None,
    settings: Settings = None,
    run: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/NAME, or NAME-2 and so on.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the whole plan, and train nothing.")] = False,
) -> None:
    """Train a model, or go on with a run that was stopped.

    Every setting of a recipe can be set on the command line by its dotted name. A folder of images of your own:

        shortlist train folder data.source=my-images
    """
    from shortlist.recipes import open_recipe

    if resume is not None and (recipe is not None or run is not None or dry_run):
        raise ConfigError("--resume takes a run's folder and nothing else: its settings are in it.")
    if resume is None and recipe is None:
        raise ConfigError("Which recipe? Give its name or a YAML file, or --resume RUN.")
    config = None if recipe is None else open_recipe(recipe, settings or [])

    from shortlist import training  # takes seconds: a mistake is told before
    from shortlist.training.display import display_for

    display = display_for(sys.stdout)
    if resume is not None:
        done = training.resume(resume, display)
    elif config is not None:
        if dry_run:
            _print_plan(config)
            return
        done = training.train(config, run or _new_folder(config.name), display)
    display.message(f"The run is in {done.path}.", run=str(done.path))


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    data: Annotated[str | None, typer.Option(help="Other images than the run's own test classes.")] = None,
    root: Root = None,
    distractors: Annotated[
        Path | None, typer.Option(help="A folder with R1M: --data is tested without it, and with it.")
    ] = None,
    on_missing: Annotated[
        str | None,
        typer.Option(help="error, or skip: leave out images that are missing or unreadable. Default: the run's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a run, with 95 % intervals, beside what the paper reports where its recipe knows that.

    By class: r@k, recall@k, mAP, mAP@R and R-precision. Judged queries (roxford5k, ...): mAP and mP@k of each setup.
    """
    from shortlist.recipes import differences, recipe_names
    from shortlist.report.tables import print_evaluations
    from shortlist.training import RunFolder, evaluate_run
    from shortlist.training.display import display_for

    for option, value in {"--root": root, "--distractors": distractors}.items():
        if value is not None and data is None:
            raise ConfigError(f"{option} says where other images lie: it goes with --data.")
    display = display_for(sys.stderr)
    measured = evaluate_run(run, data, root=root, distractors=distractors, on_missing=on_missing, display=display)
    if as_json:
        print(json.dumps([each.to_dict() for each in measured], indent=2))
    else:
        config = RunFolder.open(run).config()
        packaged = config.name in recipe_names() and data is None
        print_evaluations(measured, () if data else config.paper, ours=config.measured if packaged else None)
        if packaged and (others := differences(config)):
            print(f"This run is not what the recipe {config.name} says. It has {', '.join(others)}")


@app.command()
def ablate(
    study: Annotated[str, typer.Argument(help="What varies: rank-temperature, batch-size or k.")],
    recipe: Annotated[str, typer.Argument(help="A packaged recipe's name, or a YAML file.")],
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder. Default: ablations/STUDY-RECIPE.")] = None,
    values: Annotated[
        str | None,
        typer.Option(help="Of what varies, with blanks between: '16 64 256' or '[1] [1,2]'. Default: the paper's."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Some of 'RS@k, RS@k + SiMix, SAP', with commas between. Default: all that vary.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 3,
    learning_rate: Annotated[
        str, typer.Option(help="constant, or with the batch: linear or sqrt.", metavar="RULE")
    ] = "constant",
) -> None:
    """Repeat a study of the paper: train a recipe for every value of one setting, with RS@k, RS@k + SiMix and SAP.

    A study that was stopped goes on with the same command. Several processes may work on one. In the study's folder:
    results.json, a plot beside the paper's own numbers, and a run for every case.
    """
    from shortlist.recipes import open_recipe

    config = open_recipe(recipe, settings or [])

    from shortlist import training  # takes seconds: a mistake is told before
    from shortlist.report.ablation import draw, metric, read_results, table
    from shortlist.training.display import display_for

    folder = out or Path("ablations") / f"{study}-{config.name}"
    file = training.ablate(
        study,
        config,
        folder,
        values=re.findall(r"\[[^]]*]|\S+", values or ""),  # blanks in a list do not end it
        methods=[method.strip() for method in methods.split(",")] if methods else [],
        seeds=seeds,
        learning_rate=learning_rate,
        display=display_for(sys.stdout),
    )
    results = read_results(file)
    header, rows = table(results)
    shown = Table(*header, title=f"{metric(results)} in %, mean ± standard deviation over the seeds")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
    print(f"The plot is {draw(results, folder / 'plot.png')}, the results are in {file}.")


@recipes_app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes with the r@1 (or mAP) that the paper reports for each of its tests, and what we measured."""
    from shortlist.recipes import describe_recipes

    facts = describe_recipes()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(_whole("recipe", [each["name"] for each in facts]), "the paper, %", "measured by us, %")
    for each in facts:
        table.add_row(each["name"], _figures(each["paper"]) or "-", _figures(each["measured"]) or "by nobody")
    console = Console(highlight=False)
    console.print(table)
    console.print("shortlist recipes show NAME says what it is, and all its numbers.")


@recipes_app.command("show")
def show_recipe(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe's name, or a YAML file.")], settings: Settings = None
) -> None:
    """Print a recipe with everything that it inherits and every default: what `train` would run."""
    import yaml

    from shortlist.recipes import open_recipe

    config = open_recipe(recipe, settings or [])
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120), end="")


@app.command()
def demo(
    run: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/demo, or demo-2 and so on.")] = None,
) -> None:
    """Train on glyphs, which are drawn on the spot, and show what was learned: under two minutes on two cores."""
    from shortlist.recipes import open_recipe
    from shortlist.report.demo import run_demo
    from shortlist.training.display import display_for

    run_demo(open_recipe("glyphs"), run or _new_folder("demo"), display_for(sys.stdout))


@data_app.command("list")
def list_benchmarks(as_json: AsJson = False) -> None:
    """List the benchmarks that are known by name."""
    from shortlist.data.benchmarks import BENCHMARKS

    if as_json:
        print(json.dumps([benchmark.facts() for benchmark in BENCHMARKS.values()], indent=2))
        return
    protocols = {name: benchmark.protocol.partition(":")[0] for name, benchmark in BENCHMARKS.items()}
    table = Table(_whole("name", BENCHMARKS), "what it is", _whole("protocol", protocols.values()))
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
def check(source: Source, root: Root = None, as_json: AsJson = False) -> None:
    """Open every image, and list missing and unreadable files and duplicates. Ends with 1 if there is any problem."""
    from shortlist.data import inspection, open_catalog
    from shortlist.training.display import display_for

    catalog = open_catalog(source, root=root, on_missing="skip")
    display = display_for(sys.stderr)
    with display.task(f"opening {len(catalog):,} images") as progress:
        report = inspection.check(catalog, progress=progress)
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


def _print_plan(config: RunConfig) -> None:
    import yaml

    from shortlist.training import describe, make_plan
    from shortlist.training.display import display_for
    from shortlist.training.parts import build_embedder

    plan = make_plan(config, display_for(sys.stderr))
    facts = {"config": config.model_dump(mode="json"), "plan": describe(plan, build_embedder(config, weights=False))}
    print(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=120), end="")


def _whole(header: str, names: Iterable[str]) -> Column:
    """A column of names, which a narrow terminal must not cut: they are there to be copied."""
    return Column(header, min_width=max(map(len, names)), no_wrap=True)


def _figures(figures: dict[str, dict[str, float]]) -> str:
    """The first figure of each test."""
    first = [next(iter(each.items())) for each in figures.values() if each]
    return f"{first[0][0]} {', '.join(f'{value:.1f}' for _, value in first)}" if first else ""


def _spread(values: dict[str, float] | None) -> str:
    return "-" if values is None else ", ".join(f"{values[each]:g}" for each in ("min", "median", "max"))


def _some(names: list[str], shown: int = 5) -> str:
    return f"{len(names)} ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"


def _new_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is not there yet."""
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder


def main() -> None:
    """Run the command line; a user's mistake is one message, and no traceback."""
    warnings.showwarning = lambda message, *_: print(f"Warning: {message}", file=sys.stderr)
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    try:
        app()
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        raise SystemExit(130) from None
    except ShortlistError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"Error: {error.strerror or error}{where}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
