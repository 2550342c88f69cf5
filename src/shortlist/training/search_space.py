"""The values that a sweep tries: lists and ranges by the dotted key of a setting, read from YAML."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from shortlist.config import RunConfig, read_yaml_file, validate_config
from shortlist.errors import ConfigError

if TYPE_CHECKING:
    from optuna.trial import Trial

FIXED = ("data", "evaluation", "name", "about", "paper", "measured", "repeats")  # sections that a sweep does not vary
MAX_CHECKED = 20_000  # maximum number of combinations that are validated before the first trial
RANGE_KEYS = {"low", "high", "log"}


@dataclass(frozen=True)
class Choices:
    """A list of values as JSON texts, which any storage can hold and YAML can read."""

    texts: tuple[str, ...]

    def suggest(self, trial: Trial, key: str) -> Any:
        """Return the value of a trial."""
        return json.loads(trial.suggest_categorical(key, self.texts))

    def examples(self) -> list[Any]:
        """Return all values."""
        return [json.loads(text) for text in self.texts]


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`: whole numbers if both are whole numbers. `log` samples their logarithms."""

    low: float
    high: float
    log: bool

    def suggest(self, trial: Trial, key: str) -> float:
        """Return the value of a trial."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)

    def examples(self) -> list[Any]:
        """Return both ends."""
        return [self.low, self.high]


Space = Mapping[str, Choices | Range]


def read_space(source: Mapping[str, Any] | Path | str) -> dict[str, Choices | Range]:
    """Read a search space.

    Args:
        source: Mapping from dotted keys to lists, such as `{"optimizer.lr": [1e-4, 1e-3]}`, or to ranges, such as
            `{"optimizer.lr": {"low": 1e-5, "high": 1e-3, "log": True}}`; or a YAML file with such a mapping.

    Raises:
        ConfigError: The file is not valid YAML, a value is neither a list nor a range, or a key cannot be searched.
    """
    where = "The search space"
    if not isinstance(source, Mapping):
        file = Path(source)
        if not file.is_file():
            raise ConfigError(f"File not found: {file}. Give a YAML file such as 'optimizer.lr: [1e-4, 1e-3]'.")
        where, source = str(file), read_yaml_file(file, str(file))
    if not source:
        raise ConfigError(f"{where} is empty. Give at least one key, such as 'optimizer.lr: [1e-4, 1e-3]'.")
    return {str(key): _read_values(str(key), values, f"{where}: {key}") for key, values in source.items()}


def _read_values(key: str, values: Any, where: str) -> Choices | Range:
    section = key.partition(".")[0]
    if section in FIXED:
        raise ConfigError(
            f"{where} cannot be searched: all trials have the same {section}, so that their results can be compared."
        )
    if isinstance(values, list | tuple) and values:
        texts = tuple(json.dumps(value, default=str) for value in values)
        if len(set(texts)) < len(texts):
            raise ConfigError(f"{where} lists a value twice: {', '.join(texts)}.")
        return Choices(texts)
    if isinstance(values, Mapping) and {"low", "high"} <= values.keys() <= RANGE_KEYS:
        return _read_range(values, where)
    raise ConfigError(
        f"{where} must be a list of values, such as [1, 2], or a range, such as {{low: 1, high: 2, log: true}}, not "
        f"{json.dumps(values, default=str)}."
    )


def _read_range(values: Mapping[str, Any], where: str) -> Range:
    low, high, log = values["low"], values["high"], values.get("log", False)
    numbers = [isinstance(end, int | float) and not isinstance(end, bool) and math.isfinite(end) for end in (low, high)]
    if not all(numbers) or not isinstance(log, bool) or not low < high:
        raise ConfigError(f"{where}: a range needs numbers low < high, and log as true or false, not {dict(values)}.")
    if log and low <= 0:
        raise ConfigError(f"{where}: a range with log: true must be positive, but low is {low}.")
    return Range(low, high, log)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with new values of the given dotted keys.

    Raises:
        ConfigError: The values are not valid, alone or in combination.
    """
    return _with_values(config.model_dump(mode="json"), values)


def _with_values(base: Mapping[str, Any], values: Mapping[str, Any]) -> RunConfig:
    settings = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    try:
        return validate_config(dict(base), "", settings)
    except ConfigError as error:
        problems = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ConfigError(f"The search space has an invalid combination, {', '.join(settings)}: {problems}") from None


def candidates(config: RunConfig, space: Space) -> Iterator[RunConfig]:
    """Validate and return the configurations of all combinations of list values and ends of ranges.

    If there are more than `MAX_CHECKED` combinations, a random sample is validated.

    Raises:
        ConfigError: A combination is not valid.
    """
    base = config.model_dump(mode="json")
    examples = [values.examples() for values in space.values()]
    combinations: Iterator[tuple[Any, ...]] = itertools.product(*examples)
    if math.prod(map(len, examples)) > MAX_CHECKED:
        random = Random(0)
        combinations = (tuple(map(random.choice, examples)) for _ in range(MAX_CHECKED))
    for combination in combinations:
        yield _with_values(base, dict(zip(space, combination, strict=True)))
