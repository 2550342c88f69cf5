"""Losses, miners and the cross-batch memory of pytorch-metric-learning, by name."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from shortlist.config.schema import NamedConfig, SingleLossConfig
from shortlist.errors import ConfigError, did_you_mean
from shortlist.pytorch_metric_learning import CrossBatchMemory
from shortlist.training.metric_learning_arguments import RunSizes, classes_in, construct
from shortlist.training.user_loss import ExternalLoss

_BASE = "it is a base class of other losses"
_UNLABELLED = "it learns from unlabelled views of images, and the images of a run have labels"
REFUSED_LOSSES = {  # losses that do not work on a labelled batch, or do not compute what they claim; and the reason
    "BaseLossWrapper": _BASE,
    "BaseMetricLossFunction": _BASE,
    "EmbeddingRegularizerMixin": _BASE,
    "GenericPairLoss": _BASE,
    "WeightRegularizerMixin": _BASE,
    "CrossBatchMemory": "it is a memory around a loss: name that loss, and set loss.memory.size",
    "HistogramLoss": "its selection of pairs does not work with newer versions of torch",
    "InstanceLoss": "with several images per class, it treats the c-th image of the batch as class c",
    "ManifoldLoss": _UNLABELLED,
    "MultipleLosses": "it is a sum of other losses: name one of them",
    "SelfSupervisedLoss": _UNLABELLED,
    "SmoothAPLoss": "it groups a batch into classes incorrectly unless there are as many classes as images per class; "
    "use loss.name=smooth_ap",
    "VICRegLoss": _UNLABELLED,
}
REFUSED_MINERS = {
    "BaseMiner": "it is a base class of other miners",
    "EmbeddingsAlreadyPackagedAsTriplets": "batches consist of classes, not of triplets",
}


def build_metric_learning_loss(config: SingleLossConfig, classes: Tensor, dim: int, where: str) -> ExternalLoss:
    """Build a loss with its miner and memory, and try it on four vectors.

    Args:
        config: Configuration of the loss.
        classes: Labels of the training classes, in any order.
        dim: Number of dimensions of the embeddings.
        where: Dotted key of the section in the configuration, for error messages.

    Raises:
        ConfigError: The loss or miner does not exist, its arguments are invalid, or the trial fails.
    """
    classes = torch.unique(classes)
    if not len(classes):
        raise ValueError("A loss of pytorch-metric-learning requires the labels of the training classes.")
    sizes = RunSizes(len(classes), dim)
    loss = _build(losses, REFUSED_LOSSES, config, where, sizes)
    miner = None if config.miner is None else _build(miners, REFUSED_MINERS, config.miner, f"{where}.miner", sizes)
    if config.memory is not None:
        if config.pml_class not in losses.CrossBatchMemory.supported_losses():
            supported = ", ".join(sorted(losses.CrossBatchMemory.supported_losses()))
            raise ConfigError(f"{where}.memory does not work with {config.name}. It works with {supported}.")
        loss, miner = Memory(loss, dim, config.memory.size, miner), None
    complete = ExternalLoss(loss, classes, miner)
    _try(complete, config, dim)
    return complete


def _build(
    module: Any, refused: dict[str, str], config: SingleLossConfig | NamedConfig, where: str, sizes: RunSizes
) -> nn.Module:
    """Construct the class of a library module that the section `where` of the configuration names."""
    known, kind = classes_in(module), "miner" if module is miners else "loss"
    name = str(config.pml_class) if isinstance(config, SingleLossConfig) else config.name
    if name in refused:
        raise ConfigError(f"{where}.name: {config.name} cannot be used: {refused[name]}.")
    if name not in known:
        usable = known.keys() - refused.keys()
        raise ConfigError(f"{where}.name: pytorch-metric-learning has no {kind} {name}; {did_you_mean(name, usable)}")
    built: nn.Module = construct(known[name], config.args, sizes, f"{where}.args", config.name)
    return built


def _try(loss: ExternalLoss, config: SingleLossConfig, dim: int) -> None:
    """Call the loss once, so that an invalid combination fails before images are read."""
    vectors = torch.randn(4, dim, generator=torch.Generator().manual_seed(0))
    labels = loss.classes[[0, 0, -1, -1]]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            value = copy.deepcopy(loss)(nn.functional.normalize(vectors).requires_grad_(), labels)
            if not value.isfinite():
                raise ValueError(f"its value for four vectors is {value.item()}")
        except Exception as error:  # the library raises AssertionError, ValueError, plain Exception, ...
            miner = f" with the miner {config.miner.name}" if config.miner else ""
            problem = str(error).strip() or type(error).__name__
            given = f" and the arguments {config.args}" if config.args else ""
            raise ConfigError(f"{config.name}{miner}{given} does not work: {problem}") from error


class Memory(CrossBatchMemory):
    """Cross-batch memory that refuses a batch larger than itself, with an error that names the setting."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if len(embeddings) > self.memory_size:
            raise ConfigError(
                f"loss.memory.size={self.memory_size} is smaller than the batch of {len(embeddings)}: increase it."
            )
        loss: Tensor = super().forward(embeddings, labels)
        return loss
