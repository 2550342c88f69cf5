"""From YAML and the command line to a config. What is not understood is refused, with the nearest name that is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from shortlist.config.schema import RunConfig
from shortlist.errors import ConfigError, did_you_mean


class _Yaml(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as in its version 1.2; PyYAML's asks for a dot and a sign."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Yaml, node: yaml.MappingNode) -> dict[Any, Any]:
    """Of a key that is there twice, PyYAML would take the last without a word."""
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen and key.tag != _MERGE:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
        if isinstance(key.value, str):
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_MERGE = "tag:yaml.org,2002:merge"
_Yaml.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_config(text: str, where: str, overrides: Iterable[str] = ()) -> RunConfig:
    """A config from YAML (or JSON, which is YAML), with `dotted.key=value` overrides.

    Raises:
        ConfigError: everything that is wrong with it, a line each.
    """
    return validated(read_yaml(text, where), where, overrides)


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text, not yet validated."""
    try:
        values = yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping such as 'data: ...', not {type(values).__name__}.")
    return dict(values)


def validated(values: dict[str, Any], where: str, overrides: Iterable[str] = ()) -> RunConfig:
    """The config of a mapping, which the overrides change."""
    for override in overrides:
        _override(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems: dict[str, list[str]] = {}  # by key; a value of several possible types has a problem with each
        for problem in error.errors():
            key, message = _describe(dict(problem))
            problems.setdefault(key, []).append(message)
        lines = [f"  {key}: {', or '.join(messages)}" for key, messages in problems.items()]
        raise ConfigError("\n".join([f"{where} cannot be run:", *lines])) from None


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value, such as optimizer.lr=1e-4.")
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = dict(inner) if isinstance(inner, Mapping) else {}
        values = values[section]
    try:
        values[last] = yaml.load(text, _Yaml)
    except yaml.YAMLError:
        values[last] = text


def _describe(problem: dict[str, Any]) -> tuple[str, str]:
    """The key, and what is wrong with it."""
    section: type[BaseModel] = RunConfig
    names: list[str] = []
    for name in map(str, problem["loc"]):
        names.append(name)
        inner = _section_in(section.model_fields[name].annotation) if name in section.model_fields else None
        if inner is None and not name.isdigit():  # a number is a place in a list of sections
            break
        section = inner or section
    key = ".".join(names)
    if problem["type"] == "extra_forbidden":
        return key, f"unknown; {_nearest(names[-1], section)}"
    if problem["type"] == "missing":
        return key, "is needed"
    if problem["type"] == "model_type":
        return key, f"has settings of its own: {', '.join(section.model_fields)} (given: {problem['input']!r})"
    given = "" if isinstance(problem["input"], Mapping | BaseModel) else f" (given: {problem['input']!r})"
    return key, problem["msg"].removeprefix("Value error, ").removeprefix("Input ") + given


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a setting is: Section, Section | None, or tuple[Section, ...]."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _nearest(name: str, section: type[BaseModel]) -> str:
    """The nearest name in the section, or else the same name in another one."""
    elsewhere = [key for key in _keys(RunConfig) if key.rpartition(".")[2] == name]
    if elsewhere and not difflib.get_close_matches(name, section.model_fields):
        return f"did you mean {elsewhere[0]!r}?"
    return did_you_mean(name, [*section.model_fields, *(["inherits"] if section is RunConfig else [])])


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted name."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
