"""What a config names, built: the embedder, the optimizer, the transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shortlist.batches.undo import seeded
from shortlist.config import OptimizerConfig, RunConfig
from shortlist.config.arguments import ARGUMENTS
from shortlist.data import FitTransform, TestTransform, TrainTransform, Transform
from shortlist.errors import translate_arguments
from shortlist.model import Embedder
from shortlist.seeds import derived_seed


@translate_arguments(ARGUMENTS)
def build_embedder(config: RunConfig, *, weights: bool = True) -> Embedder:
    """The embedder with its initial weights, the same for the same seed; `weights=False` for shapes only."""
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
    """Of the training and of the test images. What the config leaves open is the backbone's own."""
    images, native = config.images, embedder.data_config
    interpolation = images.interpolation or ("bicubic" if native.interpolation == "bicubic" else "bilinear")
    if images.max_side is not None:
        fit = FitTransform(images.max_side, interpolation=interpolation)
        return replace(fit, flip=images.flip), fit
    size = images.size or native.input_size[-1]
    resize = images.resize or round(size / native.crop_pct)
    train = TrainTransform(size, images.scale, images.ratio, images.flip, interpolation)
    return train, TestTransform(size, resize, interpolation)


def build_optimizer(
    config: OptimizerConfig, parts: Mapping[str, Sequence[nn.Parameter]], loss: nn.Module
) -> torch.optim.Optimizer:
    """One group for each part of the model (and one for the loss's own parameters), with its rate and decay.

    A group's `initial_lr` is what the schedule's factor multiplies.
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
