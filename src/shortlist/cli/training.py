"""The commands `shortlist train`, `evaluate`, `ablate` and `demo`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import (
    AsJsonLines,
    AsJsonWithProgress,
    LabelSeparator,
    Merge,
    ModelCommand,
    ModelName,
    PartsFolder,
    Recipe,
    Root,
    Settings,
    ShardOption,
    app,
    embedding_command,
    keep_freed_memory,
    print_facts,
)
from shortlist.errors import ConfigError, translate_arguments
from shortlist.launch import is_main_process, launched
from shortlist.progress import Display, display_for

if TYPE_CHECKING:
    from shortlist.config import RunConfig


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="Name of a packaged recipe, or a YAML file.")] = None,
    settings: Settings = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the new run. Default: runs/NAME, or runs/NAME-2 and so on.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of an interrupted run to resume.")] = None,
    final: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Folder of a finished run to repeat on all classes, for the number of epochs that was best in "
            "validation. The only setting that can be given is data.on_missing.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the configuration and the plan, with the estimated time, without training."
        ),
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Any setting of the recipe can be overridden by its dotted name. To train on your own folder of images:

        shortlist train folder data.source=my-images
    """
    with launched() as together:
        with together():
            if resume is not None and (recipe is not None or run is not None or dry_run):
                raise ConfigError(
                    "--resume takes only the folder of a run, which contains its settings. Omit the other arguments."
                )
            if final is not None and resume is not None:
                raise ConfigError("--final starts a new run, and --resume continues one: give one of the two options.")
            if resume is None and recipe is None and final is None:
                raise ConfigError("No recipe was given. Give the name of a recipe or a YAML file, or use --resume RUN.")
            config, advice = None, None
            if final is not None:
                from shortlist.runs import final_config

                config = final_config(final, *filter(None, [recipe, *(settings or [])]))
            elif recipe is not None:
                from shortlist.runs import choose_recipe, new_folder

                choice = choose_recipe(recipe, settings or [], run)
                config, advice = open_recipe(choice.recipe, choice.settings, context), choice.advice
                run = run or (new_folder(recipe) if config.name == choice.recipe != recipe else None)
        _train(config, run, resume, dry_run, as_json, advice)


def _train(
    config: RunConfig | None, run: Path | None, resume: Path | None, dry_run: bool, as_json: bool, advice: str | None
) -> None:
    from shortlist import runs

    keep_freed_memory()  # imports torch, which takes seconds, so errors are reported before
    display = display_for(sys.stdout, as_json=as_json) if is_main_process() else Display()
    if advice is not None:
        shown = display_for(sys.stderr, as_json=as_json) if dry_run else display  # the plan is printed to stdout
        shown.message(advice, advice=advice)
    if config is None:
        assert resume is not None
        done = runs.resume(resume, display=display)
    elif dry_run:
        if is_main_process():
            plan = runs.plan(config, display=display_for(sys.stderr, as_json=as_json))
            print_facts({"config": config.model_dump(mode="json"), "plan": plan}, as_json)
        return
    else:
        done = runs.train(config, output=run, display=display)
    display.message(f"The run is in {done.path}.", run=str(done.path))


