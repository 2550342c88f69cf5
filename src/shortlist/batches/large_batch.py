"""Batches of any size on one device, with the exact gradient and the memory of a chunk."""

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

from shortlist.batches.chunks import Parts, split
from shortlist.batches.memory import GraphBudget, GraphSize, available_memory, is_out_of_memory
from shortlist.batches.sizes import Images, by_size
from shortlist.batches.undo import Undo, cuda_devices, leaves, random_state, set_random_state
from shortlist.errors import ModelError, RunError
from shortlist.processor import require_bfloat16

KEPT_SHARE = 0.5  # of the free memory that automatically kept graphs may fill; the other half is for the work itself
AUTOMATIC_CHUNK = {"cpu": 64, "cuda": 512}  # where the search for a chunk size starts: larger ones gain nothing


@dataclass(frozen=True)
class StepOutput:
    """What a step found; the gradients are where `backward` puts them."""

    loss: Tensor  # a scalar, without a graph
    embeddings: Tensor  # (B, d), float32 or float64, without a graph
    chunks: int
    kept: int  # chunks whose graph was kept, so that they were embedded once


@dataclass
class _Chunk:
    images: Images
    random_state: list[Tensor]  # before the chunk was embedded
    embeddings: Tensor  # with a graph where it was kept


class LargeBatchStep:
    """Puts the gradient of a loss over a whole batch into the parameters, with the memory of a chunk.

    1. *Embed* every chunk, without a graph.
    2. *Differentiate* the loss by the embeddings.
    3. *Backpropagate*: embed every chunk again, now with a graph and the same random numbers, and hand it its part of
       that gradient.

    The gradient equals that of one ordinary backward pass over all chunks. As after `backward`, it is added to what the
    parameters held before; call the optimizer as usual.

    Args:
        model: any module that maps images (n, ...) to vectors (n, d), each image for itself.
        loss: any callable of (embeddings, labels) that gives a scalar. Parameters of its own get their gradients.
        chunk_size: images embedded at once, or "auto": found by trying.
        keep_graphs: graphs of stage 1 that are kept and not made twice: True (all), False (none), as many as fit into a
            number of bytes, or "auto": into half of the memory that is free. Changes memory and time only.
        autocast: a dtype for the model's forward passes, torch.bfloat16 or torch.float16; None for none, whatever the
            caller's context says. The loss stays in float32.
        scaler: a `torch.amp.GradScaler`, needed for float16.

    Raises:
        ModelError: the model has BatchNorm in training mode, whose statistics would come from chunks, or it gave other
            vectors the second time, or none.
        RunError: not even one image at a time fits into memory, or the loss or the images themselves do not; or several
            processes train at once (torch.distributed), which it does not know how to do yet.
        ConfigError: `autocast` is bfloat16, and this CPU does not execute it (`shortlist.processor`).

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
        self._require_precision()  # as early as possible: see require_bfloat16

    def __call__(self, images: Images | Iterable[Images], labels: Tensor) -> StepOutput:
        """One step.

        Args:
            images: one tensor (B, ...); a list of B images of any sizes; or an iterator over chunks, each a tensor or a
                list, which is read once, while the chunks are embedded. uint8 reaches the model as it is.
            labels: (B,).
        """
        _refuse_several_processes()
        refuse_batch_statistics(self.model)
        self._require_precision()  # the model may have moved
        parts = Parts(images)
        undo = Undo(self._device)
        undo.remember_gradients(self.model.parameters())
        while True:
            try:
                return self._step(parts, labels, undo)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error).partition("\n")[0] or type(error).__name__
            undo.restore()  # the failed attempt never happened
            self._take_less_memory(problem)

    def _step(self, parts: Iterable[Images], labels: Tensor, undo: Undo) -> StepOutput:
        chunks = self._embed(parts, len(labels))
        embeddings = torch.cat([chunk.embeddings.detach() for chunk in chunks])
        loss, gradient = self._differentiate(embeddings, labels, undo)
        kept = sum(chunk.embeddings.requires_grad for chunk in chunks)
        if gradient is not None:
            self._backpropagate(chunks, embeddings, gradient)
        return StepOutput(loss, embeddings, len(chunks), kept)

    def _embed(self, parts: Iterable[Images], number: int) -> list[_Chunk]:
        """Stage 1: every chunk, with its random state; the first few with their graphs, as many as fit."""
        if self.chunk_size == "auto":
            self.chunk_size = self._chunk_that_fits(parts)
        budget = GraphBudget(self._room_for_graphs(), self._held())
        chunks, found = [], 0
        for images in split(parts, self.chunk_size):
            found += len(images)
            if found > number:
                break
            state = random_state(self._device)
            chunks.append(_Chunk(images, state, budget.run(partial(self._vectors, images), held=images)))
        if found != number or found == 0:
            raise ValueError(f"{found}{' or more' if found > number else ''} images came with {number} labels")
        return chunks

    def _differentiate(self, embeddings: Tensor, labels: Tensor, undo: Undo) -> tuple[Tensor, Tensor | None]:
        """Stage 2: the loss, and its gradient by the embeddings; the loss's own parameters get theirs."""
        leaf = embeddings.clone().requires_grad_()
        try:
            with torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
                loss = self.loss(leaf, labels.to(self._device))
                if loss.requires_grad:
                    undo.remember_gradients(own for own in leaves(loss) if own is not leaf)
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
        """Stage 3: in the order of the chunks, so that which graphs were kept changes no bit of the sum."""
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
                if vectors.requires_grad:  # not so where every parameter is frozen
                    vectors.backward(part)  # type: ignore[no-untyped-call]
                chunk.embeddings = first  # lets go of the graph

    def _vectors(self, images: Images) -> Tensor:
        """Vectors of a chunk, (n, d); of images of different sizes, those of one size at a time."""
        return by_size(self._vectors_of_one_size, images)

    def _vectors_of_one_size(self, images: Tensor) -> Tensor:
        # No cache: older torch hands the second pass weights cast without a graph, where the caller's context is open.
        lower = self.autocast is not None
        with torch.autocast(self._device.type, dtype=self.autocast, enabled=lower, cache_enabled=False):
            vectors = self.model(images.to(self._device, non_blocking=True))
        if not isinstance(vectors, Tensor) or vectors.ndim == 0 or len(vectors) != len(images):
            found = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise ModelError(f"The model must give one vector for each of {len(images)} images; it gave {found}.")
        return vectors if vectors.dtype == torch.float64 else vectors.float()

    def _require_precision(self) -> None:
        if self.autocast == torch.bfloat16 and self._device.type == "cpu":
            require_bfloat16()

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def _room_for_graphs(self) -> float:
        if isinstance(self.keep_graphs, bool):
            return math.inf if self.keep_graphs else 0
        return available_memory(self._device) * KEPT_SHARE if self.keep_graphs == "auto" else self.keep_graphs

    def _held(self) -> Iterable[Tensor]:
        """What is in memory anyway, and no part of a graph's size."""
        return chain(self.model.parameters(), self.model.buffers())

    def _chunk_that_fits(self, parts: Iterable[Images]) -> int:
        """A size whose graph fills at most half of the free memory, going by the graph of one or two (large) images."""
        some = next((part for part in parts if len(part)), None)
        if some is None:
            return 1
        few = some[:2] if isinstance(some, Tensor) else sorted(some, key=Tensor.numel)[-2:]
        with (
            torch.random.fork_rng(cuda_devices(self._device)),
            torch.enable_grad(),
            GraphSize(chain(self._held(), few)) as graph,
        ):
            self._vectors(few)
        fits = int(available_memory(self._device) * (1 - KEPT_SHARE) * len(few) / max(graph.bytes, 1))
        return max(1, min(fits, AUTOMATIC_CHUNK.get(self._device.type, 64)))

    def _take_less_memory(self, problem: str) -> None:
        if self.chunk_size != "auto" and self.keep_graphs is not False:
            self.keep_graphs = False
            remedy = "no more graphs are kept"
        elif self.chunk_size == 1:
            raise RunError(
                f"Out of memory with chunks of one image. Use smaller images or a smaller model. ({problem})"
            )
        else:
            self.chunk_size = 1 if self.chunk_size == "auto" else self.chunk_size // 2
            remedy = f"chunk_size is now {self.chunk_size}"
        warnings.warn(
            f"Out of memory; {remedy}, and the step is taken again. ({problem})", RuntimeWarning, stacklevel=3
        )

    def _refuse_other_vectors(self, again: Tensor, first: Tensor) -> None:
        tolerance = 1e-3 if self.autocast is None else 5e-2
        largest, difference = first.abs().max(), (again - first).abs().max()
        if largest.isfinite() and not difference <= tolerance * largest:
            raise ModelError(
                "The model gave other vectors for the same images the second time (they differ by "
                f"{difference.item():.1e}, the largest value is {largest.item():.1e}), so the gradient would be wrong. "
                "Its forward pass must draw its random numbers from torch and must not depend on earlier calls, and "
                "the images must stay as they are; or set `keep_graphs=True`, which embeds once."
            )


def _refuse_several_processes() -> None:
    """Raise RunError in a process group: each process would optimise the loss of its own part of the batch."""
    distributed = torch.distributed
    processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if processes > 1:
        raise RunError(
            f"LargeBatchStep works in one process, and this process group has {processes}: each would rank the images "
            "of its own part of the batch only, which is another loss. Train in one process."
        )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise ModelError if the model normalises by statistics of what is embedded at once."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            why = "is in training mode" if module.training else "has no running statistics"
            raise ModelError(
                f"{type(module).__name__} {name!r} {why}: it would normalise by the statistics of a chunk, not of the "
                "batch. Freeze it (`freeze_batch_norm=True` of Embedder, or .eval() on these layers in a model in "
                "training mode), or use a backbone with GroupNorm or LayerNorm."
            )
