"""Look at the recipes before training one."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import AsJson, Settings, app, whole_column

recipes_app = typer.Typer(help="Look at the recipes before training one.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes with the r@1 (or mAP) that the paper reports for each of its tests, and what we measured."""
    from shortlist.recipes import describe_recipes

    facts = describe_recipes()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(whole_column("recipe", [each["name"] for each in facts]), "the paper, %", "measured by us, %")
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


def _figures(figures: dict[str, dict[str, float]]) -> str:
    """The first figure of each test."""
    first = [next(iter(each.items())) for each in figures.values() if each]
    return f"{first[0][0]} {', '.join(f'{value:.1f}' for _, value in first)}" if first else ""
