"""What a user may be told: what is wrong, where, and what to do. The command line prints it without a traceback.

A message names the arguments of Python functions, in backticks: `root`, or with a value `on_missing="skip"`. Whoever
took an argument from somewhere else, as from a configuration or the command line, says so with `translate_arguments`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

FEW = 10  # names in a message
_ARGUMENT = re.compile(r"`(?P<name>[a-z_]\w*)(?:=(?P<quote>[\"']?)(?P<value>[^`]*?)(?P=quote))?`")
_YAML = {"True": "true", "False": "false", "None": "null"}


class ShortlistError(Exception):
    """Something a user can put right. Base class of all errors of shortlist."""


class ConfigError(ShortlistError, ValueError):
    """An argument, a recipe, an option or a combination of them that cannot be used."""


class DataError(ShortlistError, ValueError):
    """Images, tables or folders that are missing, damaged or not what they were said to be."""


class ModelError(ShortlistError, ValueError):
    """A backbone, weights or a saved model that cannot be used."""


class RunError(ShortlistError, RuntimeError):
    """A run's folder, its checkpoints or the training itself cannot be continued."""


class Interrupted(ShortlistError):  # noqa: N818 - no error: someone asked for it
    """A run was stopped by hand; the message says how to resume it."""


def rename_arguments(message: str, names: Mapping[str, str], setting: str = "{name}={value}") -> str:
    """The message with other names for the arguments that it mentions, as the user knows them.

    Args:
        message: of an error.
        names: of arguments -> what they are called instead. Other arguments stay as they are.
        setting: how a name and its value are written.

    >>> renamed('Set `root`, or `on_missing="skip"`.', {"root": "data.root", "on_missing": "data.on_missing"})
    'Set data.root, or data.on_missing=skip.'
    >>> renamed('Set `root`, or `on_missing="skip"`.', {"on_missing": "--on-missing"}, "{name} {value}")
    'Set `root`, or --on-missing skip.'
    """

    def other(found: re.Match[str]) -> str:
        name, value = names.get(found["name"]), found["value"]
        if name is None:
            return found[0]
        return name if value is None else setting.format(name=name, value=_YAML.get(value, value))

    return _ARGUMENT.sub(other, message)


@contextmanager
def translate_arguments(names: Mapping[str, str], setting: str = "{name}={value}") -> Iterator[None]:
    """Errors raised inside mention arguments by these names; see `renamed`. Serves as a decorator as well."""
    try:
        yield
    except ShortlistError as error:
        error.args = tuple(
            rename_arguments(each, names, setting) if isinstance(each, str) else each for each in error.args
        )
        raise


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence part that names the nearest known name, or all of them where none is near (the nearest of very many).

    >>> did_you_mean("optimiser", ["optimizer", "schedule"])
    "did you mean 'optimizer'?"
    >>> did_you_mean("x", ["optimizer", "schedule"])
    'known: optimizer, schedule'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    some = sorted(difflib.get_close_matches(name, known, n=FEW, cutoff=0)) if len(known) > 2 * FEW else known
    return f"known: {', '.join(some)}{', ...' if len(some) < len(known) else ''}"
