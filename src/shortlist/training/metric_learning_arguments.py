"""Construct objects of pytorch-metric-learning from configuration values, checked against their signatures."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import distances, reducers, regularizers
from pytorch_metric_learning.utils.common_functions import TorchInitWrapper

from shortlist.errors import ConfigError, did_you_mean

NAMED = {  # arguments that are objects, given by name or as {name: ..., args: {...}}
    "distance": distances,
    "reducer": reducers,
    "default_reducer": reducers,
    "embedding_regularizer": regularizers,
    "weight_regularizer": regularizers,
}
INITIALISER = "weight_init_func"  # a function in torch.nn.init, given in the same way
SET_BY_SUBCLASSES = {"mat_based_loss"}  # arguments that subclasses pass to their base class


class RunSizes(NamedTuple):
    """Sizes of a run, from which some arguments are filled in."""

    num_classes: int
    embedding_size: int

    def get(self, argument: str) -> int | None:
        """Return the value for an argument, or None if the argument is not a size of the run."""
        values = {**self._asdict(), "descriptors_dim": self.embedding_size}
        return values.get(argument)


def classes_in(module: Any) -> dict[str, type]:
    """Return the classes in a module by name."""
    return {name: each for name, each in vars(module).items() if inspect.isclass(each)}


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a class, including those of base classes that `**kwargs` are passed to."""
    found: dict[str, inspect.Parameter] = {}
    for each in kind.__mro__:
        if "__init__" not in vars(each) or not each.__module__.startswith("pytorch_metric_learning"):
            continue
        _, *parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return {name: parameter for name, parameter in found.items() if name not in SET_BY_SUBCLASSES}


def construct(kind: type, args: Mapping[str, Any], sizes: RunSizes, where: str, shown: str | None = None) -> Any:
    """Construct an object from configuration values.

    `num_classes` and `embedding_size` are filled in from the run if they are required or given as "auto".

    Args:
        kind: Class to construct.
        args: Arguments by name.
        sizes: Sizes of the run.
        where: Dotted key of the arguments in the configuration, for error messages.
        shown: Name of the class in the configuration, for error messages.

    Raises:
        ConfigError: An argument is unknown or missing, or the class does not accept it.
    """
    shown, parameters = shown or kind.__name__, parameters_of(kind)
    given: dict[str, Any] = {}
    for name, value in args.items():
        if name not in parameters:
            near = did_you_mean(str(name), parameters) if parameters else "it has no arguments"
            raise ConfigError(f"{where}.{name}: unknown argument of {shown}; {near}")
        given[name] = _value(name, value, sizes, f"{where}.{name}")
        _check_type(value, parameters[name].default, f"{where}.{name}")
    for name, parameter in parameters.items():
        if name not in given and parameter.default is parameter.empty:
            value = sizes.get(name)
            if value is None:
                raise ConfigError(f"{where}.{name} is required by {shown}")
            given[name] = value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # caused by the library, not by its user
            return kind(**given)
    except Exception as error:
        problem = str(error).strip() or type(error).__name__
        raise ConfigError(f"{where}: {shown} does not accept {dict(args)}: {problem}") from error


def _value(name: str, value: Any, sizes: RunSizes, where: str) -> Any:
    known = sizes.get(name)
    if known is not None:
        if value == "auto":
            return known
        fits = isinstance(value, int) and (value >= known if name == "num_classes" else value == known)
        if value is not None and not fits:
            raise ConfigError(f"{where}: this run has {known}, not {value!r}; remove it, or set it to auto")
    if value is None or (name not in NAMED and name != INITIALISER):
        return value
    called, args = _name_and_args(value, where)
    if name == INITIALISER:
        functions = {each: function for each, function in vars(torch.nn.init).items() if each.endswith("_")}
        return TorchInitWrapper(_pick(functions, called, where, "torch.nn.init"), **args)
    usable = {each: kind for each, kind in classes_in(NAMED[name]).items() if not each.startswith("Base")}
    return construct(_pick(usable, called, where), args, sizes, f"{where}.args")


def _check_type(value: Any, default: Any, where: str) -> None:
    """Refuse values of a wrong type that Python would convert and the library would silently accept."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: should be a finite number, not {value}")
    if isinstance(value, bool) and isinstance(default, int | float) and not isinstance(default, bool):
        raise ConfigError(f"{where}: should be a number, not {str(value).lower()}")
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{where}: should be true or false, not {value!r}")


def _name_and_args(value: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and "name" in value and value.keys() <= {"name", "args"}:
        args = value.get("args") or {}
        if isinstance(args, Mapping):
            return str(value["name"]), args
    raise ConfigError(f"{where}: set it to a name, or to a name and args: {{name: CosineSimilarity, args: {{...}}}}")


def _pick(known: Mapping[str, Any], name: str, where: str, library: str = "pytorch-metric-learning") -> Any:
    if name not in known:
        raise ConfigError(f"{where}: {library} has no {name}; {did_you_mean(name, known)}")
    return known[name]
