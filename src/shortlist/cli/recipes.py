"""The commands `shortlist recipes`: inspect the packaged recipes."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import AsJson, Recipe, Settings, app, print_facts, untruncated_column

recipes_app = typer.Typer(help="Inspect the packaged recipes.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes with r@1 (or mAP) on each test, as reported by the paper and as reproduced by us."""
    from shortlist.recipes import describe_recipes

    facts = describe_recipes()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(untruncated_column("recipe", [each["name"] for each in facts]), "paper, %", "reproduced, %")
    for each in facts:
        table.add_row(
            each["name"], _format_results(each["paper"]) or "-", _format_results(each["measured"]) or "not yet"
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("Run `shortlist recipes show NAME` for the description and all settings of a recipe.")


@recipes_app.command("show")
def show_recipe(recipe: Recipe, settings: Settings = None) -> None:
    """Print the full configuration that `train` would run, with inherited settings and defaults."""
    from shortlist.recipes import open_recipe

    print_facts(open_recipe(recipe, settings or []).model_dump(mode="json"))


def _format_results(results: dict[str, dict[str, float]]) -> str:
    """Format the first metric of each test."""
    first = [next(iter(each.items())) for each in results.values() if each]
    return f"{first[0][0]} {', '.join(f'{value:.1f}' for _, value in first)}" if first else ""
