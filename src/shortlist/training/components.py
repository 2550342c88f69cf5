"""Build the components that a configuration names: embedder, transforms, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.config import CONFIG_KEYS, LossConfig, OptimizerConfig, RunConfig
from shortlist.config.schema import SingleLossConfig
from shortlist.data import FitTransform, TrainTransform, Transform
from shortlist.encoding.pretrained import square_transform
from shortlist.errors import ConfigError, translate_arguments
from shortlist.extras import extra
from shortlist.imports import GIVEN, given_name, is_reference
from shortlist.model import CorrectedLinear, Embedder
from shortlist.model.weights import check_published
from shortlist.ranking import (
    BinnedAPLoss,
    BlackboxAPLoss,
    CalibrationLoss,
    CombinedLoss,
    LinearTail,
    MedianRank,
    RecallAtKLoss,
    Schedule,
    SiMix,
    SmoothAPLoss,
)
from shortlist.seeds import derived_seed, seeded
from shortlist.training.user_loss import build_user_loss

Classes = Tensor | NDArray[np.integer]


class Given(NamedTuple):
    """Parts of a run that are given in Python instead of named in its configuration."""

    model: nn.Module | None = None  # maps normalised images (B, 3, H, W) to vectors (B, d)
    loss: Callable[..., Tensor] | None = None  # (embeddings, labels) -> scalar, or a head of the engine


@translate_arguments(CONFIG_KEYS)
def build_embedder(
    config: RunConfig, *, weights: bool | Literal["local"] = True, given: nn.Module | None = None
) -> Embedder:
    """Build the embedder with its initial weights, which depend on the seed only.

    Args:
        config: Configuration of the run.
        weights: Whether to load pretrained weights; False if only shapes matter. "local" loads weights from files, and
            only checks that timm publishes other weights, without downloading them.
        given: The model, if it is given in Python; an `Embedder` is used as it is.
    """
    model, images = config.model, config.images
    check_given(model.backbone, given, "model")
    if isinstance(given, Embedder):
        _check_head(config, given)
        return given
    source = _pretrained(model.weights)
    downloads = weights == "local" and source is True
    with seeded(derived_seed("weights", config.training.seed)):
        embedder = Embedder(
            model.backbone if given is None else given,
            dim=model.dim,
            pooling=model.pooling,
            layer_norm=model.layer_norm,
            l2_pooled=model.l2_pooled,
            freeze_batch_norm=model.freeze_batch_norm,
            backbone_args=model.backbone_args,
            pretrained=source if weights and not downloads else False,
            image_size=images.size,
            mean=images.mean,
            std=images.std,
            imports=config.imports,
        )
        if downloads and not embedder.config.returns_vectors:
            check_published(embedder.backbone, model.backbone)
        _check_head(config, embedder)
        if model.head != "linear":
            embedder.linear = _corrected_linear(config, embedder)
        return embedder


def _check_head(config: RunConfig, embedder: Embedder) -> None:
    """Check that there are layers to train if the backbone is frozen.

    Raises:
        ConfigError: The embedder has no head.
    """
    if config.frozen and embedder.config.returns_vectors:
        raise ConfigError(
            "model.freeze=backbone trains the layers after the pooling, but it is not known which layers of "
            f"{embedder.config.backbone.removeprefix(GIVEN)} these are. Use a timm backbone or an Embedder, or set "
            "model.freeze=none."
        )
    if config.frozen and not embedder.parts()["head"]:
        raise ConfigError(
            "model.freeze=backbone trains layer norm and linear layer, but this model has neither. Set model.dim."
        )


def _corrected_linear(config: RunConfig, embedder: Embedder) -> CorrectedLinear:
    """Build the linear layer of `model.head` residual and low_rank: the identity or whitening, plus a correction.

    Raises:
        ConfigError: The model has no initial weights to correct.
    """
    model, linear = config.model, embedder.linear
    assert isinstance(linear, nn.Linear)
    if model.whitening == "none":
        if linear.in_features != linear.out_features:
            raise ConfigError(
                f"model.head={model.head} corrects initial weights: those of model.whitening (pca or pairs), or the "
                f"identity if model.dim is the number of channels of the backbone, {linear.in_features}."
            )
        nn.init.eye_(linear.weight)
        nn.init.zeros_(linear.bias)
    return CorrectedLinear(linear, model.head_rank if model.head == "low_rank" else None)


def check_given(name: str, given: object, argument: str) -> None:
    """Check that a part that was given in Python when the run started is given again, and that it is the same part.

    Args:
        name: Name of the part in the configuration.
        given: The part, or None.
        argument: Argument of the Python function, for error messages.

    Raises:
        ConfigError: The part is missing, or is not the same.
    """
    if given is None and name.startswith(GIVEN):
        key = {"model": "model.backbone", "loss": "loss.name"}[argument]
        raise ConfigError(
            f"The {argument} {name.removeprefix(GIVEN)} of this run was given in Python: give it again, with "
            f"{argument}= of the Python function, or start a run with {key}=MODULE:NAME."
        )
    if given is not None and given_name(given) != name:
        raise ConfigError(
            f"The {argument} of this run is {name.removeprefix(GIVEN)}, not {given_name(given).removeprefix(GIVEN)}."
        )


def _pretrained(weights: str | None) -> bool | str:
    return {"timm": True, "none": False}.get(weights, weights) if weights else False


def build_transforms(config: RunConfig, embedder: Embedder) -> tuple[Transform, Transform]:
    """Build the transforms of training and test images. Values that are not set default to those of the backbone."""
    images = config.images
    test = square_transform(embedder, images.test_size or images.size, images.resize, images.interpolation)
    if images.max_side is not None:
        fit = FitTransform(images.max_side, interpolation=test.interpolation)
        return replace(fit, flip=images.flip), fit
    size = images.size or embedder.data_config.input_size[-1]
    return TrainTransform(size, images.scale, images.ratio, images.flip, test.interpolation), test


def build_loss(config: LossConfig, classes: Classes, dim: int, given: Callable[..., Tensor] | None = None) -> nn.Module:
    """Build the loss: a module that maps (embeddings, labels) to a scalar.

    Args:
        config: Configuration of the loss.
        classes: Labels of the training classes, in any order, for losses that have parameters per class.
        dim: Number of dimensions of the embeddings.
        given: The loss, if it is given in Python: a callable of (embeddings, labels), or a head.

    Raises:
        ConfigError: The loss does not exist, or does not support its arguments.
    """
    check_given(config.name, given, "loss")
    labels = torch.as_tensor(classes)
    loss = _build_single_loss(config, labels, dim, "loss", given)
    added = [
        (_build_single_loss(each, labels, dim, f"loss.plus.{number}"), each.weight)
        for number, each in enumerate(config.plus)
    ]
    built = CombinedLoss(loss, *added) if added else loss
    set_progress(built, 0.0)
    return built


def set_progress(loss: nn.Module, progress: float) -> None:
    """Set the share of training that has passed, for losses with a schedule of the rank temperature."""
    for module in loss.modules():
        if isinstance(module, RecallAtKLoss):
            module.progress = progress


def _build_single_loss(
    config: SingleLossConfig, classes: Tensor, dim: int, where: str, given: Callable[..., Tensor] | None = None
) -> nn.Module:
    if given is not None or is_reference(config.name):
        return build_user_loss(config, classes, dim, given)
    if config.pml_class:
        with extra("baselines", f"{where}.name={config.name}"):
            from shortlist.training.metric_learning import build_metric_learning_loss
        return build_metric_learning_loss(config, classes, dim, where)
    if config.name == "binned_ap":
        return BinnedAPLoss(config.bins)
    if config.name == "blackbox_ap":
        return BlackboxAPLoss(config.blackbox_lambda, config.margin)
    if config.name == "calibration":
        return CalibrationLoss(config.positives_above, config.negatives_below)
    common: dict[str, Any] = {
        "similarity_temperature": config.similarity_temperature,
        "count_query": config.count_query,
        "simix": SiMix() if config.simix else None,
        "tail": None if config.tail is None else LinearTail(config.tail.slope, config.tail.start),
    }
    if config.name == "smooth_ap":
        return SmoothAPLoss(**common)
    return RecallAtKLoss(config.cut_offs, _rank_temperature(config), **common)


def _rank_temperature(config: SingleLossConfig) -> float | Schedule | MedianRank:
    if config.rank_temperature == "auto":
        return MedianRank()
    if config.start is None:
        return config.rank_temperature
    return Schedule(config.start.rank_temperature, config.rank_temperature, config.start.until)


def trained_parts(config: RunConfig, embedder: Embedder) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that are trained, by part of the embedder."""
    parts = embedder.parts()
    return {"head": parts["head"]} if config.frozen else parts


def build_optimizer(
    config: OptimizerConfig, parts: Mapping[str, Sequence[nn.Parameter]], loss: nn.Module
) -> torch.optim.Optimizer:
    """Build the optimizer with one parameter group per part of the model, and one for the parameters of the loss.

    The schedule multiplies the `initial_lr` of a group by its factor.

    Args:
        config: Configuration of the optimizer.
        parts: Parameters by part, as `trained_parts` returns them.
        loss: Loss, which may have parameters such as proxies.
    """
    groups: list[dict[str, Any]] = []
    for name, parameters in {**parts, "loss": list(loss.parameters())}.items():
        part = getattr(config.parts, name)
        lr = config.lr * part.lr_multiplier
        decay = config.weight_decay if part.weight_decay is None else part.weight_decay
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if trained:
            groups.append({"name": name, "params": trained, "lr": lr, "initial_lr": lr, "weight_decay": decay})
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr)
