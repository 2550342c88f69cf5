"""Many images at a time, decoded by other processes while the network works."""

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


def process_context() -> multiprocessing.context.BaseContext:
    """How to start processes: not by fork, which hangs where a thread of ours holds a lock, but from a server.

    The server imports torch once, so that each process forked from it starts at once. It does not import the user's
    script, which would run again where it has no `if __name__ == "__main__":`.
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # Workers inherit a blocked SIGINT, or a Ctrl-C while they start would end them before they can ignore it.
    multiprocessing.resource_tracker.ensure_running()  # first: it unblocks SIGINT itself
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def decoding_workers(images: int) -> int:
    """Processes for so many images: one less than there are cores, at most 8; none for a few, which need no start."""
    return max(0, min(8, (os.cpu_count() or 1) - 1, images // 256))


def image_chunks(
    dataset: ImageDataset,
    keys: Iterable[Sequence[Key]],
    workers: int = 0,
    *,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> Iterator[Tensor | list[Tensor]]:
    """Decoded images, a chunk for each list of keys, in the order of the lists.

    Worker processes start when the first chunk is asked for and end with the iterator: give it all lists of an epoch or
    of a run.

    Args:
        dataset: what the keys (epoch, index) belong to.
        keys: one list a chunk; read only a little ahead, so it may be long or endless.
        workers: processes that decode; 0 decodes in this one. The pixels are the same.
        prefetch: chunks that each worker may be ahead.
        pin_memory: for a GPU: chunks arrive in page-locked memory.

    Returns:
        Iterator of uint8 tensors (len(list), 3, size, size), or of lists of tensors (3, H, W) where the dataset's
        transform lets images keep their shapes.

    Raises:
        ImageError: an image cannot be read; in this process, whoever found it.
        DataError: a worker was killed or could not be started.
    """
    if workers < 0:
        raise ConfigError(f"`workers` must be 0 or more, not {workers}")
    chunks = _Chunks(dataset)
    if workers == 0:
        loaded: Iterable[_Chunk | ShortlistError] = (chunks[chunk] for chunk in keys)
    else:
        loaded = _from_workers(chunks, keys, workers, prefetch, pin_memory)
    for chunk in loaded:
        if isinstance(chunk, ShortlistError):
            raise chunk
        yield (chunk.pin_memory() if pin_memory else chunk).images()


@dataclass(frozen=True)
class _Chunk:
    """Images in one block of memory, which is all that has to go from one process to another, or to be pinned."""

    pixels: Tensor
    sizes: list[tuple[int, int]] | None  # height and width of each; None where `pixels` is (n, 3, size, size)

    def pin_memory(self) -> _Chunk:
        """Also what a DataLoader calls."""
        return self if self.pixels.is_pinned() else replace(self, pixels=self.pixels.pin_memory())

    def images(self) -> Tensor | list[Tensor]:
        if self.sizes is None:
            return self.pixels
        parts = torch.split(self.pixels, [3 * height * width for height, width in self.sizes])
        return [part.view(3, *size) for part, size in zip(parts, self.sizes, strict=True)]


class _Chunks(Dataset[_Chunk | ShortlistError]):
    """A chunk for a list of keys. Errors of ours are returned: raised in a worker, they would arrive as a traceback."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, keys: Sequence[Key]) -> _Chunk | ShortlistError:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, about damaged metadata, which we do not need
                size = self.dataset.transform.size
                return self._different(keys) if size is None else self._squares(keys, size)
        except ShortlistError as error:
            return error.with_traceback(None)

    def _squares(self, keys: Sequence[Key], size: int) -> _Chunk:
        images = torch.empty((len(keys), 3, size, size), dtype=torch.uint8)
        for image, key in zip(images.numpy(), keys, strict=True):
            image[:] = self.dataset[key].numpy()  # torch would wake all its threads for each copy
        return _Chunk(images, None)

    def _different(self, keys: Sequence[Key]) -> _Chunk:
        images = [self.dataset[key].numpy() for key in keys]
        pixels = np.concatenate([np.empty(0, dtype=np.uint8), *(image.ravel() for image in images)])
        return _Chunk(torch.from_numpy(pixels), [image.shape[1:] for image in images])


def _from_workers(
    chunks: _Chunks, keys: Iterable[Sequence[Key]], workers: int, prefetch: int, pin_memory: bool
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
        generator=torch.Generator(),  # its own: by default it would draw from, and change, the run's random state
    )
    needs_script = b"__main__" in pickle.dumps(chunks)  # such as a transform that the script defines
    try:
        with nullcontext() if needs_script else _script_hidden():
            loading = iter(loader)  # starts the processes
        yield from loading
    except (ConnectionError, EOFError, RuntimeError) as error:
        how = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in how:  # an error inside a process
            raise
        why = _NEEDS_GUARD if needs_script else "often because memory ran out: use fewer"
        raise DataError(
            f"a process that decodes images has ended, {why}; `workers=0` decodes without processes ({how})"
        ) from error


_NEEDS_GUARD = (
    "perhaps because it imports the script that defines its transform or dataset: such a script must do its work under "
    '`if __name__ == "__main__":`'
)


@contextmanager
def _script_hidden() -> Iterator[None]:
    """Processes that are started here do not import the script that is running.

    multiprocessing lets each process import it, so that it finds what the script defines. Without an
    `if __name__ == "__main__":` it would then do its work again in each process.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    before = {name: main[name] for name in main.keys() & {"__spec__", "__file__"}}
    main.update(dict.fromkeys(before))
    try:
        yield
    finally:
        main.update(before)


def _start(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and torch watches the server, which lives as long as they do."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
