"""Embed all images of a catalog, in memory or in a file, with all processes that a launcher has started."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor, nn

from shortlist.batches.by_size import by_size
from shortlist.data import Catalog, ImageDataset, ImageError, Transform, image_chunks
from shortlist.data.loader import decoding_workers
from shortlist.digests import tensors_digest
from shortlist.distributed import Processes, current_processes
from shortlist.encoding.vector_file import VectorFile
from shortlist.errors import DataError, RunError
from shortlist.files import exclusive_write
from shortlist.locations import size_and_mtime
from shortlist.model import EmbedderConfig
from shortlist.progress import Progress

MAX_PIXELS = 64 * 256**2  # per forward pass of images of different sizes: 64 small images, or 5 of 1024 x 768
MAX_BATCHES = 4  # maximum number of batches per process between two exchanges of vectors
_SETTING_TYPES = (int, float, str, tuple, EmbedderConfig)  # settings of a module that are not in its tensors


class NonFiniteError(RunError):
    """The embedder computes vectors that are not finite."""


class NoReadableImageError(DataError):
    """None of the images can be read.

    Args:
        name: Name of the images.
        left_out: Their paths, and the reasons.
    """

    def __init__(self, name: str, left_out: dict[str, str]) -> None:
        path, reason = next(iter(left_out.items()))
        super().__init__(f"{name}: none of its {len(left_out):,} images can be read (first: {path}: {reason})")
        self.left_out = left_out


def embed_images(
    embedder: nn.Module,
    catalog: Catalog,
    transform: Transform,
    *,
    batch_size: int = 32,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Embed all images of a catalog and keep the embeddings in memory.

    Args:
        embedder: Module that maps uint8 images (B, 3, H, W) to vectors (B, d). It is switched to evaluation mode, and
            back to its previous mode at the end.
        catalog: The images.
        transform: Either makes all images squares of one size, or keeps their aspect ratios.
        batch_size: Number of images per batch. Large images of different sizes are embedded in smaller groups.
        workers: Number of processes that decode images. Default: chosen by the number of cores and images.
        progress: Called with the number of images done and the total number.

    Returns:
        Embeddings in the order of the catalog, (n, d) float32 on the CPU.
    """
    job = _Job(embedder, ImageDataset(catalog, transform), _batches(0, len(catalog), batch_size), workers)
    vectors: list[Tensor] = []
    with job.shared() as rounds:
        for each in rounds:
            vectors.append(each.vectors)
            if progress is not None:
                progress(each.seen, len(catalog))
    return torch.cat(vectors)  # outside inference mode, so that autograd can use the result


