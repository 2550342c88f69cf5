"""Embedding all images of a catalog, in memory or in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor, nn

from shortlist.batches.sizes import by_size
from shortlist.data import Catalog, ImageDataset, ImageError, Transform, image_chunks
from shortlist.encoding.encoder import Encoder
from shortlist.encoding.vector_file import VectorFile
from shortlist.errors import DataError, RunError
from shortlist.files import exclusive_write
from shortlist.locations import size_and_mtime
from shortlist.model import EmbedderConfig
from shortlist.progress import Progress

MAX_PIXELS = 64 * 256**2  # per forward pass of images of different sizes: 64 small images, or 5 of 1024 x 768
_SETTING_TYPES = (int, float, str, tuple, EmbedderConfig)  # settings of a module that are not in its tensors


class NonFiniteError(RunError):
    """The embedder computes vectors that are not finite."""


class NoReadableImageError(DataError):
    """None of the images can be read."""


def embed_images(
    embedder: nn.Module,
    catalog: Catalog,
    transform: Transform,
    *,
    batch_size: int = 64,
    workers: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """Embed all images of a catalog and keep the embeddings in memory.

    Args:
        embedder: Module that maps uint8 images (B, 3, H, W) to vectors (B, d). It is switched to evaluation mode, and
            back to its previous mode at the end.
        catalog: The images.
        transform: Either makes all images squares of one size, or keeps their aspect ratios.
        batch_size: Number of images per batch. Large images of different sizes are embedded in smaller groups.
        workers: Number of processes that decode images.
        progress: Called with the number of images done and the total number.

    Returns:
        Embeddings in the order of the catalog, (n, d) float32 on the CPU.
    """
    vectors: list[Tensor] = []
    done = 0
    dataset = ImageDataset(catalog, transform)
    for batch in _iterate_embeddings(embedder, dataset, _batches(0, len(catalog), batch_size), workers):
        vectors.append(batch)
        done += len(batch)
        if progress is not None:
            progress(done, len(catalog))
    return torch.cat(vectors)  # outside inference mode, so that autograd can use the result


def embed_to_file(
    embedder: nn.Module,
    catalog: Catalog,
    transform: Transform,
    path: Path | str,
    *,
    dtype: DTypeLike = np.float16,
    on_missing: str = "error",
    batch_size: int = 64,
    workers: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Embed all images of a catalog and write the embeddings to a .npy file (n, d), for `open_vectors`.

    Only one batch is held in memory. If the file already holds the vectors of the same images and weights, it is kept
    as it is; an interrupted file is resumed. An image counts as the same as long as its file has the same size and
    modification time. The images that were left out are listed in PATH.json.

    Args:
        embedder: See `embed_images`.
        catalog: The images.
        transform: See `embed_images`.
        path: Path of the file. Its folder is created.
        dtype: Data type of the vectors in the file.
        on_missing: What to do with images that cannot be read: "skip" leaves them out, "error" raises an error.
        batch_size: Number of images per batch.
        workers: Number of processes that decode images.
        progress: Called with the number of images done and the total number.

    Returns:
        Path of the file.

    Raises:
        DataError: An image cannot be read and `on_missing` is "error".
        NoReadableImageError: None of the images can be read.
        RunError: Another process is writing the file.
        NonFiniteError: The embeddings are not finite.
    """
    file = VectorFile(Path(path), _digest(embedder, catalog, transform, dtype), dtype)
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
    batch_size: int = 64,
    workers: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Embed a dataset and write the vectors of all views of an image into one row: (n, views * d).

    See `embed_to_file`; `batch_size` counts images, and the digest of `file` determines which vectors can be reused.
    """
    path, catalog = file.path, dataset.catalog
    if file.done:
        return path
    with exclusive_write(path), file:
        while file.seen < len(catalog):
            _embed_up_to_unreadable(file, embedder, dataset, on_missing, batch_size, workers, progress)
        if not file.rows:
            raise NoReadableImageError(f"{catalog.name}: none of its {len(catalog)} images can be read")
        file.finish()
    return path


def write_embeddings(
    vectors: Tensor, embedder: nn.Module, catalog: Catalog, transform: Transform, path: Path | str
) -> Path:
    """Write float32 vectors that are already known to the file that `embed_to_file` would write for these arguments."""
    file = VectorFile(Path(path), _digest(embedder, catalog, transform, np.float32), np.float32)
    if not file.done:
        with exclusive_write(file.path), file:
            _append(file, vectors[file.rows :], seen=len(catalog))
            file.finish()
    return file.path


def encode_to_file(
    encoder: Encoder, catalog: Catalog, path: Path, *, workers: int = 0, progress: Progress | None = None
) -> Path:
    """Call `embed_to_file` with an encoder's settings, in float32, leaving out images that cannot be read."""
    return embed_to_file(
        encoder.network,
        catalog,
        encoder.transform,
        path,
        dtype=np.float32,
        on_missing="skip",
        batch_size=encoder.batch_size,
        workers=workers,
        progress=progress,
    )


def _embed_up_to_unreadable(
    file: VectorFile,
    embedder: nn.Module,
    dataset: ImageDataset,
    on_missing: str,
    batch_size: int,
    workers: int,
    progress: Progress | None,
) -> None:
    """Append embeddings up to the end of the catalog, or up to an unreadable image, which is noted as left out."""
    catalog = dataset.catalog
    first, *rest = batches = _batches(file.seen, len(catalog), batch_size)
    unreadable = set(file.left_out)
    readable = [index for index in first if str(catalog.file(index)) not in unreadable]
    if not readable:
        file.seen = first[-1] + 1
        return
    embeddings = _iterate_embeddings(embedder, dataset, [readable, *rest], workers)
    try:
        for batch, vectors in zip(batches, embeddings, strict=True):
            _append(file, vectors, seen=batch[-1] + 1)
            if progress is not None:
                progress(file.seen, len(catalog))
    except ImageError as error:
        if on_missing != "skip":
            raise DataError(f'{error}. Leave such images out with `on_missing="skip"`') from error
        if str(error.path) not in unreadable:  # a catalog may list an image twice
            file.left_out.append(str(error.path))


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


def _digest(embedder: nn.Module, catalog: Catalog, transform: Transform, dtype: DTypeLike) -> str:
    """Compute the SHA-256 of everything that determines the vectors: images, transform, weights, module settings."""
    digest = hashlib.sha256(f"{catalog.fingerprint()} {transform} {np.dtype(dtype)}".encode())
    digest.update(json.dumps([size_and_mtime(catalog.file(index)) for index in range(len(catalog))]).encode())
    for name, module in embedder.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, _SETTING_TYPES)}
        del settings["training"]
        digest.update(f"{name} {type(module).__name__} {sorted(settings.items())}".encode())
    tensors = {**embedder.state_dict(), **dict(embedder.named_buffers())}  # with buffers that are not saved
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
