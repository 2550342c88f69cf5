"""The loss that a config names: one of ours, or one of pytorch-metric-learning."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.config import LossConfig
from shortlist.extras import extra
from shortlist.ranking import BinnedAPLoss, BlackboxAPLoss, RecallAtKLoss, SiMix, SmoothAPLoss

Classes = Tensor | NDArray[np.integer]


def build_loss(config: LossConfig, classes: Classes, dim: int) -> nn.Module:
    """A module with the call `(embeddings, labels)` that gives a scalar.

    Args:
        config: of the loss.
        classes: the labels of the training classes, in any order. Losses that keep something for each class need them.
        dim: of the embeddings.

    Raises:
        ConfigError: no such loss, or not with these arguments; says which there are.
    """
    if config.borrowed:
        with extra("baselines", f"loss.name={config.name}"):
            from shortlist.training.borrowed import build_metric_learning_loss
        return build_metric_learning_loss(config, torch.as_tensor(classes), dim)
    simix = SiMix() if config.simix else None
    if config.name == "smooth_ap":
        return SmoothAPLoss(config.similarity_temperature, simix)
    if config.name == "binned_ap":
        return BinnedAPLoss(config.bins)
    if config.name == "blackbox_ap":
        return BlackboxAPLoss(config.blackbox_lambda, config.margin)
    return RecallAtKLoss(
        config.cut_offs, config.rank_temperature, config.similarity_temperature, simix, config.count_query
    )
