"""Exact gradients of batches of any size, with the memory of a chunk, in one process or several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shortlist.batches.by_size import Images, by_size
from shortlist.batches.chunks import BufferedParts, split
from shortlist.batches.gradients import NewGradients, leaves
from shortlist.batches.memory import (
    GraphBudget,
    GraphSize,
    available_memory,
    is_out_of_memory,
    return_freed_memory,
)
from shortlist.bfloat16 import require_bfloat16
from shortlist.distributed import Processes, current_processes
from shortlist.errors import ConfigError, ModelError, RunError, in_all_processes
from shortlist.ranking.sharing import shared_queries
from shortlist.seeds import cuda_devices, derived_seed, seeded

# Share of the free memory for graphs with keep_graphs="auto"; the rest is for the computation, and for other processes.
KEPT_SHARE = {"cpu": 0.25, "cuda": 0.5}
CHUNK_SHARE = 0.5  # share of the free memory for a chunk with chunk_size="auto"
AUTOMATIC_CHUNK = {"cpu": 64, "cuda": 512}  # largest chunk with chunk_size="auto"; larger chunks are not faster


@dataclass(frozen=True)
class StepOutput:
    """Result of a step. The gradients are in the `grad` attributes of the parameters, as after `backward`."""

    loss: Tensor  # scalar, detached
    embeddings: Tensor  # (B, d), float32 or float64, detached
    chunks: int  # number of chunks, in all processes
    kept: int  # number of chunks whose graph was kept, so that they were embedded only once


@dataclass(frozen=True)
class _Batch:
    parts: Iterable[Images]  # of this process
    labels: Tensor  # of the whole batch
    sizes: Sequence[int]  # number of images of each process
    seed: int  # the random numbers of the step are derived from it


@dataclass
class _Chunk:
    images: Images
    seed: int  # random seed of its forward passes
    embeddings: Tensor  # has a graph if it was kept
    graph: int  # number of bytes of the graph; 0 if there is none, or if all are kept


class LargeBatchStep:
    """Computes the gradient of a loss over a whole batch, with the memory of a chunk, in three stages.

    1. *Embed* every chunk, without a graph.
    2. *Differentiate* the loss with respect to the embeddings.
    3. *Backpropagate*: embed every chunk again, with a graph and the same random numbers, and propagate its part of
       that gradient to the parameters.

    The gradient equals that of a single backward pass over the whole batch. As with `backward`, it is added to the
    existing gradients of the parameters; call the optimizer as usual. The random numbers of a chunk and of the loss are
    derived from one number of torch's default generator and the position of the chunk in the batch.

    In a process group of several processes, all of them call the step with the same labels. Each embeds and
    backpropagates its part of the chunks and ranks its part of the queries (of the losses of `shortlist`; other losses
    are computed in every process). All processes get the loss, embeddings and gradients that a single process would
    get. Before the first step, they get the weights of the first process. An error in one process is raised in all.

    Args:
        model: Module that maps images, (n, ...), to vectors, (n, d). The vector of an image must not depend on the
            other images.
        loss: Callable that maps (embeddings, labels) to a scalar. If it has parameters, they get gradients as well.
        chunk_size: Number of images that are embedded at once, or "auto" to choose it by the available memory.
        keep_graphs: Which graphs to keep in stage 1, so that their chunks need not be embedded again: True (all),
            False (none), a maximum number of bytes, or "auto": up to a quarter of the free memory of the computer, or
            half of that of a GPU. "auto" checks the free memory before each chunk, and drops graphs if other processes
            need it. Affects memory and time only.
        autocast: Reduced precision of the model's forward passes, torch.bfloat16 or torch.float16. None disables
            autocast, even within an autocast context of the caller. The loss is always computed in full precision.
        scaler: Gradient scaler, a `torch.amp.GradScaler`. Required for float16.
        processes: Processes that share each batch, such as `SeveralProcesses(group)`. Default: those of the default
            process group of `torch.distributed`, or this process alone.

    Raises:
        ModelError: If the model has BatchNorm in training mode, which would use the statistics of chunks; if it returns
            different vectors in the second pass; or if it does not return one vector per image.
        RunError: If memory does not suffice for a single image at a time, for the loss, or for the images themselves;
            or if the step is called in `torch.inference_mode`.
        ProcessLostError: If another process has ended.
        ConfigError: If the loss does not return a scalar; or if `autocast` is bfloat16 and this CPU cannot execute it
            (see `shortlist.bfloat16`).

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
        processes: Processes | None = None,
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
        self._processes = processes
        self._same_weights_in: Processes | None = None  # processes that have copied the weights of the first
        self._most_kept = 0  # bytes of graphs in earlier steps whose memory has not been returned to the system
        self._part_size = None if chunk_size == "auto" else chunk_size
        self._require_precision()  # early, for the reason given in require_bfloat16

    @property
    def processes(self) -> Processes:
        """The processes that share each batch."""
        return self._processes or current_processes()

    def parts(self, batch: Tensor | Sequence[Any]) -> list[Any]:
        """Divide a batch, such as a list of indices, into parts, and return those that this process embeds.

        A part has `chunk_size` items. If that is "auto", there is at least one part per process.

        Args:
            batch: A tensor of shape (B, ...), or a sequence of B items.

        Returns:
            Parts of the batch, in order; possibly none.
        """
        return [batch[start:stop] for start, stop in self._bounds(len(batch), self.processes.rank)]

    def _bounds(self, number: int, rank: int) -> list[tuple[int, int]]:
        """Return the start and the end of each part of a process, in a batch of `number` images."""
        processes = self.processes.number
        automatic = min(AUTOMATIC_CHUNK.get(self._device.type, 64), math.ceil(number / processes))
        size = self._part_size or max(1, automatic)
        starts = range(0, number, size)
        own = starts[rank * len(starts) // processes : (rank + 1) * len(starts) // processes]
        return [(start, min(start + size, number)) for start in own]

    def __call__(self, images: Images | Iterable[Images], labels: Tensor) -> StepOutput:
        """Compute the loss of a batch and add its gradient to the parameters.

        Args:
            images: A tensor of shape (B, ...); a list of B images of any sizes; or an iterator of parts of the batch,
                each a tensor or a list, which is read once, while the chunks are embedded. In several processes, the
                iterator yields the parts that `parts` returns, so that a process loads only the images that it embeds.
                Images are passed to the model without conversion of their dtype.
            labels: Labels of the whole batch, of shape (B,).
        """
        with NewGradients() as gradients, self.processes.together():
            refuse_batch_statistics(self.model)
            self._require_precision()  # again, because the model may have moved to another device
            batch = self._agree_on_batch(images, labels)
            gradients.collect(self.model.parameters())
            while True:
                try:
                    return self._step(batch, gradients)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    problem = str(error).partition("\n")[0] or type(error).__name__
                gradients.discard()
                self._reduce_memory(problem)

    def _agree_on_batch(self, images: Images | Iterable[Images], labels: Tensor) -> _Batch:
        """Check that all processes have the same labels, and take the random seed of the first process."""
        processes = self.processes
        if processes is not self._same_weights_in:
            processes.copy_from_main(self._all_tensors())
            self._same_weights_in = processes
        if torch.is_inference_mode_enabled():
            raise RunError("LargeBatchStep computes gradients: call it outside of torch.inference_mode().")
        if not isinstance(labels, Tensor):
            raise TypeError(f"labels must be a torch.Tensor, got {type(labels).__name__}: use torch.tensor(labels)")
        number = len(labels)
        if isinstance(images, Tensor | list | tuple):
            if len(images) != number:
                raise ValueError(f"Got {len(images)} images and {number} labels: pass one label per image.")
            images = self.parts(images)
        seed = int(torch.randint(2**62, ()))
        words = processes.gather(seed, number, hash(tuple(labels.flatten().tolist())))
        if any(word[1:] != words[0][1:] for word in words):
            raise ValueError("The processes have different labels: each needs those of the whole batch, in order.")
        sizes = [sum(stop - start for start, stop in self._bounds(number, rank)) for rank in range(processes.number)]
        return _Batch(BufferedParts(images), labels, sizes, seed=words[0][0])

    def _all_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model and the loss, by name."""
        modules = {"model": self.model, **({"loss": self.loss} if isinstance(self.loss, nn.Module) else {})}
        return {
            f"{part}.{name}": tensor
            for part, module in modules.items()
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
        }

    def _step(self, batch: _Batch, gradients: NewGradients) -> StepOutput:
        with self.processes.together():
            if self.chunk_size == "auto":
                self.chunk_size = self._find_chunk_size(batch.parts)
            chunks = self._embed(batch, self.chunk_size)
            graphs = sum(chunk.graph for chunk in chunks)
            embeddings, number, kept = self._gather(chunks, batch.sizes)
            loss, gradient = self._differentiate(embeddings, batch, gradients)
            self._refuse_different_losses(loss)
            if gradient is not None:
                self._backpropagate(chunks, gradient)
            self._return_memory(graphs)
            self.processes.sum_gradients(each for each in gradients.tensors if each.requires_grad)
        return StepOutput(loss, embeddings, number, kept)

    def _embed(self, batch: _Batch, chunk_size: int) -> list[_Chunk]:
        """Stage 1: embed every chunk of this process. The first chunks keep their graphs if these fit."""
        budget = GraphBudget(self._graph_limit, self._model_tensors())
        chunks: list[_Chunk] = []
        rank, expected, read = self.processes.rank, batch.sizes[self.processes.rank], 0
        start = sum(batch.sizes[:rank])
        for images in split(batch.parts, chunk_size):
            seed = derived_seed("chunk", batch.seed, start + read)
            read += len(images)
            if read > expected:
                break
            kept = budget.kept
            with seeded(seed, self._device):
                vectors = budget.run(partial(self._vectors, images), held=images)
            chunks.append(_Chunk(images, seed, vectors, budget.kept - kept))
            self._drop_graphs(chunks, budget)
        if read != expected or not len(batch.labels):
            counts = f"{read}{' or more' if read > expected else ''} images"
            raise ValueError(
                f"Got {counts} and {expected} labels: pass at least one image, and one label per image."
                if self.processes.number == 1
                else f"Process {rank} got {counts}, and embeds {expected} of the {len(batch.labels)} images of the "
                "batch: an iterator must yield the parts that the method `parts` of LargeBatchStep returns."
            )
        return chunks

    def _drop_graphs(self, chunks: list[_Chunk], budget: GraphBudget) -> None:
        """Drop the most recent graphs while they exceed the budget, which depends on the memory that is free now."""
        for chunk in reversed([chunk for chunk in chunks if chunk.graph]):
            if not budget.exceeded:
                return
            chunk.embeddings = chunk.embeddings.detach()
            budget.kept -= chunk.graph
            chunk.graph = 0
            return_freed_memory(self._device)

    def _return_memory(self, graphs: int) -> None:
        """Return freed memory to the system if graphs took much less of it than in earlier steps.

        Doing this in every step would be slow, because the system has to clear the pages of new allocations.
        """
        if graphs < self._most_kept / 2:
            return_freed_memory(self._device)
            self._most_kept = 0
        self._most_kept = max(self._most_kept, graphs)

    def _gather(self, chunks: list[_Chunk], sizes: Sequence[int]) -> tuple[Tensor, int, int]:
        """Return the embeddings of the whole batch, and the number of chunks and of kept graphs in all processes."""
        own = [chunk.embeddings.detach() for chunk in chunks]
        kept = sum(chunk.embeddings.requires_grad for chunk in chunks)
        words = self.processes.gather(
            len(chunks), kept, own[0].shape[-1] if own else 0, bool(own) and own[0].dtype == torch.float64
        )
        _, _, width, is_double = (max(column) for column in zip(*words, strict=True))
        if not own:  # this process does not know what the model returns
            own = [torch.empty(0, width, device=self._device, dtype=torch.float64 if is_double else torch.float32)]
        embeddings = self.processes.gather_rows(torch.cat(own), sizes)
        return embeddings, sum(word[0] for word in words), sum(word[1] for word in words)

    def _differentiate(
        self, embeddings: Tensor, batch: _Batch, gradients: NewGradients
    ) -> tuple[Tensor, Tensor | None]:
        """Stage 2: compute the loss and its gradient with respect to the embeddings, and to its own parameters.

        Only the rows of the gradient that this process backpropagates need be correct. The gradients of the parameters
        of the loss, which all processes compute, are kept in the first process only, because they are summed later.
        """
        leaf = embeddings.clone().requires_grad_()
        share = self.processes.share_queries(leaf, batch.sizes)
        try:
            with (
                torch.enable_grad(),
                torch.autocast(self._device.type, enabled=False),
                seeded(derived_seed("loss", batch.seed), self._device),
                shared_queries(share),
            ):
                loss = self.loss(leaf, batch.labels.to(self._device))
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
                    raise ConfigError(f"The loss must return a tensor with one value, not {found}.")
                if loss.requires_grad:
                    own = [each for each in leaves(loss) if each is not leaf]
                    gradients.collect(own)
                    scaled = loss if self.scaler is None else self.scaler.scale(loss)
                    scaled.backward()  # type: ignore[no-untyped-call]
                    if not self.processes.is_main:
                        for each in own:
                            each.grad = None
        except Exception as error:
            if self.keep_graphs is False and is_out_of_memory(error):
                raise RunError(
                    "Out of memory in the loss, where smaller chunks do not help. Use a smaller batch or another loss."
                ) from error
            raise
        if leaf.grad is None:
            return loss.detach(), None
        start = sum(batch.sizes[: self.processes.rank])
        return loss.detach(), leaf.grad[start : start + batch.sizes[self.processes.rank]]

    def _refuse_different_losses(self, loss: Tensor) -> None:
        """Raise RunError if the processes have computed different losses, because the gradient would be wrong."""
        if self.processes.number == 1:
            return
        words = self.processes.gather(int(loss.double().view(torch.int64)))
        losses = torch.tensor(words).view(torch.float64).flatten()
        other = int((losses - losses[0]).abs().argmax())  # NaN is the largest
        if not torch.allclose(losses[other], losses[0], rtol=1e-3, atol=1e-6, equal_nan=True):
            raise RunError(
                f"The loss is {losses[0]:.6g} in process 0 and {losses[other]:.6g} in process {other}. It must be the "
                "same in all processes: pass a loss that has parameters or a memory as an nn.Module, so that they are "
                "copied from process 0, or seed torch in the same way in all processes. The loss must not depend on "
                "the process, on the time, or on random numbers other than those of torch."
            )

    def _backpropagate(self, chunks: list[_Chunk], gradient: Tensor) -> None:
        """Stage 3: propagate the gradient of the embeddings to the parameters.

        The chunks are processed in order, so that the sum does not depend on which graphs were kept, not even in its
        rounding errors.
        """
        parts = torch.split(gradient, [len(chunk.embeddings) for chunk in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            vectors = chunk.embeddings
            first = vectors.detach()
            with seeded(chunk.seed, self._device), torch.autocast(self._device.type, enabled=False):
                if not vectors.requires_grad:
                    with torch.enable_grad():
                        vectors = self._vectors(chunk.images)
                    self._refuse_different_vectors(vectors.detach(), first)
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

    def _graph_limit(self, kept: int) -> float:
        """Return the number of bytes that graphs may take, if they take `kept` bytes now."""
        if isinstance(self.keep_graphs, bool):
            return math.inf if self.keep_graphs else 0
        if self.keep_graphs != "auto":
            return self.keep_graphs
        return (self._available_memory() + kept) * KEPT_SHARE.get(self._device.type, 0.25)

    def _available_memory(self) -> float:
        """Return the number of bytes that this process may use; the memory of a CPU is shared by its processes."""
        sharing = self.processes.on_this_machine if self._device.type == "cpu" else 1
        return available_memory(self._device) / sharing

    def _model_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that are in memory anyway and do not count towards the size of a graph."""
        return chain(self.model.parameters(), self.model.buffers())

    def _find_chunk_size(self, parts: Iterable[Images]) -> int:
        """Find the chunk size that fits into the memory of every process."""
        return min(size for (size,) in self.processes.gather(self._estimate_chunk_size(parts)))

    def _estimate_chunk_size(self, parts: Iterable[Images]) -> int:
        """Estimate the chunk size whose graph takes half of the free memory, from the graph of one or two images."""
        most = AUTOMATIC_CHUNK.get(self._device.type, 64)
        part = next((part for part in parts if len(part)), None)
        if part is None:
            return most
        sample = part[:2] if isinstance(part, Tensor) else sorted(part, key=Tensor.numel)[-2:]
        with (
            torch.random.fork_rng(cuda_devices(self._device)),
            torch.enable_grad(),
            GraphSize(chain(self._model_tensors(), sample)) as graph,
        ):
            self._vectors(sample)
        fitting = int(self._available_memory() * CHUNK_SHARE * len(sample) / max(graph.bytes, 1))
        return max(1, min(fitting, most))

    def _reduce_memory(self, problem: str) -> None:
        """Reduce the memory of the next attempt, with a warning: first keep no graphs, then halve the chunks."""
        if self.chunk_size != "auto" and self.keep_graphs is not False:
            self.keep_graphs = False
            remedy = "graphs are no longer kept"
        elif self.chunk_size == 1:
            text = f"Out of memory with chunks of one image. Use smaller images or a smaller model. ({problem})"
            raise in_all_processes(RunError(text))
        else:
            self.chunk_size = 1 if self.chunk_size == "auto" else self.chunk_size // 2
            remedy = f"chunk_size is now {self.chunk_size}"
        if self.processes.is_main:
            text = f"Out of memory; {remedy}, and the step is repeated. ({problem})"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _refuse_different_vectors(self, second: Tensor, first: Tensor) -> None:
        """Raise ModelError if the vectors of the second pass differ from those of the first."""
        tolerance = 1e-3 if self.autocast is None else 5e-2
        largest, difference = first.abs().max(), (second - first).abs().max()
        if largest.isfinite() and not difference <= tolerance * largest:
            raise ModelError(
                "The model returned different vectors for the same images in the second pass (they differ by "
                f"{difference.item():.1e}, the largest value is {largest.item():.1e}), so the gradient would be wrong. "
                "Its forward pass must take its random numbers from torch and must not depend on earlier calls, and "
                "the images must not be modified. Alternatively, set `keep_graphs=True`, which embeds every image once."
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
