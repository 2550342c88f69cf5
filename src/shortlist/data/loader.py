"""Load chunks of images, decoded in worker processes while the network computes."""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shortlist.data.images import ImageDataset, Key
from shortlist.errors import ConfigError, DataError, ShortlistError

MAX_PER_CORE = 8  # workers; more than one per core help if the images are in an object store, which they wait for


def process_context() -> multiprocessing.context.BaseContext:
    """Return the multiprocessing context for worker processes: "forkserver", or "spawn" on Windows.

    A plain fork can deadlock if another thread holds a lock. The fork server imports torch once, so that the processes
    forked from it start immediately. It does not import the user's script, which would run again if it has no
    `if __name__ == "__main__":`.
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # Workers inherit a blocked SIGINT. Otherwise Ctrl-C during their start would end them before they can ignore it.
    multiprocessing.resource_tracker.ensure_running()  # first, because it unblocks SIGINT itself
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def decoding_workers(images: int | None = None, sharing: int = 1) -> int:
    """Return the default number of workers for this many images, or for a whole run.

    One less than the number of cores, at most 8, and at most one per 256 images, since a worker takes time to start.

    Args:
        images: Number of images; None: a whole run.
        sharing: Number of processes that share the cores, each with workers of its own.
    """
    number = max(0, min(8, (os.cpu_count() or 1) // sharing - 1))
    return number if images is None else min(number, images // 256)


def bounded_workers(number: int) -> int:
    """Return a number of workers, at most `MAX_PER_CORE` times the number of cores, and warn if it was larger."""
    cores = os.cpu_count() or 1
    most = MAX_PER_CORE * cores
    if number > most:
        warnings.warn(
            f"This machine has {cores} cores, so {most} processes decode images instead of {number}.", stacklevel=2
        )
    return min(number, most)


def image_chunks(
    dataset: ImageDataset,
    keys: Iterable[Sequence[Key]],
    workers: int = 0,
    *,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> Iterator[Tensor | list[Tensor]]:
    """Load images in chunks, one chunk per list of keys, in the order of the lists.

    Worker processes start with the first chunk and end with the iterator, so pass all lists of an epoch or a run to one
    call.

    Args:
        dataset: Dataset that the keys (epoch, index) refer to.
        keys: One list of keys per chunk. It is read only slightly ahead, so it may be long or infinite.
        workers: Number of worker processes; 0 decodes in the calling process. The pixels do not depend on it. At most
            `MAX_PER_CORE` per core are started.
        prefetch: Number of chunks that each worker loads in advance.
        pin_memory: Whether to return chunks in page-locked memory, for faster copies to a GPU.

    Yields:
        uint8 tensors (len(list), 3, size, size), or lists of tensors (3, H, W) if the dataset's transform keeps the
        aspect ratio of images.

    Raises:
        ImageError: If an image cannot be read. It is raised in the calling process, even if it occurred in a worker.
        DataError: If a worker was killed or could not be started.
        ConfigError: If `workers` is negative.
    """
    if workers < 0:
        raise ConfigError(f"`workers` must be 0 or more, not {workers}.")
    chunks = _ChunkDataset(dataset)
    if workers == 0:
        loaded: Iterable[_Chunk | ShortlistError] = (chunks[chunk] for chunk in keys)
    else:
        loaded = _load_in_workers(chunks, keys, bounded_workers(workers), prefetch, pin_memory)
    for chunk in loaded:
        if isinstance(chunk, ShortlistError):
            raise chunk
        yield (chunk.pin_memory() if pin_memory else chunk).images()


@dataclass(frozen=True)
class _Chunk:
    """Images in one block of memory, so that only one tensor is sent between processes and pinned."""

    pixels: Tensor  # (n, 3, size, size), or the flattened pixels of all images
    sizes: list[tuple[int, int]] | None  # height and width of each image; None if `pixels` is (n, 3, size, size)

    def pin_memory(self) -> _Chunk:
        """Return the chunk in page-locked memory; DataLoader calls this method as well."""
        return self if self.pixels.is_pinned() else replace(self, pixels=self.pixels.pin_memory())

    def images(self) -> Tensor | list[Tensor]:
        if self.sizes is None:
            return self.pixels
        parts = torch.split(self.pixels, [3 * height * width for height, width in self.sizes])
        return [part.view(3, *size) for part, size in zip(parts, self.sizes, strict=True)]


class _ChunkDataset(Dataset[_Chunk | ShortlistError]):
    """Dataset that maps a list of keys to a chunk.

    A ShortlistError is returned instead of raised, because DataLoader would convert an exception to a traceback text.
    """

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, keys: Sequence[Key]) -> _Chunk | ShortlistError:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about damaged metadata, which is not used
                size = self.dataset.transform.size
                return self._load_any_size(keys) if size is None else self._load_squares(keys, size)
        except ShortlistError as error:
            return error.with_traceback(None)

    def _load_squares(self, keys: Sequence[Key], size: int) -> _Chunk:
        images = torch.empty((len(keys), 3, size, size), dtype=torch.uint8)
        for image, key in zip(images.numpy(), keys, strict=True):
            image[:] = self.dataset[key].numpy()  # NumPy copies in one thread; torch would wake up all its threads
        return _Chunk(images, None)

    def _load_any_size(self, keys: Sequence[Key]) -> _Chunk:
        images = [self.dataset[key].numpy() for key in keys]
        pixels = np.concatenate([np.empty(0, dtype=np.uint8), *(image.ravel() for image in images)])
        return _Chunk(torch.from_numpy(pixels), [image.shape[1:] for image in images])


def _load_in_workers(
    chunks: _ChunkDataset, keys: Iterable[Sequence[Key]], workers: int, prefetch: int, pin_memory: bool
) -> Iterator[_Chunk | ShortlistError]:
    loader: DataLoader[_Chunk | ShortlistError] = DataLoader(
        chunks,
        sampler=keys,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pin_memory,
        multiprocessing_context=process_context(),
        worker_init_fn=_start,
        generator=torch.Generator(),  # the default would draw from, and change, the global random state
    )
    needs_script = b"__main__" in pickle.dumps(chunks)  # such as for a transform defined in the user's script
    try:
        with nullcontext() if needs_script else _script_hidden():
            loading = iter(loader)  # starts the processes
        yield from loading
    except (ConnectionError, EOFError, RuntimeError) as error:
        detail = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in detail:  # an exception in a worker
            raise
        cause = _NEEDS_GUARD if needs_script else "often because memory ran out. Use fewer workers"
        raise DataError(
            f"A worker process that decodes images has ended, {cause}; or decode without workers, with `workers=0` "
            f"({detail})."
        ) from error


_NEEDS_GUARD = (
    "perhaps because it imports the script that defines its transform or dataset. Such a script must run under "
    '`if __name__ == "__main__":`'
)


@contextmanager
def _script_hidden() -> Iterator[None]:
    """Keep processes that are started in the `with` block from importing the running script.

    multiprocessing imports it in every process, so that objects defined in the script can be unpickled. A script
    without `if __name__ == "__main__":` would then run again in each process.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    before = {name: main[name] for name in main.keys() & {"__spec__", "__file__"}}
    main.update(dict.fromkeys(before))
    try:
        yield
    finally:
        main.update(before)


def _start(worker: int) -> None:
    """Initialise a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which then ends its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait for the parent to end, then exit.

    A parent that is killed cannot end its workers, and torch only watches the fork server, which does not end before
    its workers.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
