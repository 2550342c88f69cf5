"""Build the components that a configuration names: embedder, transforms, loss and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.batches.undo import seeded
from shortlist.config import CONFIG_KEYS, LossConfig, OptimizerConfig, RunConfig
from shortlist.data import FitTransform, TestTransform, TrainTransform, Transform
from shortlist.errors import translate_arguments
from shortlist.extras import extra
from shortlist.model import Embedder
from shortlist.ranking import BinnedAPLoss, BlackboxAPLoss, RecallAtKLoss, SiMix, SmoothAPLoss
from shortlist.seeds import derived_seed

Classes = Tensor | NDArray[np.integer]


@translate_arguments(CONFIG_KEYS)
def build_embedder(config: RunConfig, *, weights: bool = True) -> Embedder:
    """Build the embedder with its initial weights, which depend on the seed only.

    Args:
        config: Configuration of the run.
        weights: Whether to load pretrained weights; False if only shapes matter.
    """
    model, images = config.model, config.images
    with seeded(derived_seed("weights", config.training.seed)):
        return Embedder(
            model.backbone,
            dim=model.dim,
            pooling=model.pooling,
            layer_norm=model.layer_norm,
            l2_pooled=model.l2_pooled,
            freeze_batch_norm=model.freeze_batch_norm,
            backbone_args=model.backbone_args,
            pretrained=_pretrained(model.weights) if weights else False,
            image_size=images.size,
            mean=images.mean,
            std=images.std,
        )


def _pretrained(weights: str | None) -> bool | str:
    return {"timm": True, "none": False}.get(weights, weights) if weights else False


def build_transforms(config: RunConfig, embedder: Embedder) -> tuple[Transform, Transform]:
    """Build the transforms of training and test images; values that are not set are those of the backbone."""
    images, native = config.images, embedder.data_config
    interpolation = images.interpolation or ("bicubic" if native.interpolation == "bicubic" else "bilinear")
    if images.max_side is not None:
        fit = FitTransform(images.max_side, interpolation=interpolation)
        return replace(fit, flip=images.flip), fit
    size = images.size or native.input_size[-1]
    resize = images.resize or round(size / native.crop_pct)
    train = TrainTransform(size, images.scale, images.ratio, images.flip, interpolation)
    return train, TestTransform(size, resize, interpolation)


def build_loss(config: LossConfig, classes: Classes, dim: int) -> nn.Module:
    """Build the loss: a module that maps (embeddings, labels) to a scalar.

    Args:
        config: Configuration of the loss.
        classes: Labels of the training classes, in any order, for losses that have parameters per class.
        dim: Number of dimensions of the embeddings.

    Raises:
        ConfigError: The loss does not exist, or does not support its arguments.
    """
    if config.pml_class:
        with extra("baselines", f"loss.name={config.name}"):
            from shortlist.training.metric_learning import build_metric_learning_loss
        return build_metric_learning_loss(config, torch.as_tensor(classes), dim)
    simix = SiMix() if config.simix else None
    if config.name == "smooth_ap":
        return SmoothAPLoss(config.similarity_temperature, simix, config.count_query)
    if config.name == "binned_ap":
        return BinnedAPLoss(config.bins)
    if config.name == "blackbox_ap":
        return BlackboxAPLoss(config.blackbox_lambda, config.margin)
    return RecallAtKLoss(
        config.cut_offs, config.rank_temperature, config.similarity_temperature, simix, config.count_query
    )


def build_optimizer(
    config: OptimizerConfig, parts: Mapping[str, Sequence[nn.Parameter]], loss: nn.Module
) -> torch.optim.Optimizer:
    """Build the optimizer with one parameter group per part of the model, and one for the parameters of the loss.

    The schedule multiplies the `initial_lr` of a group by its factor.

    Args:
        config: Configuration of the optimizer.
        parts: Parameters by part, as `Embedder.parts` returns them.
        loss: Loss, which may have parameters such as proxies.
    """
    groups: list[dict[str, Any]] = []
    for name, parameters in {**parts, "loss": list(loss.parameters())}.items():
        part = getattr(config.parts, name, None)
        lr = config.lr * (part.lr_multiplier if part else 1.0)
        decay = config.weight_decay if part is None or part.weight_decay is None else part.weight_decay
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if trained:
            groups.append({"name": name, "params": trained, "lr": lr, "initial_lr": lr, "weight_decay": decay})
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr)
