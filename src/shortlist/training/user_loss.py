"""Losses from outside shortlist: those of pytorch-metric-learning, and user-defined losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.config.schema import HEAD_SETTINGS, SingleLossConfig
from shortlist.errors import ConfigError
from shortlist.imports import call, import_object
from shortlist.ranking import RankingLoss, SiMix

Loss = Callable[..., Tensor]  # (embeddings, labels) -> scalar


class ExternalLoss(nn.Module):
    """Wrapper that gives a loss from outside shortlist the call signature and the state of shortlist's losses.

    The loss gets labels from 0 to C - 1. Everything that it keeps between steps is in `state_dict`.

    Args:
        loss: Function or module of (embeddings, labels) and, with a miner, of its indices.
        classes: Labels of the training classes (C,), ascending.
        miner: Miner of pytorch-metric-learning that selects the indices, or None to use all pairs.
    """

    classes: Tensor

    def __init__(self, loss: Loss, classes: Tensor, miner: nn.Module | None = None) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner
        self.register_buffer("classes", classes, persistent=False)
        for module in self.modules():  # some keep state in plain tensors, which state_dict and .to() would ignore
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    delattr(module, name)
                    module.register_buffer(name, value)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        for buffer in self.buffers():  # some also keep the graph of the last batch
            buffer.detach_()
        indices = self._class_indices(labels)
        mined = () if self.miner is None else (self.miner(embeddings, indices),)
        value = self.loss(embeddings, indices, *mined)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problem = f"The loss must return one number per batch, a tensor, not {what}"
            raise ConfigError(f"{problem}; with pytorch-metric-learning, use another reducer.")
        return value.reshape(())

    def _class_indices(self, labels: Tensor) -> Tensor:
        if labels.ndim > 1:
            raise ConfigError("This loss needs images with one label each: set loss.name to recall_at_k, for example.")
        indices = torch.searchsorted(self.classes, labels).clamp_(max=len(self.classes) - 1)
        if not torch.equal(self.classes[indices], labels):
            raise ValueError("A batch contains labels that are not among the training classes.")
        return indices


def build_user_loss(config: SingleLossConfig, classes: Tensor, dim: int, given: Loss | None = None) -> nn.Module:
    """Build the loss that was given in Python, or that `loss.name` refers to as `package.module:name`.

    A class is constructed with `loss.args`; a function gets them as further arguments. An object with a method `reach`
    is a head of the engine (see `shortlist.ranking.Head`).

    Args:
        config: Configuration of the loss.
        classes: Labels of the training classes, in any order.
        dim: Number of dimensions of the embeddings.
        given: The loss that was given in Python, or None.

    Raises:
        ConfigError: The loss cannot be imported or constructed, or does not support the settings.
    """
    classes = torch.unique(classes)
    loss = _import(config, len(classes), dim) if given is None else given
    if callable(getattr(loss, "reach", None)):
        simix = SiMix() if config.simix else None
        return RankingLoss(loss, config.similarity_temperature, simix, config.count_query)  # type: ignore[arg-type]
    for key in config.changed(sorted(HEAD_SETTINGS)):
        raise ConfigError(f"loss.{key} has no effect: {config.name} is not a head of the engine. Remove it.")
    if not callable(loss):
        raise ConfigError(f"loss.name: {config.name} is not a function, a class or a head, but {type(loss).__name__}.")
    return ExternalLoss(loss, classes)


def _import(config: SingleLossConfig, num_classes: int, dim: int) -> Any:
    """Import the loss; `num_classes` and `embedding_size` are filled in if its constructor requires them."""
    found = import_object(config.name, "loss.name")
    if not inspect.isclass(found):
        return partial(found, **config.args) if config.args else found
    sizes = {"num_classes": num_classes, "embedding_size": dim}
    required = {name: size for name, size in sizes.items() if name in _required(found)}
    return call(found, {**required, **config.args}, config.name, "loss.args")


def _required(kind: type) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:  # a class that is not written in Python
        return {}
    return {name: each for name, each in parameters.items() if each.default is each.empty}
