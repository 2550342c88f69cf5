"""The commands `shortlist sweep` and `shortlist sweep best`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shortlist.cli.app import AsJsonLines, Recipe, Settings, app, keep_freed_memory
from shortlist.cli.training import open_recipe
from shortlist.progress import display_for

RUN = "run"  # name of the command that `shortlist sweep RECIPE` is short for


class _Sweep(TyperGroup):
    """Group whose first argument may be a recipe instead of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and args[0] in {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if named or not args else [RUN, *args])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Also print the options of the default command."""
        super().format_help(ctx, formatter)
        command = self.commands[RUN]
        command.format_help(type(ctx)(command, info_name=RUN, parent=ctx), formatter)


sweep_app = typer.Typer(
    cls=_Sweep,
    help="Search for hyper-parameters without test images: `shortlist sweep RECIPE --space SPACE.yaml`.",
    no_args_is_help=True,
)
app.add_typer(sweep_app, name="sweep")
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database of the study, such as postgresql://user@host/name. Default: a journal file in its folder.",
    ),
]


@sweep_app.command(RUN)
def run(
    context: typer.Context,
    recipe: Recipe,
    space: Annotated[Path, typer.Option(help="YAML file with a list or a range of values per dotted key.")],
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study. Default: sweeps/RECIPE.")] = None,
    sampler: Annotated[
        str | None, typer.Option(help="grid, random or tpe. Default: grid if all values are lists, otherwise tpe.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of trials. Default: all of a grid, otherwise 20.")
    ] = None,
    pruner: Annotated[
        str, typer.Option(help="End unpromising trials: none, median, or halving (successive halving).")
    ] = "none",
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    storage: Storage = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also resume trials of machines that are lost.")
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Train trials on half of the training classes, and validate on the other half, as the paper does.

    To resume an interrupted sweep, run the same command again. Several processes may work on the same study. Its folder
    contains results.json, report.html, and one run per trial. Then write the best recipe, train it on all training
    classes, and test it once:

        shortlist sweep best STUDY && shortlist train STUDY/best.yaml
    """
    config = open_recipe(recipe, settings, context)

    from shortlist import training  # imported here because it takes seconds, after errors are reported
    from shortlist.report.sweep_report import write_sweep_report
    from shortlist.report.terminal_tables import print_sweep

    keep_freed_memory()
    display = display_for(sys.stdout, as_json=as_json)
    result = training.sweep(
        config,
        space,
        out or Path("sweeps") / config.name,
        sampler=sampler,
        trials=trials,
        pruner=pruner,
        seed=seed,
        storage=storage,
        take_over=take_over,
        display=display,
        on_trial=write_sweep_report,
    )
    file = write_sweep_report(result)
    if not as_json:
        print_sweep(result)
    display.message(f"The report is {file}.", report=str(file))


@sweep_app.command()
def best(
    study: Annotated[Path, typer.Argument(help="Folder of the study.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="YAML file. Default: STUDY/best.yaml.")] = None,
    storage: Storage = None,
    as_json: AsJsonLines = False,
) -> None:
    """Write the recipe with the values of the best trial, which trains on all training classes and is tested once."""
    from shortlist.recipes import open_recipe
    from shortlist.training import write_best_recipe

    file = write_best_recipe(study, out, storage=storage)
    advice = f"The recipe is {file}. Train and test it with: shortlist train {shlex.quote(str(file))}"
    text = f"{open_recipe(str(file)).about} {advice}"
    display_for(sys.stdout, as_json=as_json).message(text, recipe=str(file))
