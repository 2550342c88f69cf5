"""A gallery for many concurrent requests: a few are processed at a time, and the others wait."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, TypeVar

from fastapi import Request

from shortlist.data.images import ImageError, open_image, upright_rgb
from shortlist.errors import ShortlistError
from shortlist.gallery.gallery import Gallery, Hit, Item
from shortlist.locations import size_and_mtime
from shortlist.serve.api_schema import ItemFacts, Result, Results, SearchOptions
from shortlist.serve.limits import Limits, RequestError
from shortlist.serve.upload_memory import UploadMemory
from shortlist.serve.uploads import check_form, check_image, max_form_bytes, read_upload
from shortlist.serve.workers import Workers

WORKERS = 2  # number of threads for each kind of work, such as embedding or encoding JPEGs; limits the memory
REFRESH_SECONDS = 2  # between two checks for changes of the gallery
LOADING_SECONDS = 600  # maximum time to load another gallery and its model
CLOSE_SECONDS = 5  # maximum time for the work in progress when the server ends
LARGE_IMAGE = 12_000_000  # pixels, of up to 24 bytes each while decoding: only one such image is decoded at a time
CACHED_THUMBNAILS = 2000  # of about 15 kB each
THUMBNAIL_SIZE, VIEW_SIZE = 320, 1600  # pixels of the longer side
JPEG_QUALITY = 88
Value = TypeVar("Value")


class EncodedImage(NamedTuple):
    """An image of the gallery as a JPEG."""

    version: str  # HTTP ETag of the current file
    jpeg: bytes | None  # None: the client has this version already


class Service:
    """Answers requests in threads.

    Args:
        gallery: The gallery to search.
        limits: Limits of requests.
        waiting: See `Workers`.
    """

    def __init__(self, gallery: Gallery, limits: Limits, waiting: Callable[[int], None] = lambda _: None) -> None:
        self.gallery, self.limits = gallery, limits
        _ = gallery.encoder  # load the model now, not on the first request
        self._upload_memory = UploadMemory(limits, max_form_bytes(limits))
        self._large_image_lock = threading.Lock()
        self._searches, self._pictures, self._lookups = (
            Workers(WORKERS, limits.work_seconds, limits.wait_seconds, waiting) for _ in range(3)
        )
        self._refreshing = Workers(1, LOADING_SECONDS)
        self._cached_thumbnail = functools.lru_cache(CACHED_THUMBNAILS)(self._encode_jpeg)

    async def close(self) -> None:
        """Wait a short time for the work in progress."""
        await asyncio.gather(*(each.close(CLOSE_SECONDS) for each in (self._searches, self._pictures, self._lookups)))

    async def refresh_forever(self) -> None:
        """Load changes of the gallery, or the gallery that its name now refers to, every few seconds."""
        logged = ""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self._refreshing.run(self.gallery.refresh)
                logged = ""
            except (ShortlistError, RequestError, OSError) as error:  # searches continue to use the previous state
                if logged != (logged := str(error)):
                    logging.getLogger(__name__).error("%s", error)

    async def look_up(self, find: Callable[[], Value]) -> Value:
        """Run a function that reads the gallery in a thread, and return its result."""
        return await self._lookups.run(find)

    async def search(self, request: Request) -> Results:
        """Search with the uploaded image of a request."""
        check_form(request, self.limits)
        async with self._upload_memory.upload(request.client.host if request.client else "") as arrival:
            image, options = await read_upload(request, self.limits, arrival)
            return await self._searches.run(self._search, image, options)

    async def similar(self, id: int, options: SearchOptions) -> Results:  # noqa: A002
        """Find the images that are most similar to an image of the gallery."""
        return await self._searches.run(self._similar, id, options)

    async def picture(self, id: int, size: int, known: str) -> EncodedImage:  # noqa: A002
        """Return an image of the gallery as a JPEG.

        Args:
            id: Id of the image.
            size: Maximum width and height in pixels.
            known: ETags of the versions in the client's cache, which are not sent again.
        """
        return await self._pictures.run(self._picture, id, size, known)

    def _picture(self, id: int, size: int, known: str) -> EncodedImage:  # noqa: A002
        path = self.gallery.item(id).path
        encode = self._cached_thumbnail if size <= THUMBNAIL_SIZE else self._encode_jpeg
        try:
            stamp = size_and_mtime(path)
            if stamp is None:
                raise FileNotFoundError(path)
            version = f'"{stamp[1]:x}-{stamp[0]:x}-{size}"'
            return EncodedImage(version, None if version in known else encode(path, size, version))
        except OSError:
            raise RequestError(404, f"The file of image {id} no longer exists.") from None
        except ImageError as error:
            raise RequestError(404, f"The file of image {id} cannot be read: {error.reason.rstrip('.')}.") from None

    def _similar(self, id: int, options: SearchOptions) -> Results:  # noqa: A002
        def find() -> Results:
            hits = self.gallery.similar(id, options.k, label=options.label, min_score=-1)
            return self._results(self.gallery.item(id), hits, options)

        return self.gallery.in_one_state(find)

    def _search(self, image: bytes, options: SearchOptions) -> Results:
        def find() -> Results:
            hits = self.gallery.search(image, options.k, label=options.label, min_score=-1)
            return self._results(None, hits, options)

        pixels = check_image(image, self.limits.pixels)
        try:
            with self._lock_for(pixels):
                return self.gallery.in_one_state(find)
        except ImageError as error:
            raise RequestError(422, f"The image is damaged: {error.reason.rstrip('.')}.") from None

    def _results(self, query: Item | None, hits: list[Hit], options: SearchOptions) -> Results:
        """Return the results of a search, without the hits below the minimum score."""
        lowest = self.gallery.min_score if options.min_score is None else options.min_score
        enough = [hit for hit in hits if lowest is None or hit.score >= lowest]
        return Results(
            query=None if query is None else ItemFacts.of(query),
            results=[Result.of(hit.item, score=hit.score) for hit in enough],
            min_score=lowest,
            below_min_score=len(hits) - len(enough),
        )

    def _encode_jpeg(self, path: Path, size: int, version: str) -> bytes:
        """Encode an image file as a JPEG of at most `size` x `size` pixels. The version is only part of the cache key.

        Raises:
            ImageError: The file cannot be read, or has too many pixels. It may have been replaced since it was indexed.
        """
        with open_image(path) as image:
            if image.width * image.height > self.limits.pixels:
                allowed = f"at most {self.limits.pixels / 1e6:g} million are allowed"
                raise ImageError(path, f"it has {image.width} x {image.height} pixels, but {allowed}")
            image.draft(None, (size, size))  # a JPEG is decoded at a fraction of its size
            with self._lock_for(image.width * image.height):
                rgb = upright_rgb(image)
        rgb.thumbnail((size, size))
        out = io.BytesIO()
        rgb.save(out, format="JPEG", quality=JPEG_QUALITY)
        return out.getvalue()

    def _lock_for(self, pixels: int) -> AbstractContextManager[object]:
        """Return a lock that allows only one large image to be decoded at a time; nothing for small images."""
        return self._large_image_lock if pixels > LARGE_IMAGE else nullcontext()
