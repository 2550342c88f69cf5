"""Read a configuration from YAML and `key=value` overrides; unknown keys are refused with a suggestion."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from shortlist.config.schema import RunConfig
from shortlist.errors import ConfigError, did_you_mean
from shortlist.files import read_regular_file

MAX_SHOWN = 100  # characters of an invalid value
TEXT = (str, str | None)  # types of settings whose value is a text


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-4 as a number, as YAML 1.2 does; PyYAML requires a dot and a sign."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Construct a mapping. Duplicate keys are refused, where PyYAML would silently use the last one."""
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key.value, str):
            continue  # a list or mapping, which PyYAML refuses as a key
        if key.value in seen and key.tag != _MERGE_TAG:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_MERGE_TAG = "tag:yaml.org,2002:merge"
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def read_config(text: str, where: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a configuration from YAML (or JSON, which is a subset of YAML).

    Args:
        text: YAML text.
        where: Name of the source, which starts the error message.
        overrides: Overrides of the form `dotted.key=value`, with the value in YAML.

    Raises:
        ConfigError: The configuration is invalid; the message lists every problem, one per line.
    """
    return validate_config(read_yaml(text, where), where, overrides)


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """Read the mapping in a YAML text without validating its keys."""
    try:
        values = _parse(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: such as for month 13 in a date
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping such as 'data: ...', not {type(values).__name__}.")
    return dict(values)


def read_yaml_file(file: Path, where: str) -> dict[str, Any]:
    """Read the mapping in a YAML file without validating its keys.

    Args:
        file: The file.
        where: Name of the file, which starts the error message.

    Raises:
        ConfigError: It is not a text file, or not valid YAML.
        OSError: It cannot be read. The error has the name of the file.
    """
    try:
        return read_yaml(read_regular_file(file), where)
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not a text file.") from None


def _parse(text: str) -> Any:
    """Parse YAML. Results are cached, because most recipes inherit from the same files."""
    return deepcopy(_parse_once(text))


@lru_cache(maxsize=256)
def _parse_once(text: str) -> Any:
    return yaml.load(text, _Loader)


def validate_config(
    values: dict[str, Any], where: str, overrides: Iterable[str] = (), settings: Mapping[str, Any] | None = None
) -> RunConfig:
    """Apply overrides to a mapping (in place) and validate it; see `read_config`.

    Args:
        values: The configuration.
        where: Name of the source, which starts the error message.
        overrides: Overrides of the form `dotted.key=value`, with the value in YAML.
        settings: Overrides that are applied first: values by dotted key.
    """
    for key, value in (settings or {}).items():
        _set(values, key, value)
    for override in overrides:
        _override(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems: dict[str, list[str]] = {}  # by key; a value of a union type has one problem per member of the union
        for problem in error.errors():
            key, message = _describe(dict(problem))
            problems.setdefault(key, []).append(message)
        lines = [f"  {key + ': ' if key else ''}{', or '.join(messages)}" for key, messages in problems.items()]
        raise ConfigError("\n".join([f"{where} is not a valid configuration:", *lines])) from None


def dotted_key(name: str) -> str:
    """Return the dotted key of the setting that a Python keyword refers to.

    A keyword is the name of a section, of a setting, or of both: `optimizer`, `epochs`, `batch_size`. Settings that are
    nested deeper have no keyword.

    Raises:
        ConfigError: No setting has this name, or several have it.

    Example:
        >>> dotted_key("epochs"), dotted_key("batch_size"), dotted_key("optimizer.parts.head.lr_multiplier")
        ('training.epochs', 'batch.size', 'optimizer.parts.head.lr_multiplier')
    """
    if "." in name or name in RunConfig.model_fields:
        return name
    keys = [key for key in _dotted_keys(RunConfig) if key.count(".") == 1]
    found = [key for key in keys if name in (key.partition(".")[2], key.replace(".", "_"))]
    if len(found) == 1:
        return found[0]
    if found:
        keywords = " or ".join(f"{key.replace('.', '_')}=..." for key in found)
        raise ConfigError(f"{name!r} is the name of several settings: {', '.join(found)}. Write {keywords}.")
    known = {name for key in keys for name in (*key.split("."), key.replace(".", "_"))}
    raise ConfigError(f"Unknown setting {name!r}; {did_you_mean(name, known)}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the dotted keys of nested mappings and their values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        is_path = False
        with suppress(OSError):  # such as for a name that is too long
            is_path = bool(override) and Path(override).exists()
        images = shlex.quote(f"data.source={override}")
        advice = f". To train on these images, write {images}." if is_path else ", such as optimizer.lr=1e-4."
        raise ConfigError(f"{override!r} is not of the form key=value{advice}")
    _set(values, key, _read_value(key, text))


def _read_value(key: str, text: str) -> Any:
    """Read the value of an override as YAML. Text is taken as it is unless it is quoted, because YAML reads | as ''."""
    try:
        value = _parse(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return text
    as_yaml = text == "null" or (isinstance(value, str) and text.startswith(("'", '"')))
    return value if as_yaml or not _is_text(key) else text


def _is_text(key: str) -> bool:
    """Return whether the value of a dotted key is a text."""
    section: type[BaseModel] | None = RunConfig
    annotation: Any = None
    for name in key.split("."):
        if section is None or name not in section.model_fields:
            return False
        annotation = section.model_fields[name].annotation
        section = _section_in(annotation)
    return annotation in TEXT


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = dict(inner) if isinstance(inner, Mapping) else {}
        values = values[section]
    values[last] = value


def _describe(problem: dict[str, Any]) -> tuple[str, str]:
    """Return the dotted key of a pydantic problem, and a message about it."""
    section: type[BaseModel] = RunConfig
    names: list[str] = []
    for name in map(str, problem["loc"]):
        names.append(name)
        inner = _section_in(section.model_fields[name].annotation) if name in section.model_fields else None
        if inner is None and not name.isdigit():  # a digit is an index into a list of sections
            break
        section = inner or section
    key = ".".join(names)
    if problem["type"] == "extra_forbidden":
        return key, f"unknown key; {_nearest(names[-1], section)}"
    if problem["type"] == "missing":
        return key, "is required"
    text = repr(problem["input"])
    shown = f" (given: {text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '...'})"
    if problem["type"] == "model_type":
        return key, f"must be a mapping with the keys {', '.join(section.model_fields)}{shown}"
    if problem["type"] == "tuple_type":
        return key, f"must be a list{shown}"
    given = "" if isinstance(problem["input"], Mapping | BaseModel) else shown
    return key, problem["msg"].removeprefix("Value error, ").removeprefix("Input ") + given


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section in an annotation of the form Section, Section | None or tuple[Section, ...]."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _nearest(name: str, section: type[BaseModel]) -> str:
    """Suggest the nearest key of the section, or the same key of another section."""
    elsewhere = [key for key in _dotted_keys(RunConfig) if key.rpartition(".")[2] == name]
    if elsewhere and not difflib.get_close_matches(name, section.model_fields):
        return f"did you mean {elsewhere[0]!r}?"
    return did_you_mean(name, [*section.model_fields, *(["inherits"] if section is RunConfig else [])])


def _dotted_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Iterate over all dotted keys of a section, including its subsections."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _dotted_keys(field.annotation, f"{prefix}{name}.")
