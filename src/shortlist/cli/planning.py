"""The command `shortlist plan`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shortlist.cli.app import AsJsonWithProgress, Recipe, Settings, app, keep_freed_memory, print_facts
from shortlist.cli.training import open_recipe
from shortlist.progress import display_for


@app.command()
def plan(
    context: typer.Context,
    recipe: Recipe,
    settings: Settings = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Plan for this number of GPUs, which this machine need not have.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Memory of each GPU, such as 24GB.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure the speed of this machine for some seconds.")] = True,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Show what a run needs: steps, memory, floating-point operations and time, and how they scale.

    On this machine, or on other GPUs:

        shortlist plan cars196-lite0-cpu data.root=cars

        shortlist plan sop-vit-b16-rsk-simix data.root=sop --devices 8 --device-memory 24GB
    """
    config = open_recipe(recipe, settings, context)

    from shortlist import runs

    keep_freed_memory()
    display = display_for(sys.stderr, as_json=as_json)
    print_facts(
        runs.plan(config, devices=devices, device_memory=device_memory, measure=measure, display=display), as_json
    )
