"""Losses, miners and the memory of pytorch-metric-learning, by name: the only user of that library."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from shortlist.config import LossConfig
from shortlist.errors import ConfigError, did_you_mean
from shortlist.training.signatures import Filled, classes_in, construct

_BASE = "it is a base class of other losses"
_UNLABELLED = "it learns from views of images without labels, and a run here has labels"
REFUSED = {  # losses that cannot work on a labelled batch, or do something else there than they say; and why
    "BaseLossWrapper": _BASE,
    "BaseMetricLossFunction": _BASE,
    "EmbeddingRegularizerMixin": _BASE,
    "GenericPairLoss": _BASE,
    "WeightRegularizerMixin": _BASE,
    "CrossBatchMemory": "it is a memory around a loss: name that loss, and set loss.memory.size",
    "HistogramLoss": "it picks its pairs in a way that newer versions of torch read otherwise",
    "InstanceLoss": "with several images of a class, it takes the c-th image of the batch for class c",
    "ManifoldLoss": _UNLABELLED,
    "MultipleLosses": "it is a sum of other losses: name one of them",
    "SelfSupervisedLoss": _UNLABELLED,
    "SmoothAPLoss": "it cuts a batch into classes wrongly, unless there are as many classes as images of each; "
    "use loss.name=smooth_ap",
    "VICRegLoss": _UNLABELLED,
}
REFUSED_MINERS = {
    "BaseMiner": "it is a base class of other miners",
    "EmbeddingsAlreadyPackagedAsTriplets": "batches here are classes of images, not triplets",
}


def build_metric_learning_loss(config: LossConfig, classes: Tensor, dim: int) -> MetricLearningLoss:
    """The loss, with its miner and its memory, tried once on a few vectors.

    Raises:
        ConfigError: something of it does not exist, is not understood or does not work.
    """
    name = str(config.borrowed)
    classes = torch.unique(classes)
    if not len(classes):
        raise ValueError("a loss of pytorch-metric-learning needs the training classes")
    filled = Filled(len(classes), dim)
    loss = _named(losses, REFUSED, "loss", name, config.args, filled, config.name)
    miner = None
    if config.miner is not None:
        of_miner = config.miner
        miner = _named(
            miners, REFUSED_MINERS, "miner", of_miner.name, of_miner.args, filled, of_miner.name, "loss.miner"
        )
    if config.memory is not None:
        if name not in Memory.supported_losses():
            supported = ", ".join(sorted(Memory.supported_losses()))
            raise ConfigError(f"loss.memory does not work with {config.name}. It works with {supported}.")
        loss, miner = Memory(loss, dim, config.memory.size, miner), None
    borrowed = MetricLearningLoss(loss, miner, classes)
    _try(borrowed, config, dim)
    return borrowed


def _named(
    module: Any,
    refused: dict[str, str],
    kind: str,
    name: str,
    args: dict[str, Any],
    filled: Filled,
    shown: str,
    where: str = "loss",
) -> nn.Module:
    known = classes_in(module)
    if name in refused:
        raise ConfigError(f"{where}.name: {shown} cannot be used: {refused[name]}.")
    if name not in known:
        usable = known.keys() - refused.keys()
        raise ConfigError(f"{where}.name: pytorch-metric-learning has no {kind} {name}; {did_you_mean(name, usable)}")
    made: nn.Module = construct(known[name], args, filled, f"{where}.args", shown)
    return made


def _try(borrowed: MetricLearningLoss, config: LossConfig, dim: int) -> None:
    """What the library refuses at its first call is refused now, before images are read and models run."""
    vectors = torch.randn(4, dim, generator=torch.Generator().manual_seed(0))
    labels = borrowed.classes[[0, 0, -1, -1]]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            value = copy.deepcopy(borrowed)(nn.functional.normalize(vectors).requires_grad_(), labels)
            if not value.isfinite():
                raise ValueError(f"for four vectors it gives {value.item()}")
        except Exception as error:  # whatever it raises: its checks are asserts, ValueErrors, bare Exceptions, ...
            miner = f" with the miner {config.miner.name}" if config.miner else ""
            problem = str(error).strip() or type(error).__name__
            given = f" and the arguments {config.args}" if config.args else ""
            raise ConfigError(f"{config.name}{miner}{given} does not work: {problem}") from error


class MetricLearningLoss(nn.Module):
    """A loss of pytorch-metric-learning with the call and the state of ours.

    Labels reach it as 0..C-1. All that it keeps from step to step is in `state_dict`.

    Args:
        loss: takes (embeddings, labels, indices_tuple).
        miner: what gives it the indices; None: it takes all pairs.
        classes: (C,) the labels of the training classes, ascending.
    """

    classes: Tensor

    def __init__(self, loss: nn.Module, miner: nn.Module | None, classes: Tensor) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner
        self.register_buffer("classes", classes, persistent=False)
        for module in self.modules():  # some keep state in plain tensors, which no state_dict and no .to() would see
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    delattr(module, name)
                    module.register_buffer(name, value)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        for buffer in self.buffers():  # some keep the graph of the last batch, too
            buffer.detach_()
        numbers = self._numbered(labels)
        mined = None if self.miner is None else self.miner(embeddings, numbers)
        value = self.loss(embeddings, numbers, mined)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError("it does not give one number for a batch; its reducer should be another one")
        return value.reshape(())

    def _numbered(self, labels: Tensor) -> Tensor:
        numbers = torch.searchsorted(self.classes, labels).clamp_(max=len(self.classes) - 1)
        if not torch.equal(self.classes[numbers], labels):
            raise ValueError("a batch holds labels that are not among the training classes")
        return numbers


class Memory(losses.CrossBatchMemory):  # type: ignore[misc]
    """The library's memory, which a checkpoint can hold: its counters are part of its state."""

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.queue_idx, int(self.has_been_filled)])

    def set_extra_state(self, state: Tensor) -> None:
        self.queue_idx, filled = state.tolist()
        self.has_been_filled = bool(filled)

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: None = None) -> Tensor:
        if len(embeddings) > self.memory_size:
            raise ConfigError(
                f"loss.memory.size={self.memory_size} is too small for batches of {len(embeddings)}: it must hold one."
            )
        loss: Tensor = super().forward(embeddings, labels)
        return loss
