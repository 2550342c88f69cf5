"""Concurrent, slow and large requests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shortlist.gallery.gallery import Gallery
from shortlist.serve import Limits, create_app, service
from shortlist.serve import uploads as uploads_module
from shortlist.serve.upload_memory import UploadMemory
from tests.processes import LONG
from tests.serve.galleries import png
from tests.serve.servers import serving_here

REQUESTS = 8


class Load:
    """Searches that wait until they are released, and how many uploads are read and searches run at the same time.

    Args:
        uploads: Number of uploads to wait for.
        searches: Number of searches to wait for.
    """

    def __init__(self, uploads: int, searches: int) -> None:
        self.expected_uploads, self.expected_searches, self.lock = uploads, searches, threading.Lock()
        self.uploads = self.searches = self.most_uploads = self.most_searches = 0
        self.reached, self.released = threading.Event(), threading.Event()

    def add(self, uploads: int = 0, searches: int = 0) -> None:
        with self.lock:
            self.uploads, self.searches = self.uploads + uploads, self.searches + searches
            self.most_uploads = max(self.most_uploads, self.uploads)
            self.most_searches = max(self.most_searches, self.searches)
            if self.uploads >= self.expected_uploads and self.searches >= self.expected_searches:
                self.reached.set()

    async def read(self, *args: Any) -> Any:
        """Replace `read_upload`."""
        self.add(uploads=1)
        return await READ_UPLOAD(*args)

    def search(self, *_: object, **__: object) -> list[object]:
        """Replace `Gallery.search`."""
        self.add(searches=1)
        assert self.released.wait(LONG)
        self.add(uploads=-1, searches=-1)
        return []


READ_UPLOAD = service.read_upload


@pytest.mark.parametrize(
    ("limit", "threads", "large_image", "uploads", "searches"),
    [
        (8, 2, 10**6, 4, 2),  # a client can use half of the memory
        (8, 2, 100, 4, 1),  # images of more than 100 pixels: one at a time
        (2 * REQUESTS, 3, 10**6, REQUESTS, 3),  # control: other limits are reached
    ],
    ids=["small images", "large images", "other limits"],
)
def test_uploads_in_memory_and_searches_are_limited(
    gallery: Gallery,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    threads: int,
    large_image: int,
    uploads: int,
    searches: int,
) -> None:
    """Further requests wait, and the server answers other requests meanwhile."""
    load = Load(uploads, searches)
    monkeypatch.setattr(gallery, "search", load.search)
    monkeypatch.setattr(service, "read_upload", load.read)
    monkeypatch.setattr(service, "WORKERS", threads)
    monkeypatch.setattr(service, "LARGE_IMAGE", large_image)
    monkeypatch.setattr(uploads_module, "FORM_OVERHEAD", 300)  # a form with this file is almost of the maximum size
    app = create_app(gallery, Limits(bytes=len(png()), uploads=limit))

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            searching = [
                asyncio.create_task(client.post("/api/search", files={"image": png()})) for _ in range(REQUESTS)
            ]
            try:
                assert await asyncio.to_thread(load.reached.wait, LONG)
                await asyncio.sleep(0.05)  # for any request that does not wait
                meanwhile = await client.get("/api/health")
            finally:
                load.released.set()
            return [meanwhile, *await asyncio.gather(*searching)]

    assert [answer.status_code for answer in asyncio.run(send())] == [200] * (1 + REQUESTS)
    assert (load.most_uploads, load.most_searches) == (uploads, searches)
    assert (load.uploads, load.searches) == (0, 0)


def test_the_default_limits_bound_the_memory() -> None:
    limits = Limits()
    decoded = limits.pixels + (service.WORKERS - 1) * service.LARGE_IMAGE  # one large image, and as large as possible
    assert decoded * 24 + limits.uploads * limits.bytes < 2 * 2**30


@pytest.fixture(scope="module")
def address(gallery: Gallery) -> Iterator[str]:
    with serving_here(gallery) as address:
        yield address


def test_a_slow_upload_does_not_block_other_requests(address: str) -> None:
    with begun_upload(address, 100_000, "--b\r\n"):
        assert httpx.get(f"{address}/api/health", timeout=LONG).json()["status"] == "ok"
        found = httpx.post(f"{address}/api/search", files={"image": png()}, timeout=LONG)
        assert found.status_code == 200
    after = httpx.get(f"{address}/api/health", timeout=LONG)  # the upload was interrupted
    assert after.status_code == 200


def test_stalled_uploads_do_not_block_others(address: str) -> None:
    """Stalled uploads use little memory, and no thread."""
    with ExitStack() as stalled:
        for _ in range(32):
            stalled.enter_context(begun_upload(address, 100_000, "--b\r\n"))
        assert httpx.post(f"{address}/api/search", files={"image": png()}, timeout=30).status_code == 200


def test_the_memory_for_uploads() -> None:
    """Others can upload while a client waits, until the memory is full; then all wait."""
    memory, log = UploadMemory(100, 60), list[str]()

    async def upload(client: str, size: int, end: asyncio.Event) -> None:
        async with memory.reserve(client, size):
            log.append(f"{client}{size}")
            await end.wait()

    async def check() -> None:
        ends = [asyncio.Event() for _ in range(5)]
        sizes = [("a", 50), ("a", 20), ("b", 40), ("c", 20), ("c", 10)]
        tasks = []
        for (client, size), end in zip(sizes, ends, strict=True):
            tasks.append(asyncio.create_task(upload(client, size, end)))
            await settled()
        assert log == ["a50", "b40", "c10"]  # one that fits does not wait for larger ones
        ends[0].set()
        await settled()
        assert log[3:] == ["a20", "c20"]
        for end in ends:
            end.set()
        await asyncio.gather(*tasks)
        async with memory.reserve("a", 60):  # everything is free again
            assert not memory._fits("a", 1)

    async def settled() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(check())


def test_a_body_that_is_too_large_is_refused_before_it_is_read(address: str) -> None:
    with begun_upload(address, 10**12) as asking:
        assert asking.recv(100).startswith(b"HTTP/1.1 413 ")


def begun_upload(address: str, length: int, start: str = "") -> socket.socket:
    """Send the headers and the start of a form that has `length` bytes."""
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=LONG)
    head = (
        f"POST /api/search HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {length}\r\n\r\n{start}"
    )
    connection.sendall(head.encode())
    return connection
