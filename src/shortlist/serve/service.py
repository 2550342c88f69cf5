"""A gallery that many ask at once: a few are answered at a time, and the others wait."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from fastapi import Request

from shortlist.data.images import ImageError
from shortlist.gallery.gallery import Gallery, Hit, Item
from shortlist.serve.limits import Limits, Refused
from shortlist.serve.pictures import THUMBNAIL, check_upload, encoded
from shortlist.serve.schema import Asked
from shortlist.serve.uploads import read_upload

WORKERS = 2  # decode and embed, and as many encode thumbnails: memory is theirs, however many wait
LARGE = 12_000_000  # pixels: up to 24 bytes each while it is decoded, so that only one such image is at a time
THUMBNAILS = 2000  # are kept, of about 15 kB each
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Picture(NamedTuple):
    version: str  # an HTTP ETag: of the file as it is now
    jpeg: bytes | None  # None: the asker has this version


class Service:
    """All that takes time happens in threads, so that the event loop always answers."""

    def __init__(self, gallery: Gallery, limits: Limits) -> None:
        self.gallery, self.limits = gallery, limits
        _ = gallery.encoder  # the model is loaded now, not by the first visitors
        self._places = asyncio.Semaphore(limits.uploads)
        self._one_large = threading.Lock()
        self._searchers = ThreadPoolExecutor(WORKERS, "search")
        self._thumbnail_pool = ThreadPoolExecutor(WORKERS, "pictures")
        self._thumbnail = functools.lru_cache(THUMBNAILS)(_encoded)

    async def search(self, request: Request) -> list[Hit]:
        async with self._places:  # until it is answered: the image is in memory
            upload = await read_upload(request, self.limits)
            return await _in(self._searchers, self._answer, upload.image, upload.asked)

    async def similar(self, id: int, k: int, label: str | None) -> tuple[Item, list[Hit]]:  # noqa: A002
        def answer() -> tuple[Item, list[Hit]]:
            return self.gallery.item(id), self.gallery.similar(id, k, label=label)

        return await _in(self._searchers, answer)

    async def picture(self, id: int, edge: int, known: str) -> Picture:  # noqa: A002
        """An image of the gallery as a JPEG of at most `edge` x `edge` pixels.

        Args:
            id: of the image.
            edge: of the picture.
            known: versions that need not be made, as they are in a browser's cache.
        """
        return await _in(self._thumbnail_pool, self._picture, id, edge, known)

    def _picture(self, id: int, edge: int, known: str) -> Picture:  # noqa: A002
        path = self.gallery.item(id).path
        make = self._thumbnail if edge <= THUMBNAIL else _encoded
        try:
            file = path.stat()
            version = f'"{file.st_mtime_ns:x}-{file.st_size:x}-{edge}"'
            return Picture(version, None if version in known else make(path, edge, version))
        except OSError:
            raise Refused(404, f"The file of the image {id} is gone.") from None
        except ImageError as error:
            raise Refused(404, f"The file of the image {id} cannot be read: {error.reason.rstrip('.')}.") from None

    def _answer(self, image: bytes, asked: Asked) -> list[Hit]:
        large = check_upload(image, self.limits.pixels) > LARGE
        try:
            with self._one_large if large else nullcontext():
                return self.gallery.search(image, asked.k, label=asked.label)
        except ImageError as error:
            raise Refused(422, f"The image is damaged: {error.reason.rstrip('.')}.") from None


def _encoded(path: Path, edge: int, version: str) -> bytes:
    return encoded(path, edge)


async def _in(
    pool: ThreadPoolExecutor, work: Callable[Given, Answer], *args: Given.args, **options: Given.kwargs
) -> Answer:
    return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(work, *args, **options))
