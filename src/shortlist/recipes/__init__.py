"""Recipes by name: YAML files that carry every number of an experiment."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from shortlist.config import RunConfig, read_config
from shortlist.errors import ConfigError, did_you_mean

__all__ = ["open_recipe", "recipe_names"]


def recipe_names() -> list[str]:
    """The packaged recipes."""
    return sorted(
        item.name.removesuffix(".yaml") for item in resources.files(__name__).iterdir() if item.name.endswith(".yaml")
    )


def open_recipe(recipe: str, overrides: Iterable[str] = ()) -> RunConfig:
    """A packaged recipe by its name, or a YAML file by its path, with `dotted.key=value` overrides."""
    if recipe in recipe_names():
        text = (resources.files(__name__) / f"{recipe}.yaml").read_text(encoding="utf-8")
        return read_config(text, f"Recipe {recipe}", overrides)
    path = Path(recipe)
    if path.is_file():
        try:
            return read_config(path.read_text(encoding="utf-8"), str(path), overrides)
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not a text file.") from None
    raise ConfigError(f"There is no recipe and no file {recipe!r}; {did_you_mean(recipe, recipe_names())}")
