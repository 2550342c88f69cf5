"""Exact gradients of batches of any size on one device, with the memory of a chunk."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from shortlist.batches.chunks import BufferedParts, split
from shortlist.batches.memory import GraphBudget, GraphSize, available_memory, is_out_of_memory
from shortlist.batches.sizes import Images, by_size
from shortlist.batches.undo import Undo, cuda_devices, leaves, random_state, set_random_state
from shortlist.errors import ModelError, RunError
from shortlist.processor import require_bfloat16

KEPT_SHARE = 0.5  # share of the free memory for graphs with keep_graphs="auto"; the rest is for the computation itself
AUTOMATIC_CHUNK = {"cpu": 64, "cuda": 512}  # largest chunk with chunk_size="auto"; larger chunks are not faster


@dataclass(frozen=True)
class StepOutput:
    """Result of a step. The gradients are in the `grad` attributes of the parameters, as after `backward`."""

    loss: Tensor  # scalar, detached
    embeddings: Tensor  # (B, d), float32 or float64, detached
    chunks: int  # number of chunks
    kept: int  # number of chunks whose graph was kept, so that they were embedded only once


@dataclass
class _Chunk:
    images: Images
    random_state: list[Tensor]  # state before the chunk was embedded
    embeddings: Tensor  # has a graph if it was kept


class LargeBatchStep:
    """Computes the gradient of a loss over a whole batch, with the memory of a chunk, in three stages.

    1. *Embed* every chunk, without a graph.
    2. *Differentiate* the loss with respect to the embeddings.
    3. *Backpropagate*: embed every chunk again, with a graph and the same random numbers, and propagate its part of
       that gradient to the parameters.

    The gradient equals that of a single backward pass over the whole batch. As with `backward`, it is added to the
    existing gradients of the parameters; call the optimizer as usual.

    Args:
        model: Module that maps images, (n, ...), to vectors, (n, d). The vector of an image must not depend on the
            other images.
        loss: Callable that maps (embeddings, labels) to a scalar. If it has parameters, they get gradients, too.
        chunk_size: Number of images that are embedded at once, or "auto" to choose it by the available memory.
        keep_graphs: Which graphs to keep in stage 1, so that their chunks need not be embedded again: True (all),
            False (none), a number of bytes that they may take, or "auto" (half of the free memory). Affects memory and
            time only.
        autocast: Reduced precision of the model's forward passes, torch.bfloat16 or torch.float16. None disables
            autocast, even within an autocast context of the caller. The loss is always computed in full precision.
        scaler: Gradient scaler, a `torch.amp.GradScaler`. Required for float16.

    Raises:
        ModelError: If the model has BatchNorm in training mode, which would use the statistics of chunks; if it returns
            different vectors in the second pass; or if it does not return one vector per image.
        RunError: If memory does not suffice for a single image at a time, for the loss, or for the images themselves;
            or in a process group of several processes (torch.distributed), which is not supported.
        ConfigError: If `autocast` is bfloat16 and this CPU cannot execute it (see `shortlist.processor`).

    Example:
        >>> model, loss = nn.Linear(3, 2), lambda vectors, labels: vectors.square().mean()
        >>> step = LargeBatchStep(model, loss, chunk_size=4)
        >>> out = step(torch.randn(10, 3), torch.arange(10) // 2)
        >>> out.embeddings.shape, out.chunks, model.weight.grad.shape
        (torch.Size([10, 2]), 3, torch.Size([2, 3]))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        chunk_size: int | Literal["auto"] = 64,
        *,
        keep_graphs: bool | int | Literal["auto"] = "auto",
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if chunk_size != "auto" and (type(chunk_size) is not int or chunk_size < 1):
            raise ValueError(f'chunk_size must be at least 1, or "auto", not {chunk_size!r}')
        if keep_graphs != "auto" and (not isinstance(keep_graphs, int | float) or not keep_graphs >= 0):
            raise ValueError(f'keep_graphs must be True, False, "auto" or a number of bytes, not {keep_graphs!r}')
        if autocast == torch.float16 and scaler is None:
            raise ValueError("float16 loses small gradients without a scaler: pass scaler=torch.amp.GradScaler()")
        self.model, self.loss = model, loss
        self.chunk_size, self.keep_graphs = chunk_size, keep_graphs
        self.autocast, self.scaler = autocast, scaler
        self._require_precision()  # early, for the reason given in require_bfloat16

    def __call__(self, images: Images | Iterable[Images], labels: Tensor) -> StepOutput:
        """Compute the loss of a batch and add its gradient to the parameters.

        Args:
            images: A tensor of shape (B, ...); a list of B images of any sizes; or an iterator of chunks, each a tensor
                or a list, which is read once, while the chunks are embedded. Images are passed to the model without
                conversion of their dtype.
            labels: Labels of shape (B,).
        """
        _refuse_several_processes()
        refuse_batch_statistics(self.model)
        self._require_precision()  # again, because the model may have moved to another device
        parts = BufferedParts(images)
        undo = Undo(self._device)
        undo.remember_gradients(self.model.parameters())
        while True:
            try:
                return self._step(parts, labels, undo)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error).partition("\n")[0] or type(error).__name__
            undo.restore()
            self._reduce_memory(problem)

    def _step(self, parts: Iterable[Images], labels: Tensor, undo: Undo) -> StepOutput:
        chunks = self._embed(parts, len(labels))
        embeddings = torch.cat([chunk.embeddings.detach() for chunk in chunks])
        loss, gradient = self._differentiate(embeddings, labels, undo)
        kept = sum(chunk.embeddings.requires_grad for chunk in chunks)
        if gradient is not None:
            self._backpropagate(chunks, embeddings, gradient)
        return StepOutput(loss, embeddings, len(chunks), kept)

    def _embed(self, parts: Iterable[Images], number: int) -> list[_Chunk]:
        """Stage 1: embed every chunk and record its random state. The first chunks keep their graphs if these fit."""
        if self.chunk_size == "auto":
            self.chunk_size = self._find_chunk_size(parts)
        budget = GraphBudget(self._memory_for_graphs(), self._model_tensors())
        chunks, read = [], 0
        for images in split(parts, self.chunk_size):
            read += len(images)
            if read > number:
                break
            state = random_state(self._device)
            chunks.append(_Chunk(images, state, budget.run(partial(self._vectors, images), held=images)))
        if read != number or read == 0:
            counts = f"{read}{' or more' if read > number else ''} images and {number} labels"
            raise ValueError(f"Got {counts}: pass at least one image, and one label per image")
        return chunks

    def _differentiate(self, embeddings: Tensor, labels: Tensor, undo: Undo) -> tuple[Tensor, Tensor | None]:
        """Stage 2: compute the loss and its gradient with respect to the embeddings, and to its own parameters."""
        leaf = embeddings.clone().requires_grad_()
        try:
            with torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
                loss = self.loss(leaf, labels.to(self._device))
                if loss.requires_grad:
                    undo.remember_gradients(each for each in leaves(loss) if each is not leaf)
                    scaled = loss if self.scaler is None else self.scaler.scale(loss)
                    scaled.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            if self.keep_graphs is False and is_out_of_memory(error):
                raise RunError(
                    "Out of memory in the loss, where smaller chunks do not help. Use a smaller batch or another loss."
                ) from error
            raise
        return loss.detach(), leaf.grad

    def _backpropagate(self, chunks: list[_Chunk], embeddings: Tensor, gradient: Tensor) -> None:
        """Stage 3: propagate the gradient of the embeddings to the parameters.

        The chunks are processed in order, so that the sum does not depend on which graphs were kept, not even in its
        rounding errors.
        """
        sizes = [len(chunk.embeddings) for chunk in chunks]
        parts = zip(chunks, torch.split(embeddings, sizes), torch.split(gradient, sizes), strict=True)
        with torch.random.fork_rng(cuda_devices(self._device)), torch.autocast(self._device.type, enabled=False):
            for chunk, first, part in parts:
                vectors = chunk.embeddings
                if not vectors.requires_grad:
                    set_random_state(self._device, chunk.random_state)
                    with torch.enable_grad():
                        vectors = self._vectors(chunk.images)
                    self._refuse_other_vectors(vectors.detach(), first)
                if vectors.requires_grad:  # False if all parameters are frozen
                    vectors.backward(part)  # type: ignore[no-untyped-call]
                chunk.embeddings = first  # frees the graph

    def _vectors(self, images: Images) -> Tensor:
        """Embed a chunk, (n, d). Images of different sizes are embedded one size at a time."""
        return by_size(self._vectors_of_one_size, images)

    def _vectors_of_one_size(self, images: Tensor) -> Tensor:
        # Without a cache, since within an autocast context of the caller, older versions of torch would reuse weights
        # in the second pass that were cast without a graph in the first.
        enabled = self.autocast is not None
        with torch.autocast(self._device.type, dtype=self.autocast, enabled=enabled, cache_enabled=False):
            vectors = self.model(images.to(self._device, non_blocking=True))
        if not isinstance(vectors, Tensor) or vectors.ndim == 0 or len(vectors) != len(images):
            returned = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise ModelError(
                f"The model must return one vector for each of {len(images)} images; it returned {returned}."
            )
        return vectors if vectors.dtype == torch.float64 else vectors.float()

    def _require_precision(self) -> None:
        if self.autocast == torch.bfloat16 and self._device.type == "cpu":
            require_bfloat16()

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def _memory_for_graphs(self) -> float:
        if isinstance(self.keep_graphs, bool):
            return math.inf if self.keep_graphs else 0
        return available_memory(self._device) * KEPT_SHARE if self.keep_graphs == "auto" else self.keep_graphs

    def _model_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that are in memory anyway and do not count towards the size of a graph."""
        return chain(self.model.parameters(), self.model.buffers())

    def _find_chunk_size(self, parts: Iterable[Images]) -> int:
        """Estimate the chunk size whose graph takes half of the free memory, from the graph of one or two images."""
        part = next((part for part in parts if len(part)), None)
        if part is None:
            return 1
        sample = part[:2] if isinstance(part, Tensor) else sorted(part, key=Tensor.numel)[-2:]
        with (
            torch.random.fork_rng(cuda_devices(self._device)),
            torch.enable_grad(),
            GraphSize(chain(self._model_tensors(), sample)) as graph,
        ):
            self._vectors(sample)
        fitting = int(available_memory(self._device) * (1 - KEPT_SHARE) * len(sample) / max(graph.bytes, 1))
        return max(1, min(fitting, AUTOMATIC_CHUNK.get(self._device.type, 64)))

    def _reduce_memory(self, problem: str) -> None:
        """Reduce the memory of the next attempt, with a warning: first keep no graphs, then halve the chunks."""
        if self.chunk_size != "auto" and self.keep_graphs is not False:
            self.keep_graphs = False
            remedy = "graphs are no longer kept"
        elif self.chunk_size == 1:
            raise RunError(
                f"Out of memory with chunks of one image. Use smaller images or a smaller model. ({problem})"
            )
        else:
            self.chunk_size = 1 if self.chunk_size == "auto" else self.chunk_size // 2
            remedy = f"chunk_size is now {self.chunk_size}"
        warnings.warn(f"Out of memory; {remedy}, and the step is repeated. ({problem})", RuntimeWarning, stacklevel=3)

    def _refuse_other_vectors(self, second: Tensor, first: Tensor) -> None:
        """Raise ModelError if the second pass returned different vectors than the first."""
        tolerance = 1e-3 if self.autocast is None else 5e-2
        largest, difference = first.abs().max(), (second - first).abs().max()
        if largest.isfinite() and not difference <= tolerance * largest:
            raise ModelError(
                "The model returned different vectors for the same images in the second pass (they differ by "
                f"{difference.item():.1e}, the largest value is {largest.item():.1e}), so the gradient would be wrong. "
                "Its forward pass must take its random numbers from torch and must not depend on earlier calls, and "
                "the images must not be modified. Alternatively, set `keep_graphs=True`, which embeds every image once."
            )


def _refuse_several_processes() -> None:
    """Raise RunError in a process group, where each process would optimise the loss of its own part of the batch."""
    distributed = torch.distributed
    processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if processes > 1:
        raise RunError(
            f"LargeBatchStep works in one process, and this process group has {processes}: each would rank only the "
            "images of its own part of the batch, which is a different loss. Train in one process."
        )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise ModelError if the model normalises by the statistics of the images that are embedded together."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            reason = "is in training mode" if module.training else "has no running statistics"
            raise ModelError(
                f"{type(module).__name__} {name!r} {reason}: it would normalise by the statistics of a chunk, not of "
                "the batch. Freeze it (`freeze_batch_norm=True` of Embedder, or call .eval() on these layers after "
                ".train() on the model), or use a backbone with GroupNorm or LayerNorm."
            )
