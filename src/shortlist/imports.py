"""User modules, functions and classes that a configuration refers to as `package.module:name`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from shortlist.errors import ConfigError, did_you_mean

GIVEN = "given in Python: "  # prefix of the recorded name of a part that was passed as a Python object
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(name: str) -> bool:
    """Return whether a name has the form `package.module:name`.

    Example:
        >>> is_reference("mypackage.losses:MyLoss"), is_reference("resnet50.a1_in1k"), is_reference("C:/images")
        (True, False, False)
    """
    return _REFERENCE.fullmatch(name) is not None


def is_user_part(name: str) -> bool:
    """Return whether the name of a model or loss in a configuration refers to a user-defined part."""
    return name.startswith(GIVEN) or is_reference(name)


def import_modules(names: Iterable[str], where: str = "`imports`") -> None:
    """Import modules for their side effects, such as the registration of a timm model.

    Args:
        names: Names of the modules.
        where: Setting that lists the names, for error messages.

    Raises:
        ConfigError: A module does not exist, or fails when it is imported.
    """
    for name in names:
        _import(name, where)


def import_object(reference: str, where: str) -> Any:
    """Import a function or class by its reference, `package.module:name`.

    Args:
        reference: The reference.
        where: Dotted key of the reference in a configuration, for error messages.

    Raises:
        ConfigError: The module cannot be imported, or has no such name.
    """
    module_name, _, names = reference.partition(":")
    found: Any = _import(module_name, where)
    for name in names.split("."):
        if not hasattr(found, name):
            near = did_you_mean(name, (each for each in vars(found) if not each.startswith("_")))
            file = getattr(found, "__file__", None)
            raise ConfigError(f"{where}: {module_name}{f' ({file})' if file else ''} has no {name!r}; {near}")
        found = getattr(found, name)
    return found


def call(build: Any, arguments: Mapping[str, Any], reference: str, where: str) -> Any:
    """Call an imported function or class with the arguments in a configuration.

    Raises:
        ConfigError: The call fails; the message names the arguments.
    """
    try:
        return build(**arguments)
    except Exception as error:  # it is the user's code
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {reference.partition(':')[2]}({given}) fails with {problem}") from error


def given_name(part: object) -> str:
    """Return the name that a configuration records for a part that was given in Python.

    Example:
        >>> given_name(range(3)), given_name(len)
        ('given in Python: range', 'given in Python: len')
    """
    return GIVEN + str(getattr(part, "__qualname__", type(part).__qualname__))


def _import(name: str, where: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:  # it is the user's code
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):  # not a module that it imports
            raise ConfigError(
                f"{where}: there is no module {name!r}; install it, or start Python in the folder that contains it."
            ) from None
        raise ConfigError(f"{where}: importing {name} fails with {type(error).__name__}: {error}") from error
