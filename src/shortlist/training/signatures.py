"""Arguments from a config, checked against the signatures of pytorch-metric-learning's classes."""

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

NAMED = {  # arguments that are objects themselves, given by name or as {name: ..., args: {...}}
    "distance": distances,
    "reducer": reducers,
    "default_reducer": reducers,
    "embedding_regularizer": regularizers,
    "weight_regularizer": regularizers,
}
INITIALISER = "weight_init_func"  # a function of torch.nn.init, given in the same way
CHOSEN_BY_CLASSES = {"mat_based_loss"}  # arguments that a class gives its base class itself


class Filled(NamedTuple):
    """What the run knows, for arguments that ask for it."""

    num_classes: int
    embedding_size: int

    def get(self, argument: str) -> int | None:
        values = {**self._asdict(), "descriptors_dim": self.embedding_size}
        return values.get(argument)


def classes_in(module: Any) -> dict[str, type]:
    return {name: each for name, each in vars(module).items() if inspect.isclass(each)}


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """The named arguments of a class, and those of its bases that its `**kwargs` hand on."""
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
    return {name: parameter for name, parameter in found.items() if name not in CHOSEN_BY_CLASSES}


def construct(kind: type, args: Mapping[str, Any], filled: Filled, where: str, shown: str | None = None) -> Any:
    """An object of a class, from arguments as a config has them.

    `num_classes` and `embedding_size` come from the run where the class needs them, or where they are given as "auto".

    Args:
        kind: the class.
        args: its arguments.
        filled: what the run knows.
        where: the arguments' place in the config.
        shown: what the config calls the class.

    Raises:
        ConfigError: an argument is unknown, missing, or not taken by the class.
    """
    shown, parameters = shown or kind.__name__, parameters_of(kind)
    given: dict[str, Any] = {}
    for name, value in args.items():
        if name not in parameters:
            near = did_you_mean(str(name), parameters) if parameters else "it has none"
            raise ConfigError(f"{where}.{name}: unknown for {shown}; {near}")
        given[name] = _value(name, value, filled, f"{where}.{name}")
        _check_kind(value, parameters[name].default, f"{where}.{name}")
    for name, parameter in parameters.items():
        if name not in given and parameter.default is parameter.empty:
            value = filled.get(name)
            if value is None:
                raise ConfigError(f"{where}.{name}: is needed by {shown}")
            given[name] = value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the library's own, between numpy and torch
            return kind(**given)
    except Exception as error:
        problem = str(error).strip() or type(error).__name__
        raise ConfigError(f"{where}: {shown} does not take {dict(args)}: {problem}") from error


def _value(name: str, value: Any, filled: Filled, where: str) -> Any:
    known = filled.get(name)
    if known is not None:
        if value == "auto":
            return known
        fits = isinstance(value, int) and (value >= known if name == "num_classes" else value == known)
        if value is not None and not fits:
            raise ConfigError(f"{where}: this run has {known}, not {value!r}; leave it out, or give auto")
    if value is None or (name not in NAMED and name != INITIALISER):
        return value
    called, args = _name_and_args(value, where)
    if name == INITIALISER:
        functions = {each: function for each, function in vars(torch.nn.init).items() if each.endswith("_")}
        return TorchInitWrapper(_pick(functions, called, where, "torch.nn.init"), **args)
    usable = {each: kind for each, kind in classes_in(NAMED[name]).items() if not each.startswith("Base")}
    return construct(_pick(usable, called, where), args, filled, f"{where}.args")


def _check_kind(value: Any, default: Any, where: str) -> None:
    """What Python would take for another kind of value, and the library without a word."""
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
    raise ConfigError(f"{where}: give a name, or a name and args: {{name: CosineSimilarity, args: {{...}}}}")


def _pick(known: Mapping[str, Any], name: str, where: str, library: str = "pytorch-metric-learning") -> Any:
    if name not in known:
        raise ConfigError(f"{where}: {library} has no {name}; {did_you_mean(name, known)}")
    return known[name]
