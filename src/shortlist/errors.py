"""Exceptions shown to users. A message says what is wrong, where, and what to do; the command line prints no traceback.

Messages name the arguments of Python functions in backticks: `root`, or with a value `on_missing="skip"`. Code that
takes these arguments from a configuration or the command line translates the names with `translate_arguments`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

MAX_NAMES = 10  # maximum number of names listed in a message
_ARGUMENT = re.compile(r"`(?P<name>[a-z_]\w*)(?:=(?P<quote>[\"']?)(?P<value>[^`]*?)(?P=quote))?`")
_YAML = {"True": "true", "False": "false", "None": "null"}
Failure = TypeVar("Failure", bound=BaseException)


class ShortlistError(Exception):
    """Base class of all errors that a user can correct."""


class ConfigError(ShortlistError, ValueError):
    """An invalid argument, recipe or option, or an invalid combination of them."""


class DataError(ShortlistError, ValueError):
    """Images, tables or folders that are missing, damaged or of an unexpected kind."""


class ModelError(ShortlistError, ValueError):
    """A backbone, weights file or saved model that cannot be used."""


class RunError(ShortlistError, RuntimeError):
    """A run folder or checkpoint that cannot be used, or a training that cannot continue."""


class Interrupted(ShortlistError):  # noqa: N818 - the user asked for it, so it is not an error
    """A run was interrupted by the user. The message says how to resume it."""


def in_all_processes(error: Failure) -> Failure:
    """Mark an error as one that all processes of a training raise, and return it. Only the main process reports it."""
    vars(error)["in_all_processes"] = True
    return error


def is_in_all_processes(error: BaseException) -> bool:
    """Return whether an error is marked by `in_all_processes`."""
    return "in_all_processes" in vars(error)


def rename_arguments(message: str, names: Mapping[str, str], setting: str = "{name}={value}") -> str:
    """Replace the names of Python arguments in an error message.

    Args:
        message: The message, with arguments in backticks.
        names: Maps an argument's name to its new name. Other arguments are left unchanged.
        setting: Format of a name with a value.

    Returns:
        The message with the new names.

    Example:
        >>> message = 'Set `root`, or `on_missing="skip"`.'
        >>> rename_arguments(message, {"root": "data.root", "on_missing": "data.on_missing"})
        'Set data.root, or data.on_missing=skip.'
        >>> rename_arguments(message, {"on_missing": "--on-missing"}, "{name} {value}")
        'Set `root`, or --on-missing skip.'
    """

    def replacement(match: re.Match[str]) -> str:
        name, value = names.get(match["name"]), match["value"]
        if name is None:
            return match[0]
        return name if value is None else setting.format(name=name, value=_YAML.get(value, value))

    return _ARGUMENT.sub(replacement, message)


@contextmanager
def translate_arguments(names: Mapping[str, str], setting: str = "{name}={value}") -> Iterator[None]:
    """Rename the arguments in errors raised inside, as `rename_arguments` does. Also works as a decorator."""
    try:
        yield
    except ShortlistError as error:
        error.args = tuple(
            rename_arguments(each, names, setting) if isinstance(each, str) else each for each in error.args
        )
        raise


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the known name closest to an unknown one, or list the known names if none is close.

    Of more than 20 known names, only the 10 closest are listed.

    Example:
        >>> did_you_mean("optimiser", ["optimizer", "schedule"])
        "did you mean 'optimizer'?"
        >>> did_you_mean("x", ["optimizer", "schedule"])
        'known: optimizer, schedule'
    """
    known = sorted(known)
    closest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if closest:
        return f"did you mean {closest[0]!r}?"
    listed = known
    if len(known) > 2 * MAX_NAMES:
        listed = sorted(difflib.get_close_matches(name, known, n=MAX_NAMES, cutoff=0))
    return f"known: {', '.join(listed)}{', ...' if len(listed) < len(known) else ''}"


def check_known(what: str, name: str, known: Collection[str], error: type[ShortlistError] = ConfigError) -> None:
    """Raise an error with a suggestion if a name is unknown; `what` says what it is the name of."""
    if name not in known:
        raise error(f"Unknown {what} {name!r}; {did_you_mean(name, known)}")


def shorten_list(names: Iterable[str], shown: int = 3) -> str:
    """Join the first names for a message, and count the others.

    Example:
        >>> shorten_list(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    names = list(names)
    rest = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
