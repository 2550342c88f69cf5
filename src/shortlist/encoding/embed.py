"""Images to embeddings: in memory, or in a file where they are many."""

from __future__ import annotations

import hashlib
import json
import os
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
from shortlist.model import EmbedderConfig
from shortlist.search.vectors import Progress

_PLAIN = (int, float, str, tuple, EmbedderConfig)  # settings of a module that are not in its tensors
PIXELS = 64 * 256**2  # at once, of images that keep their shapes: 64 small ones, 5 of 1024 x 768


class NotFinite(RunError):  # noqa: N818 - says what the embeddings are
    """The embedder gives vectors that are not finite."""


class NothingReadable(DataError):  # noqa: N818 - says what the images are
    """Not one of the images can be read."""


def embed_images(
    embedder: nn.Module,
    catalog: Catalog,
    transform: Transform,
    *,
    batch_size: int = 64,
    workers: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """Embeddings of all images of a catalog in their order, (n, d) float32 in the CPU's memory.

    Args:
        embedder: works in evaluation mode here, and is put back into the mode it was in.
        catalog: the images.
        transform: makes squares of them, or lets them keep their shapes.
        batch_size: images at a time; of those that keep their shapes, fewer at once where they are large.
        workers: processes that decode.
        progress: called with the number done and the number in all.
    """
    vectors: list[Tensor] = []
    done = 0
    for found in _embedded(embedder, catalog, transform, _batches(0, len(catalog), batch_size), workers):
        vectors.append(found)
        done += len(found)
        if progress is not None:
            progress(done, len(catalog))
    return torch.cat(vectors)  # outside inference mode, so that autograd may use them


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
    """Embeddings of all images of a catalog in a .npy file, (n, d), for `open_vectors`; only a batch is in memory.

    A file that is there already, of the same images and weights, is left as it is; one that was begun is gone on with.
    An image is the same while its file has the same size and the same time of the last change.
    Which images were left out is in a note beside it, PATH.json.

    Args:
        embedder: as of `embed_images`.
        catalog: the images.
        transform: as of `embed_images`.
        path: of the file; its folder is made.
        dtype: of the numbers in it.
        on_missing: "skip" leaves out images that cannot be read; "error" does not.
        batch_size: images at a time.
        workers: processes that decode.
        progress: called with the number done and the number in all.

    Raises:
        DataError: an image cannot be read (and "error").
        NothingReadable: no image can.
        RunError: another process is writing the file.
        NotFinite: the embeddings are not finite.
    """
    path = Path(path)
    file = VectorFile(path, _digest(embedder, catalog, transform, dtype), dtype)
    if file.done:
        return path
    with exclusive_write(path), file:
        while file.seen < len(catalog):
            _go_on(file, embedder, catalog, transform, on_missing, batch_size, workers, progress)
        if not file.rows:
            raise NothingReadable(f"{catalog.name}: none of its {len(catalog)} images can be read")
        file.finish()
    return path


def encode_to_file(
    encoder: Encoder, catalog: Catalog, path: Path, *, workers: int = 0, progress: Progress | None = None
) -> Path:
    """`embed_to_file` as a encoder says, in full precision; what cannot be read is left out."""
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


def _go_on(
    file: VectorFile,
    embedder: nn.Module,
    catalog: Catalog,
    transform: Transform,
    on_missing: str,
    batch_size: int,
    workers: int,
    progress: Progress | None,
) -> None:
    """Write on, to the end or to an image that cannot be read, which is then left out."""
    first, *rest = batches = _batches(file.seen, len(catalog), batch_size)
    bad = set(file.left_out)
    left = [index for index in first if str(catalog.file(index)) not in bad]
    if not left:
        file.seen = first[-1] + 1
        return
    try:
        for batch, found in zip(batches, _embedded(embedder, catalog, transform, [left, *rest], workers), strict=True):
            _append(file, found, seen=batch[-1] + 1)
            if progress is not None:
                progress(file.seen, len(catalog))
    except ImageError as error:
        if on_missing != "skip":
            raise DataError(f'{error}. Leave such images out with `on_missing="skip"`') from error
        if str(error.path) not in bad:  # it may be listed twice
            file.left_out.append(str(error.path))


def _append(file: VectorFile, vectors: Tensor, seen: int) -> None:
    with np.errstate(over="ignore"):  # which is told below
        numbers = vectors.numpy().astype(file.dtype)
    if not np.isfinite(numbers).all():
        raise NotFinite(f"Embeddings for {file.path} are not finite, or too large for {file.dtype}.")
    file.append(numbers, seen)


def _batches(first: int, number: int, size: int) -> list[Sequence[int]]:
    return [range(start, min(start + size, number)) for start in range(first, number, size)]


def _embedded(
    embedder: nn.Module, catalog: Catalog, transform: Transform, batches: Iterable[Sequence[int]], workers: int
) -> Iterator[Tensor]:
    """The embeddings of each batch of images, float32 in the CPU's memory."""
    device = next(embedder.parameters()).device
    keys = ([(0, index) for index in batch] for batch in tuple(batches))
    training = embedder.training
    embedder.eval()
    try:
        for images in image_chunks(ImageDataset(catalog, transform), keys, workers, pin_memory=device.type == "cuda"):
            with torch.inference_mode():
                found = by_size(lambda same: embedder(same.to(device, non_blocking=True)), images, PIXELS)
            yield found.float().cpu()
    finally:
        embedder.train(training)


def _digest(embedder: nn.Module, catalog: Catalog, transform: Transform, dtype: DTypeLike) -> str:
    """SHA-256 of all that the vectors depend on: images, transform, weights, and the modules' plain settings."""
    digest = hashlib.sha256(f"{catalog.fingerprint()} {transform} {np.dtype(dtype)}".encode())
    digest.update(json.dumps([stamp(catalog.file(index)) for index in range(len(catalog))]).encode())
    for name, module in embedder.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
        del plain["training"]
        digest.update(f"{name} {type(module).__name__} {sorted(plain.items())}".encode())
    kept = embedder.state_dict()  # buffers that are not saved, such as an embedder's mean, count as well
    for name, tensor in {**kept, **dict(embedder.named_buffers())}.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stamp(file: Path) -> tuple[int, int] | None:
    """Size and time of the last change; None where there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def absolute(path: Path | str) -> str:
    """The path without "." and "..", which pathlib leaves in place; symbolic links are not resolved."""
    return os.path.abspath(Path(path).expanduser())  # noqa: PTH100
