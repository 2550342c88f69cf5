"""Recipes by name: YAML files that carry every number of an experiment, and inherit what they share.

`inherits: NAME` or a list of names: what they hold is merged in their order, section by section, and what the recipe
itself holds comes last. Its name, what it is about and the figures belong to a recipe alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shortlist.config import RunConfig, read_yaml, validated
from shortlist.errors import ConfigError, did_you_mean

__all__ = ["describe_recipes", "differences", "open_recipe", "recipe_names"]

OWN = ("name", "about", "paper", "measured")
INDIFFERENT = (  # beginnings of settings that make no other experiment
    *OWN,
    "data.root",
    "data.workers",
    "data.on_missing",
    "data.validation_source",
    "batch.chunk_size",
    "batch.keep_graphs",
    "training.seed",
    "training.threads",
    "training.checkpoint_every",
    "evaluation",
)
PARTS = "parts"  # the folder of what recipes inherit and nobody runs


def recipe_names() -> list[str]:
    """The packaged recipes."""
    return sorted(_packaged(parts=False))


def open_recipe(recipe: str, overrides: Iterable[str] = ()) -> RunConfig:
    """A packaged recipe by its name, or a YAML file by its path, with `dotted.key=value` overrides.

    Raises:
        ConfigError: there is none, or it cannot be run; says why.
    """
    if recipe not in _packaged(parts=False) and not Path(recipe).is_file():
        raise ConfigError(f"There is no recipe and no file {recipe!r}; {did_you_mean(recipe, recipe_names())}")
    where = f"Recipe {recipe}" if recipe in _packaged(parts=False) else recipe
    return validated({"name": Path(recipe).stem, **_resolved(recipe, ())}, where, overrides)


def describe_recipes() -> list[dict[str, Any]]:
    """Name, about, figures of every packaged recipe, ready for JSON."""
    configs = (open_recipe(name) for name in recipe_names())
    return [config.model_dump(mode="json", include={"name", "about", "paper", "measured"}) for config in configs]


def differences(config: RunConfig) -> list[str]:
    """How a config differs from the packaged recipe whose name it has, as settings; nothing where there is none.

    Places, and what changes speed and memory only, are no differences; neither is the seed.
    """
    if config.name not in recipe_names():
        return []
    recipe, now = (dict(_flat(each.model_dump(mode="json"))) for each in (open_recipe(config.name), config))
    changed = (key for key in now if now[key] != recipe.get(key) and not key.startswith(INDIFFERENT))
    return [f"{key}={now[key]} (the recipe: {recipe.get(key)})" for key in changed]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _resolved(recipe: str, heirs: tuple[str, ...]) -> dict[str, Any]:
    """What a recipe holds, and what it inherits."""
    packaged = _packaged(parts=True)
    file = packaged.get(recipe) or Path(recipe)
    if file.resolve() in {(packaged.get(heir) or Path(heir)).resolve() for heir in heirs}:
        raise ConfigError(f"These recipes inherit from each other in a circle: {' -> '.join((*heirs, recipe))}")
    if not file.is_file():
        known = did_you_mean(Path(recipe).name, packaged)
        raise ConfigError(f"{heirs[-1]} inherits from {Path(recipe).name!r}, which is no recipe and no file; {known}")
    values = dict(_packaged_values(recipe) if recipe in packaged else _values(file, recipe))
    inherits = values.pop("inherits", [])
    names = [inherits] if isinstance(inherits, str) else inherits
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{recipe}: inherits must be a recipe's name, or a list of names, not {inherits!r}.")
    merged: dict[str, Any] = {}
    for name in names:
        known = name if name in packaged else str(Path(recipe).parent / name)  # a file lies beside its heir
        parent = _resolved(known, (*heirs, recipe))
        merged = _merged(merged, {key: value for key, value in parent.items() if key not in OWN})
    return _merged(merged, values)


def _values(file: Path, where: str) -> dict[str, Any]:
    try:
        return read_yaml(file.read_text(encoding="utf-8"), where)
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not a text file.") from None


@cache
def _packaged_values(name: str) -> Mapping[str, Any]:
    """Read once: a list of all recipes needs the parts that they share many times."""
    return _values(_packaged(parts=True)[name], name)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, key by key; of anything else the new one stands."""
    both = {
        key: _merged(old[key], value) if isinstance(value, Mapping) and isinstance(old.get(key), Mapping) else value
        for key, value in new.items()
    }
    return {**old, **both}


@cache
def _packaged(parts: bool) -> Mapping[str, Path]:
    """The packaged files by name, with or without those that are only inherited."""
    here = Path(__file__).parent
    files = [*here.glob("*.yaml"), *here.glob("*/*.yaml")]
    return MappingProxyType({file.stem: file for file in files if parts or file.parent.name != PARTS})