@app.command(cls=ModelCommand)
@translate_arguments({"data": "IMAGES"})
@embedding_command
def evaluate(
    run: ModelName,
    images: Annotated[
        str | None, typer.Argument(help="Labelled images to evaluate on. Default: the test images of the run.")
    ] = None,
    root: Root = None,
    distractors: Annotated[
        Path | None, typer.Option(help="Folder of R1M: evaluate on IMAGES without and with these distractors.")
    ] = None,
    on_missing: Annotated[
        str | None,
        typer.Option(help="For missing or unreadable images: error, or skip. Default: the setting of the run."),
    ] = None,
    label_separator: LabelSeparator = None,
    shard: ShardOption = None,
    merge: Merge = False,
    parts: PartsFolder = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Evaluate a run or a pretrained model, with 95 % confidence intervals, and show the results of the paper.

    To measure a pretrained model on your own images, in a folder with one sub-folder per class:

        shortlist evaluate --model timm:resnet50 my-images

    Metrics: r@k, recall@k, mAP, mAP@R and R-precision; for judged queries (roxford5k, ...), mAP and mP@k per setup.

    With torchrun, several processes embed the images. To use independent jobs, run each with --shard, and then run
    the command once with --merge.
    """
    from shortlist.encoding.shards import choose_parts
    from shortlist.recipes import differences, reproduced_results
    from shortlist.report.terminal_tables import print_evaluations
    from shortlist.runs import evaluate
    from shortlist.training import EvalImages, RunFolder, embed_run_shard

    display = display_for(sys.stderr, as_json=as_json)
    chosen, folder, merged = choose_parts(shard, merge, parts, Path(run, "vectors", "parts"))
    options: dict[str, Any] = {
        "root": root,
        "distractors": distractors,
        "on_missing": on_missing,
        "label_separator": label_separator,
    }
    keep_freed_memory()
    if chosen is not None:
        named = EvalImages(images, **options)
        written = [str(path) for path in embed_run_shard(run, chosen, folder, named, display=display)]
        text = f"Shard {chosen} is embedded. When all shards are done, use --merge instead of --shard."
        display.message(text, parts=written)
        return
    evaluations = evaluate(run, images, **options, parts=merged, display=display)
    if as_json:
        print(json.dumps([each.to_dict() for each in evaluations], indent=2))
    else:
        if images is not None:
            print_evaluations(evaluations)
            return
        config = RunFolder.open(Path(run)).config()
        reproduced = reproduced_results(config)
        print_evaluations(evaluations, config.paper, reproduced=reproduced)
        if reproduced is not None and (changed := differences(config)):
            print(f"The configuration of this run differs from the recipe {config.name}: {', '.join(changed)}")


@app.command()
def ablate(
    context: typer.Context,
    study: Annotated[str, typer.Argument(help="Setting that varies: rank-temperature, batch-size or k.")],
    recipe: Recipe,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study. Default: ablations/STUDY-RECIPE.")] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="Values of the setting, separated by spaces: '16 64 256' or '[1] [1,2]'. Default: those of the paper."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas, of 'RS@k, RS@k + SiMix, SAP'. Default: all that the setting affects."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs per case, with different seeds.")] = 3,
    learning_rate: Annotated[
        str,
        typer.Option(
            help="How the learning rate scales with the batch size: constant, linear or sqrt.", metavar="RULE"
        ),
    ] = "constant",
    as_json: AsJsonLines = False,
) -> None:
    """Repeat an ablation study of the paper: train for each value of a setting with RS@k, RS@k + SiMix and SAP.

    To resume an interrupted study, run the same command again. Several processes may work on the same study. Its
    folder contains results.json, a plot next to the results of the paper, and one run per case.
    """
    config = open_recipe(recipe, settings, context)

    from shortlist import training  # imported here because it takes seconds, after errors are reported
    from shortlist.report.study_results import draw, read_results, shown_metric, table

    keep_freed_memory()
    display = display_for(sys.stdout, as_json=as_json)
    folder = out or Path("ablations") / f"{study}-{config.name}"
    file = training.ablate(
        study,
        config,
        folder,
        values=re.findall(r"\[[^]]*]|\S+", values or ""),  # a list may contain spaces
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
    """Train on generated glyphs, and draw results before and after training. Takes two minutes on two cores."""
    from shortlist import recipes
    from shortlist.report.demo import run_demo
    from shortlist.runs import new_folder

    keep_freed_memory()
    run_demo(recipes.open_recipe("glyphs"), run or new_folder("demo"), display_for(sys.stdout, as_json=as_json))


def open_recipe(recipe: str, settings: Sequence[str] | None, context: typer.Context) -> RunConfig:
    """Open a recipe; the modules of --import become part of the configuration."""
    from shortlist import recipes

    config = recipes.open_recipe(recipe, settings or [])
    return config.model_copy(update={"imports": tuple(dict.fromkeys((*config.imports, *context.obj)))})
