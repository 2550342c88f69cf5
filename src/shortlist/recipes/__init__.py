"""Recipes: YAML files with every setting of an experiment, which inherit shared settings.

A recipe inherits from one or more others with `inherits: NAME` or a list of names. The inherited values are merged in
the given order, section by section, and the values of the recipe itself are merged last. `name`, `about`, `paper`,
`measured` and `repeats` are not inherited.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shortlist.config import RunConfig, flatten, read_yaml_file, validate_config
from shortlist.errors import ConfigError, did_you_mean

__all__ = ["describe_recipes", "differences", "open_recipe", "recipe_names", "reproduced_results"]

DESCRIPTION = ("name", "about", "paper", "measured")
NOT_INHERITED = (*DESCRIPTION, "repeats")
NOT_COMPARED = (  # prefixes of keys that do not change the experiment
    *NOT_INHERITED,
    "imports",
    "tracking",
    "data.root",
    "data.workers",
    "data.view_cache",
    "data.on_missing",
    "data.validation_source",
    "batch.chunk_size",
    "batch.keep_graphs",
    "training.seed",
    "training.threads",
    "training.checkpoint_every",
    "evaluation",
)
PARTS = "parts"  # folder of incomplete recipes, which can only be inherited from


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes, sorted."""
    return sorted(_packaged_files(parts=False))


def open_recipe(
    recipe: str | Path, overrides: Iterable[str] = (), settings: Mapping[str, Any] | None = None
) -> RunConfig:
    """Open a packaged recipe by name, or a YAML file by path.

    Args:
        recipe: Name of a packaged recipe, or path of a YAML file.
        overrides: Overrides of the form `dotted.key=value`, with the value in YAML.
        settings: Overrides that are applied first: values by dotted key.

    Raises:
        ConfigError: The recipe does not exist or is not valid.
    """
    recipe = str(recipe)
    if recipe not in _packaged_files(parts=False) and not Path(recipe).is_file():
        raise ConfigError(_no_recipe(recipe))
    where = f"Recipe {recipe}" if recipe in _packaged_files(parts=False) else recipe
    return validate_config({"name": Path(recipe).stem, **_resolve(recipe, ())}, where, overrides, settings)


def _no_recipe(recipe: str) -> str:
    path = shlex.quote(recipe)
    if (Path(recipe) / "config.yaml").is_file():
        return f"{recipe} is a run. Resume it with: shortlist train --resume {path}"
    if Path(recipe).is_dir():
        return f"{recipe} is a folder, not a recipe. To train on its images: shortlist train folder data.source={path}"
    near = did_you_mean(recipe, recipe_names())
    own = " (for your own images, use the recipe folder)" if near.startswith("known") else ""
    return f"No recipe or file found for {recipe!r}{own}; {near}"


def describe_recipes() -> list[dict[str, Any]]:
    """Return the name, description and reported results of every packaged recipe, as JSON-compatible dictionaries."""
    configs = (open_recipe(name) for name in recipe_names())
    return [config.model_dump(mode="json", include=set(DESCRIPTION)) for config in configs]


def differences(config: RunConfig) -> list[str]:
    """List the settings in which a configuration differs from the packaged recipe of the same name.

    Paths, the seed, and settings that only affect speed or memory are not compared. The list is empty if there is no
    recipe of that name.
    """
    if config.name not in recipe_names():
        return []
    recipe, current = (dict(flatten(each.model_dump(mode="json"))) for each in (open_recipe(config.name), config))
    changed = (key for key in current if current[key] != recipe.get(key) and not key.startswith(NOT_COMPARED))
    return [f"{key}={current[key]} (the recipe: {recipe.get(key)})" for key in changed]


def reproduced_results(config: RunConfig) -> Mapping[str, Mapping[str, float]] | None:
    """Return our results with the packaged recipe of the same name, by test and metric.

    Returns:
        The results, empty if there are none yet; None if the configuration is not that of a packaged recipe, or if
        there is nothing to reproduce.
    """
    return config.measured if config.name in recipe_names() and (config.measured or config.paper) else None


def _resolve(recipe: str, children: tuple[str, ...]) -> dict[str, Any]:
    """Merge a recipe with everything that it inherits; `children` is the chain of recipes that inherit from it."""
    packaged = _packaged_files(parts=True)
    file = packaged.get(recipe) or Path(recipe)
    if file.resolve() in {(packaged.get(child) or Path(child)).resolve() for child in children}:
        raise ConfigError(f"These recipes inherit from each other in a circle: {' -> '.join((*children, recipe))}")
    if not file.is_file():
        known = did_you_mean(Path(recipe).name, packaged)
        raise ConfigError(
            f"{children[-1]} inherits from {Path(recipe).name!r}, but there is no such recipe or file; {known}"
        )
    values = dict(_packaged_values(recipe) if recipe in packaged else read_yaml_file(file, recipe))
    inherits = values.pop("inherits", [])
    names = [inherits] if isinstance(inherits, str) else inherits
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{recipe}: inherits must be the name of a recipe or a list of names, not {inherits!r}.")
    merged: dict[str, Any] = {}
    for name in names:
        known = name if name in packaged else str(Path(recipe).parent / name)  # paths are relative to this recipe
        parent = _resolve(known, (*children, recipe))
        merged = _merge(merged, {key: value for key, value in parent.items() if key not in NOT_INHERITED})
    return _merge(merged, values)


@cache
def _packaged_values(name: str) -> Mapping[str, Any]:
    """Read a packaged file. It is cached, because listing all recipes reads the shared parts many times."""
    return read_yaml_file(_packaged_files(parts=True)[name], name)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings recursively; any other value of `new` replaces that of `old`."""
    both = {
        key: _merge(old[key], value) if isinstance(value, Mapping) and isinstance(old.get(key), Mapping) else value
        for key, value in new.items()
    }
    return {**old, **both}


@cache
def _packaged_files(parts: bool) -> Mapping[str, Path]:
    """Return the packaged files by name, with or without the parts."""
    here = Path(__file__).parent
    files = [*here.glob("*.yaml"), *here.glob("*/*.yaml")]
    return MappingProxyType({file.stem: file for file in files if parts or file.parent.name != PARTS})
