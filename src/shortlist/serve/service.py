"""A gallery for many concurrent requests: a few are processed at a time, and the others wait."""

from __future__ import annotations

import asyncio
import functools
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from fastapi import Request

from shortlist.data.images import ImageError, load_image
from shortlist.gallery.gallery import Gallery, Hit, Item
from shortlist.locations import size_and_mtime
from shortlist.serve.api_schema import SearchOptions
from shortlist.serve.limits import Limits, RequestError
from shortlist.serve.uploads import check_image, read_upload

WORKERS = 2  # threads that decode and embed, and as many that encode JPEGs: they bound the memory
LARGE_IMAGE = 12_000_000  # pixels, of up to 24 bytes each while decoding: only one such image is decoded at a time
CACHED_THUMBNAILS = 2000  # of about 15 kB each
THUMBNAIL_SIZE, VIEW_SIZE = 320, 1600  # pixels of the longer side
JPEG_QUALITY = 88
Args = ParamSpec("Args")
Result = TypeVar("Result")


class Picture(NamedTuple):
    """An image of the gallery as a JPEG."""

    version: str  # HTTP ETag of the current file
    jpeg: bytes | None  # None: the client has this version already


class Service:
    """Runs all slow work in threads, so that the event loop always answers.

    Args:
        gallery: The gallery to search.
        limits: Limits of uploads.
    """

    def __init__(self, gallery: Gallery, limits: Limits) -> None:
        self.gallery, self.limits = gallery, limits
        _ = gallery.encoder  # load the model now, not on the first request
        self._upload_slots = asyncio.Semaphore(limits.uploads)
        self._large_image_lock = threading.Lock()
        self._search_pool = ThreadPoolExecutor(WORKERS, "search")
        self._picture_pool = ThreadPoolExecutor(WORKERS, "pictures")
        self._cached_thumbnail = functools.lru_cache(CACHED_THUMBNAILS)(_encode_jpeg)

    async def search(self, request: Request) -> list[Hit]:
        """Search with the uploaded image of a request."""
        async with self._upload_slots:  # until the end of the search, since the image is in memory
            upload = await read_upload(request, self.limits)
            return await _run_in(self._search_pool, self._search, upload.image, upload.options)

    async def similar(self, id: int, k: int, label: str | None) -> tuple[Item, list[Hit]]:  # noqa: A002
        """Return an image of the gallery and the images that are most similar to it."""

        def find() -> tuple[Item, list[Hit]]:
            return self.gallery.item(id), self.gallery.similar(id, k, label=label)

        return await _run_in(self._search_pool, find)

    async def picture(self, id: int, size: int, known: str) -> Picture:  # noqa: A002
        """Return an image of the gallery as a JPEG.

        Args:
            id: Id of the image.
            size: Maximum width and height in pixels.
            known: ETags of the versions in the client's cache, which are not sent again.
        """
        return await _run_in(self._picture_pool, self._picture, id, size, known)

    def _picture(self, id: int, size: int, known: str) -> Picture:  # noqa: A002
        path = self.gallery.item(id).path
        encode = self._cached_thumbnail if size <= THUMBNAIL_SIZE else _encode_jpeg
        try:
            stamp = size_and_mtime(path)
            if stamp is None:
                raise FileNotFoundError(path)
            version = f'"{stamp[1]:x}-{stamp[0]:x}-{size}"'
            return Picture(version, None if version in known else encode(path, size, version))
        except OSError:
            raise RequestError(404, f"The file of image {id} does not exist any more.") from None
        except ImageError as error:
            raise RequestError(404, f"The file of image {id} cannot be read: {error.reason.rstrip('.')}.") from None

    def _search(self, image: bytes, options: SearchOptions) -> list[Hit]:
        large = check_image(image, self.limits.pixels) > LARGE_IMAGE
        try:
            with self._large_image_lock if large else nullcontext():
                return self.gallery.search(image, options.k, label=options.label)
        except ImageError as error:
            raise RequestError(422, f"The image is damaged: {error.reason.rstrip('.')}.") from None


def _encode_jpeg(path: Path, size: int, version: str) -> bytes:
    """Encode an image file as a JPEG of at most `size` x `size` pixels. The version is part of the cache key only."""
    image = load_image(path, at_least=size)
    image.thumbnail((size, size))
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=JPEG_QUALITY)
    return out.getvalue()


async def _run_in(
    pool: ThreadPoolExecutor, function: Callable[Args, Result], *args: Args.args, **options: Args.kwargs
) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(function, *args, **options))