def embed_to_file(
    embedder: nn.Module,
    catalog: Catalog,
    transform: Transform,
    path: Path | str,
    *,
    dtype: DTypeLike = np.float16,
    on_missing: str = "error",
    batch_size: int = 32,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Embed all images of a catalog and write the embeddings to a .npy file (n, d), for `open_vectors`.

    Only a few batches are held in memory. If the file already holds the vectors of the same images and weights, it is
    kept as it is; an interrupted file is resumed. An image counts as the same as long as its file has the same size
    and modification time. The images that were left out are listed in PATH.json.

    Args:
        embedder: See `embed_images`.
        catalog: The images.
        transform: See `embed_images`.
        path: Path of the file. Its folder is created.
        dtype: Data type of the vectors in the file.
        on_missing: What to do with images that cannot be read: "skip" leaves them out, "error" raises an error.
        batch_size: Number of images per batch.
        workers: Number of processes that decode images. Default: chosen by the number of cores and images.
        progress: Called with the number of images done and the total number.

    Returns:
        Path of the file.

    Raises:
        DataError: An image cannot be read and `on_missing` is "error".
        NoReadableImageError: None of the images can be read.
        RunError: Another process is writing the file.
        NonFiniteError: The embeddings are not finite.
    """
    file = VectorFile(Path(path), digest(embedder, catalog, transform, dtype), dtype)
    return embed_dataset(
        embedder,
        ImageDataset(catalog, transform),
        file,
        on_missing=on_missing,
        batch_size=batch_size,
        workers=workers,
        progress=progress,
    )


def embed_dataset(
    embedder: nn.Module,
    dataset: ImageDataset,
    file: VectorFile,
    *,
    on_missing: str = "error",
    batch_size: int = 32,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Embed a dataset and write the vectors of all views of an image into one row: (n, views * d).

    See `embed_to_file`; `batch_size` counts images, and the digest of `file` determines which vectors can be reused.
    """
    path = file.path
    if file.done:
        with suppress(OSError):
            file.part_note.unlink()  # no longer needed; exists only if an earlier call failed to delete it
        return path
    with exclusive_write(path), file:
        append_embeddings(embedder, dataset, file, on_missing, batch_size, workers, progress)
        if not file.note.rows:
            raise NoReadableImageError(dataset.catalog.name, file.note.left_out)
        file.finish()
    return path


def append_embeddings(
    embedder: nn.Module,
    dataset: ImageDataset,
    file: VectorFile,
    on_missing: str,
    batch_size: int,
    workers: int | None,
    progress: Progress | None,
) -> None:
    """Embed the images that an open file does not have yet; see `embed_dataset`."""
    catalog = dataset.catalog
    job = _Job(embedder, dataset, _batches(file.note.seen, len(catalog), batch_size), workers, on_missing == "skip")
    try:
        with job.shared() as rounds:
            for each in rounds:
                file.leave_out({str(catalog.file(index)): _reason(dataset, index) for index in each.unreadable})
                _append(file, each.vectors, seen=each.seen)
                if progress is not None:
                    progress(file.note.seen, len(catalog))
    except ImageError as error:
        raise DataError(f'{error}. Leave such images out with `on_missing="skip"`.') from error


def _reason(dataset: ImageDataset, index: int) -> str:
    """Return why an image cannot be read, by trying again: the first attempt may have been in another process."""
    try:
        dataset[0, index]
    except ImageError as error:
        return error.reason
    return "it could not be read at first, but could be read later"


def write_embeddings(
    vectors: Tensor, embedder: nn.Module, catalog: Catalog, transform: Transform, path: Path | str
) -> Path:
    """Write float32 vectors that are already known to the file that `embed_to_file` would write for these arguments."""
    file = VectorFile(Path(path), digest(embedder, catalog, transform, np.float32), np.float32)
    if not file.done:
        with exclusive_write(file.path), file:
            _append(file, vectors[file.note.rows :], seen=len(catalog))
            file.finish()
    return file.path


@dataclass(frozen=True)
class _Round:
    """Vectors that the processes have embedded between two exchanges.

    Args:
        seen: Number of images of the catalog up to the last one of this round.
        vectors: Vectors of the readable images, in the order of the catalog.
        unreadable: Indices of the unreadable images.
    """

    seen: int
    vectors: Tensor
    unreadable: list[int]


@dataclass(frozen=True)
class _Job:
    """Embedding of batches of catalog indices by all processes. Each batch is embedded by a single process."""

    embedder: nn.Module
    dataset: ImageDataset
    batches: list[Sequence[int]]
    workers: int | None
    skips: bool = False  # skip unreadable images instead of raising an ImageError

    @contextmanager
    def shared(self) -> Iterator[Iterator[_Round]]:
        """Let all processes work on this job, and yield the rounds."""
        with current_processes().all_working(self) as processes:
            yield self.rounds(processes)

    def __call__(self, processes: Processes) -> None:
        for _ in self.rounds(processes):
            pass

    def rounds(self, processes: Processes) -> Iterator[_Round]:
        """Yield the vectors of all processes; each embeds a block of consecutive batches in each round."""
        number = processes.number
        size = 1 if number == 1 else min(MAX_BATCHES, math.ceil(len(self.batches) / number))
        starts = range(0, len(self.batches), max(size, 1))
        blocks = [self.batches[start : start + size] for start in starts]
        workers = self.workers
        if workers is None:
            workers = decoding_workers(sum(map(len, self.batches)), processes.on_this_machine)
        own = self._embed([batch for block in blocks[processes.rank :: number] for batch in block], workers)
        for start in range(0, len(blocks), number):
            now = blocks[start : start + number]
            found = list(islice(own, len(now[processes.rank]))) if processes.rank < len(now) else []
            vectors = [each for each, _ in found if len(each)]
            unreadable = [index for _, indices in found for index in indices]
            yield _Round(now[-1][-1][-1] + 1, *_gather(processes, vectors, unreadable))

    def _embed(self, batches: list[Sequence[int]], workers: int) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the vectors of the readable images of each batch, and the indices of the others."""
        done, unreadable = 0, list[int]()  # number of finished batches; unreadable images of the next batch
        while done < len(batches):
            readable = [index for index in batches[done] if index not in unreadable]
            later = batches[done + 1 :]
            try:
                if not readable:
                    yield torch.empty(0), unreadable
                    done, unreadable = done + 1, []
                    continue
                for vectors in _iterate_embeddings(self.embedder, self.dataset, [readable, *later], workers):
                    yield vectors, unreadable
                    done, unreadable = done + 1, []
            except ImageError as error:
                if not self.skips:
                    raise
                file = self.dataset.catalog.file
                unreadable += [index for index in batches[done] if str(file(index)) == str(error.path)]


def _gather(processes: Processes, vectors: list[Tensor], unreadable: list[int]) -> tuple[Tensor, list[int]]:
    """Concatenate vectors (n, d), and the indices of unreadable images, of all processes."""
    rows, dimensions = sum(map(len, vectors)), vectors[0].shape[1] if vectors else 0
    counts = processes.gather(rows, dimensions, len(unreadable))
    own = torch.cat([torch.empty(0, max(each[1] for each in counts)), *vectors])
    gathered = processes.gather_rows(own, [each[0] for each in counts])
    if any(each[2] for each in counts):
        indices = torch.tensor(unreadable, dtype=torch.int64).reshape(-1, 1)
        unreadable = processes.gather_rows(indices, [each[2] for each in counts]).flatten().tolist()
    return gathered, unreadable


def _append(file: VectorFile, vectors: Tensor, seen: int) -> None:
    with np.errstate(over="ignore"):  # an overflow is reported as an error below
        converted = vectors.numpy().astype(file.dtype)
    if not np.isfinite(converted).all():
        raise NonFiniteError(f"Embeddings for {file.path} are not finite, or too large for {file.dtype}.")
    file.append(converted, seen)


def _batches(first: int, number: int, size: int) -> list[Sequence[int]]:
    return [range(start, min(start + size, number)) for start in range(first, number, size)]


def _iterate_embeddings(
    embedder: nn.Module, dataset: ImageDataset, batches: Iterable[Sequence[int]], workers: int
) -> Iterator[Tensor]:
    """Yield the embeddings of each batch of catalog indices, (n, views * d) float32 on the CPU."""
    device = next(embedder.parameters()).device
    keys = ([(view, index) for index in batch for view in range(dataset.views)] for batch in tuple(batches))
    training = embedder.training
    embedder.eval()
    try:
        for images in image_chunks(dataset, keys, workers, pin_memory=device.type == "cuda"):
            with torch.inference_mode():
                vectors = by_size(lambda same: embedder(same.to(device, non_blocking=True)), images, MAX_PIXELS)
            yield vectors.float().cpu().reshape(len(images) // dataset.views, -1)
    finally:
        embedder.train(training)


def digest(embedder: nn.Module, catalog: Catalog, transform: Transform, dtype: DTypeLike) -> str:
    """Compute the SHA-256 of everything that determines the vectors of a catalog: the images and the network."""
    return combined_digest(network_digest(embedder, transform, dtype), catalog)


def combined_digest(network: str, catalog: Catalog) -> str:
    """Compute `digest` from the digest of the network."""
    result = hashlib.sha256(f"{network} {catalog.fingerprint()}".encode())
    result.update(json.dumps([size_and_mtime(catalog.file(index)) for index in range(len(catalog))]).encode())
    return result.hexdigest()


def network_digest(embedder: nn.Module, transform: Transform, dtype: DTypeLike) -> str:
    """Compute the SHA-256 of everything that determines the vector of an image: transform, weights, module settings."""
    result = hashlib.sha256(f"{transform} {np.dtype(dtype)}".encode())
    for name, module in embedder.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, _SETTING_TYPES)}
        del settings["training"]
        result.update(f"{name} {type(module).__name__} {sorted(settings.items())}".encode())
    tensors = {**embedder.state_dict(), **dict(embedder.named_buffers())}  # including buffers that are not saved
    result.update(tensors_digest(tensors).encode())
    return result.hexdigest()
