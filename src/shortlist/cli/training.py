"""Train, measure, repeat a study, and show it all on glyphs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import AsJsonLines, AsJsonWithProgress, Root, Settings, app
from shortlist.config import RunConfig
from shortlist.errors import ConfigError


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="A packaged recipe's name, or a YAML file.")] = None,
    settings: Settings = None,
    run: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/NAME, or NAME-2 and so on.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the whole plan, and train nothing.")] = False,
    as_json: AsJsonLines = False,
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
    from shortlist.progress import display_for
    from shortlist.report.run_report import report_after_training

    _reuse_freed_memory()
    display = display_for(sys.stdout, as_json=as_json)
    if resume is not None:
        done = training.resume(resume, display)
    elif config is not None:
        if dry_run:
            _print_plan(config, as_json)
            return
        done = training.train(config, run or _new_folder(config.name), display)
    report_after_training(done, display)
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
    as_json: AsJsonWithProgress = False,
) -> None:
    """Measure a run, with 95 % intervals, beside what the paper reports where its recipe knows that.

    By class: r@k, recall@k, mAP, mAP@R and R-precision. Judged queries (roxford5k, ...): mAP and mP@k of each setup.
    """
    from shortlist.progress import display_for
    from shortlist.recipes import differences, recipe_names
    from shortlist.report.tables import print_evaluations
    from shortlist.training import RunFolder, evaluate_run

    display = display_for(sys.stderr, as_json=as_json)
    measured = evaluate_run(run, data, root=root, distractors=distractors, on_missing=on_missing, display=display)
    if as_json:
        print(json.dumps([each.to_dict() for each in measured], indent=2))
    else:
        config = RunFolder.open(run).config()
        packaged = config.name in recipe_names() and data is None
        print_evaluations(measured, () if data else config.paper, reproduced=config.measured if packaged else None)
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
    as_json: AsJsonLines = False,
) -> None:
    """Repeat a study of the paper: train a recipe for every value of one setting, with RS@k, RS@k + SiMix and SAP.

    A study that was stopped goes on with the same command. Several processes may work on one. In the study's folder:
    results.json, a plot beside the paper's own numbers, and a run for every case.
    """
    from shortlist.recipes import open_recipe

    config = open_recipe(recipe, settings or [])

    from shortlist import training  # takes seconds: a mistake is told before
    from shortlist.progress import display_for
    from shortlist.report.ablation import draw, read_results, shown_metric, table

    _reuse_freed_memory()
    display = display_for(sys.stdout, as_json=as_json)
    folder = out or Path("ablations") / f"{study}-{config.name}"
    file = training.ablate(
        study,
        config,
        folder,
        values=re.findall(r"\[[^]]*]|\S+", values or ""),  # blanks in a list do not end it
        methods=[method.strip() for method in methods.split(",")] if methods else [],
        seeds=seeds,
        learning_rate=learning_rate,
        display=display,
    )
    results = read_results(file)
    if not as_json:
        header, rows = table(results)
        shown = Table(*header, title=f"{shown_metric(results)} in %, mean ± standard deviation over the seeds")
        for row in rows:
            shown.add_row(*row)
        Console().print(shown)
    plot = draw(results, folder / "plot.png")
    display.message(f"The plot is {plot}, the results are in {file}.", plot=str(plot), results=str(file))


@app.command()
def demo(
    run: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/demo, or demo-2 and so on.")] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Train on glyphs, which are drawn on the spot, and show what was learned: under two minutes on two cores."""
    from shortlist.progress import display_for
    from shortlist.recipes import open_recipe
    from shortlist.report.demo import run_demo

    _reuse_freed_memory()
    run_demo(open_recipe("glyphs"), run or _new_folder("demo"), display_for(sys.stdout, as_json=as_json))


def _reuse_freed_memory() -> None:
    """For a training on the CPU. The allocator belongs to the process, so this is for its owner to decide."""
    import torch

    from shortlist.batches.memory import reuse_freed_memory

    if not torch.cuda.is_available():
        reuse_freed_memory()


def _print_plan(config: RunConfig, as_json: bool) -> None:
    import yaml

    from shortlist.progress import display_for
    from shortlist.training import describe, make_plan
    from shortlist.training.components import build_embedder

    plan = make_plan(config, display_for(sys.stderr, as_json=as_json))
    facts = {"config": config.model_dump(mode="json"), "plan": describe(plan, build_embedder(config, weights=False))}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=120), end="")


def _new_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is not there yet."""
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder
