"""Requirements of a run: memory, floating-point operations, and communication between its processes."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from shortlist.batches.large_batch import AUTOMATIC_CHUNK, CHUNK_SHARE, KEPT_SHARE
from shortlist.batches.memory import available_memory, free_in_heap
from shortlist.batches.tracing import Trace, trace
from shortlist.bfloat16 import require_bfloat16
from shortlist.config import RunConfig
from shortlist.errors import ConfigError
from shortlist.model import Embedder
from shortlist.seeds import seeded
from shortlist.training.components import build_loss, build_transforms, trained_parts
from shortlist.training.plan import Plan, inference_batch_size, run_workers

OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # number of values that an optimizer keeps per parameter
TRAINING_WORK = 3  # a backward pass has two products for each one of the forward pass
LOADED_AHEAD = 2  # number of chunks that each decoding process loads in advance
GPU_LOSS = 2 * 4 * 2**24  # bytes of the loss's tiles on a GPU: similarities of queries, and pairs with positives
GPU_CONTEXT = 2**30  # bytes that CUDA and its libraries take
RANKING = 4 * 2**24  # bytes of the ranking tiles in an evaluation
# Memory of activations divided by their size: CPU kernels have temporaries of their own, and the heap is fragmented.
# Chosen so that plans agree with runs (benchmarks/plan.py).
ALLOCATED = {"cpu": 1.25, "cuda": 1.0}
LARGEST_TRACED_LOSS = 8192  # batch size; the memory of larger batches is extrapolated


class Device(NamedTuple):
    """The device that a process trains on."""

    room: float  # bytes that it may use, including those of the model
    process: int = 0  # bytes of the process itself: Python and libraries
    kind: Literal["cpu", "cuda"] = "cpu"


class PerImage(NamedTuple):
    """Bytes of a computation on n images: `each` * n + `once`."""

    each: float
    once: float

    def __call__(self, images: int) -> float:
        return self.each * images + self.once


@dataclass(frozen=True)
class Requirements:
    """Requirements of each process of a run. All sizes are numbers of bytes.

    Args:
        weights: Weights and buffers of the model and the loss, and the moving average of the weights.
        trained: Gradient of the trained weights.
        states: State of the optimizer.
        image: Pixels of an image, or the features of a frozen backbone.
        graph: Tensors per image that are saved for the backward pass.
        training: Largest size of a chunk's activations, forward and backward.
        inference: Largest size of an image's activations in evaluations, and in the encoding of views.
        forward_work: Floating-point operations of the forward pass of an image.
        dim: Number of dimensions of the embeddings.
        loss: Memory and work of the loss of `loss_batch` images.
        loss_batch: See `loss`.
        evaluated: Vectors of the largest test.
        features: Cached features of a frozen backbone, which are mapped from files.
        batch: Number of images per step, in all processes.
        chunk_size: Number of images that are embedded at once.
        keep_graphs: As in `LargeBatchStep`.
        inference_batch: Number of images that are embedded at once in evaluations.
        ahead: Number of chunks that are decoded in advance.
        device: Device of each process.
        processes: Number of processes.
    """

    weights: int
    trained: int
    states: int
    image: int
    graph: float
    training: PerImage
    inference: float
    forward_work: float
    dim: int
    loss: Trace
    loss_batch: int
    evaluated: int
    features: int
    batch: int
    chunk_size: int | Literal["auto"]
    keep_graphs: bool | int | Literal["auto"]
    inference_batch: int
    ahead: int
    device: Device
    processes: int = 1

    @cached_property
    def chunk(self) -> int:
        """Number of images per chunk."""
        if self.chunk_size != "auto":
            return min(self.chunk_size, self.batch)
        most = min(AUTOMATIC_CHUNK[self.device.kind], math.ceil(self.batch / self.processes))
        return max(1, min(most, int(self._free * CHUNK_SHARE / self.graph)))

    @property
    def share(self) -> int:
        """Number of images that this process embeds; the largest of all processes."""
        chunks = math.ceil(self.batch / self.chunk)
        return min(self.batch, math.ceil(chunks / self.processes) * self.chunk)

    @property
    def kept(self) -> int:
        """Number of images whose graphs are kept, so that they are embedded only once."""
        room = KEPT_SHARE[self.device.kind] * self._free if self.keep_graphs == "auto" else self.keep_graphs
        if isinstance(room, bool):
            return self.share if room else 0
        return min(self.share, int(room / (self.graph * self.chunk)) * self.chunk)

    @property
    def largest_chunk(self) -> int:
        """Number of images of the largest chunk that fits into memory, if no graphs are kept; 0 if none fits."""
        return max(
            0, int((self._free - self._activations(0) - self._pixels) / (self._activations(1) - self._activations(0)))
        )

    @property
    def memory(self) -> dict[str, float]:
        """Memory by part. Activations, loss and evaluation do not coexist; `peak` accounts for that."""
        return {
            "process": self.device.process,
            "weights": self.weights,
            "gradient": self.trained,
            "optimizer": self.states,
            "pixels": self._pixels,
            "embeddings": self._embeddings,
            "chunk": self._activations(self.chunk),
            "kept_graphs": self.graph * self.kept,
            "loss": self._loss_memory,
            "evaluation": self._evaluation,
            "features": self.features,
        }

    @property
    def peak(self) -> float:
        """Largest memory of the process at any time."""
        kept = self.graph * self.kept
        first = self.graph * min(self.chunk, self.kept)  # the first kept graph is the one that is backpropagated
        step = max(kept - first + self._activations(self.chunk), kept + self._loss_memory)
        phases = max(self._pixels + self._embeddings + step, self._evaluation)
        return self.device.process + self._state + self.features + phases

    @property
    def step_work(self) -> float:
        """Floating-point operations of a step, in this process."""
        again = self.share - self.kept  # images that are embedded twice
        images = self.forward_work * (TRAINING_WORK * self.share + again)
        return images + self.loss.flops * (self.batch / self.loss_batch) ** 2 / self.processes

    @property
    def sent(self) -> float:
        """Number of bytes that this process sends in a step."""
        share = (self.processes - 1) / self.processes
        return share * 2 * (4 * self.batch * self.dim + self.trained)

    def scaled(self, *, batch: float = 1, side: float = 1, processes: int = 1) -> Requirements:
        """Return the requirements with a larger batch, larger images, and more processes.

        Args:
            batch: Factor of the batch size.
            side: Factor of the side of images. Activations are assumed to grow with the number of pixels.
            processes: Factor of the number of processes.
        """
        pixels = side**2
        return replace(
            self,
            batch=round(self.batch * batch),
            processes=self.processes * processes,
            image=round(self.image * pixels),
            graph=self.graph * pixels,
            training=self.training._replace(each=self.training.each * pixels),
            inference=self.inference * pixels,
            forward_work=self.forward_work * pixels,
        )

    @property
    def _state(self) -> int:
        return self.weights + self.trained + self.states

    @property
    def _free(self) -> float:
        return max(0.0, self.device.room - self._state - self._loss_memory)

    def _activations(self, images: int) -> float:
        """Memory that a chunk of this many images takes, forward and backward."""
        return ALLOCATED[self.device.kind] * self.training(images)

    @property
    def _pixels(self) -> int:
        """Pixels of this process's share of a batch, and of the chunks that are decoded in advance."""
        return self.image * (self.share + self.ahead * self.chunk)

    @property
    def _embeddings(self) -> int:
        """Embeddings of the batch, and the copy with respect to which the loss is differentiated."""
        return 2 * 4 * self.batch * self.dim

    @property
    def _loss_memory(self) -> float:
        if self.device.kind == "cuda":
            return GPU_LOSS + 2 * 4 * self.batch * self.dim
        return self.loss.peak * max(1.0, self.batch / self.loss_batch)

    @property
    def _evaluation(self) -> float:
        activations = ALLOCATED[self.device.kind] * self.inference * self.inference_batch
        return activations + self.evaluated + RANKING


def find_requirements(
    plan: Plan,
    embedder: Embedder,
    loss: nn.Module | None = None,
    device: Device | None = None,
    processes: int = 1,
    sharing: int | None = None,
) -> Requirements:
    """Determine the requirements of a run by tracing its model with one and two images, and its loss with vectors.

    Images that keep their aspect ratio are assumed to be squares of the largest side. If this is not the traced size,
    memory and work are assumed to be proportional to the number of pixels.

    Args:
        plan: Plan of the run.
        embedder: Embedder of the run. It is not changed; its weights do not matter.
        loss: Loss of the run, which is not changed; None to build it from the configuration.
        device: Device of each process; None: that of this machine, with the memory that is free now.
        processes: Number of processes that share each batch.
        sharing: Number of these processes on one machine; None: all.
    """
    config, batch = plan.config, plan.sampler.batch_size
    sharing = sharing or processes
    loss = loss or build_loss(config.loss, plan.classes, embedder.dim)  # refuses what training would refuse
    trained: nn.Module = embedder.head() if config.frozen else embedder
    parameters = [p for part in trained_parts(config, embedder).values() for p in part if p.requires_grad]
    gradient = _bytes(parameters) + _bytes(loss.parameters())
    average = _bytes(trained.parameters()) if config.training.ema is not None else 0
    model = _trace_model(config, embedder, trained)
    traced_loss = _trace_loss(loss, plan, embedder.dim, min(batch, LARGEST_TRACED_LOSS))
    return Requirements(
        weights=_bytes(embedder.state_dict().values()) + _bytes(loss.state_dict().values()) + average,
        trained=gradient,
        states=OPTIMIZER_STATES[config.optimizer.name] * gradient,
        **model,
        dim=embedder.dim,
        loss=traced_loss,
        loss_batch=min(batch, LARGEST_TRACED_LOSS),
        evaluated=max((4 * len(each.catalog) * embedder.dim for each in plan.evaluated), default=0),
        features=_cached_features(plan, model["image"]) if config.frozen else 0,
        batch=batch,
        chunk_size=math.ceil(batch / processes) if config.frozen else config.batch.chunk_size,
        keep_graphs=config.kept_graphs,
        inference_batch=inference_batch_size(config),
        ahead=0 if config.frozen else LOADED_AHEAD * run_workers(config, sharing),
        device=device or this_device(embedder, sharing),  # after the traces, which load libraries
        processes=processes,
    )


def this_device(embedder: Embedder, sharing: int) -> Device:
    """Return the device of runs on this machine: a GPU, or a CPU with a share of the memory."""
    model = _bytes(embedder.parameters())
    if torch.cuda.is_available():
        return Device(available_memory(torch.device("cuda")), kind="cuda")
    process = psutil.Process().memory_info().rss - model - free_in_heap()
    return Device(available_memory(torch.device("cpu")) / sharing + model, process)


def gpu(memory: float) -> Device:
    """Return a GPU with this many bytes of memory, which need not exist on this machine."""
    return Device(memory - GPU_CONTEXT, GPU_CONTEXT, "cuda")


def _trace_model(config: RunConfig, embedder: Embedder, trained: nn.Module) -> dict[str, Any]:
    """Trace training and inference with one and two images."""
    train, test = build_transforms(config, embedder)
    traced_side = train.size or embedder.data_config.input_size[-1]
    side = config.images.max_side or traced_side
    device = next(embedder.parameters()).device
    images = torch.zeros(2, 3, traced_side, traced_side, dtype=torch.uint8, device=device)
    inputs = torch.zeros(2, embedder.layout.channels, device=device) if config.frozen else images
    scale = 1.0 if config.frozen else side**2 / traced_side**2
    dtype = _reduced_precision(config)

    def vectors(model: nn.Module, images: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            found: Tensor = model(images)
        return found.float()

    with seeded(0, device), _AccumulatedGradients(trained):
        one, two = (
            trace(partial(vectors, trained, inputs[:number]), lambda found: found.sum().backward()) for number in (1, 2)
        )
        with torch.no_grad():
            inference = trace(partial(embedder, images))
    return {
        "image": 4 * embedder.layout.channels if config.frozen else 3 * side**2,
        "graph": (two.kept - one.kept) * scale,
        "training": PerImage((two.peak - one.peak) * scale, max(0, 2 * one.peak - two.peak)),
        "inference": inference.peak / 2 * (test.size or side) ** 2 / traced_side**2,
        "forward_work": two.flops / 2 * scale,
    }


def _cached_features(plan: Plan, size: int) -> int:
    """Compute the size of cached features: of views in half precision, and of test images in full precision."""
    return len(plan.train) * plan.config.data.number_of_views * size // 2 + plan.images_without_views * size


class _AccumulatedGradients:
    """Context in which all gradients already exist, so that a trace does not count them."""

    def __init__(self, model: nn.Module) -> None:
        self.before = [(each, each.grad) for each in model.parameters() if each.requires_grad]

    def __enter__(self) -> None:
        for parameter, _ in self.before:
            parameter.grad = torch.zeros_like(parameter)

    def __exit__(self, *error: object) -> None:
        for parameter, gradient in self.before:
            parameter.grad = gradient


def _reduced_precision(config: RunConfig) -> torch.dtype | None:
    """Return the data type of autocast in a trace; None, which takes more memory, if this CPU cannot execute it."""
    with suppress(ConfigError):
        if config.training.precision != "float32":
            require_bfloat16()
            return torch.bfloat16
    return None


def _trace_loss(loss: nn.Module, plan: Plan, dim: int, batch: int) -> Trace:
    """Trace the loss with random vectors. For a loss that refuses them, only their gradient is counted."""
    labels = plan.first_labels()[:batch]
    traced = Trace(4 * batch * dim, 0, 0)
    with seeded(0), suppress(Exception):  # a user-defined loss
        copied, vectors = copy.deepcopy(loss).cpu(), normalize(torch.randn(batch, dim)).requires_grad_()
        traced = trace(lambda: copied(vectors, labels).backward())
    return traced


def _bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))
