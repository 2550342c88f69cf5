"""Concurrent, slow and large requests."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from math import inf
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shortlist.gallery.gallery import Gallery
from shortlist.serve import Limits, create_app, service, upload_memory
from shortlist.serve import uploads as uploads_module
from shortlist.serve.limits import RequestError
from shortlist.serve.upload_memory import UploadMemory
from tests.processes import LONG
from tests.serve.galleries import png
from tests.serve.servers import serving_here

REQUESTS = 8


class Load:
    """Searches that wait until they are released, and how many uploads have arrived and searches run at the same time.

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
        upload = await READ_UPLOAD(*args)
        self.add(uploads=1)
        return upload

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
    """The URL of a server that ends no upload because it is slow."""
    with serving_here(gallery, Limits(seconds=LONG, grace=LONG)) as address:
        yield address


def test_a_slow_upload_does_not_block_other_requests(address: str) -> None:
    with begun_upload(address, 100_000, "--b\r\n"):
        assert httpx.get(f"{address}/api/health", timeout=LONG).json()["status"] == "ok"
        found = httpx.post(f"{address}/api/search", files={"image": png()}, timeout=LONG)
        assert found.status_code == 200
    after = httpx.get(f"{address}/api/health", timeout=LONG)  # the upload was interrupted
    assert after.status_code == 200


MAXIMUM = uploads_module.max_form_bytes(Limits())


@pytest.mark.parametrize("length", [100_000, MAXIMUM, None], ids=["small", "maximum", "not declared"])
def test_stalled_uploads_do_not_block_others(address: str, length: int | None) -> None:
    """Stalled uploads use little of the memory, whatever size they declare, and no thread."""
    hosts = islice(cycle(["127.0.0.1", "127.0.0.2", "127.0.0.3"]), 48)
    with ExitStack() as stalled:
        for host in hosts:
            stalled.enter_context(begun_upload(address, length, "--b\r\n", host))
        found = httpx.post(f"{address}/api/search", files={"image": png()}, timeout=LONG / 5)
        assert found.status_code == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(address: str) -> None:
    with begun_upload(address, 10**12) as asking:
        assert asking.recv(100).startswith(b"HTTP/1.1 413 ")


def begun_upload(address: str, length: int | None, start: str = "", host: str = "127.0.0.1") -> socket.socket:
    """Send the headers and the start of a form.

    Args:
        address: URL of the server.
        length: Declared number of bytes; None: not declared.
        start: Start of the form.
        host: Address of the client.
    """
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=LONG, source_address=(host, 0))
    declared = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    head = (
        f"POST /api/search HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"{declared}\r\n\r\n"
    )
    connection.sendall((head + (start if length is not None else f"{len(start):x}\r\n{start}\r\n")).encode())
    return connection


class Clock:
    """A clock that stands still unless it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which the rates of uploads are measured."""
    found = Clock()
    monkeypatch.setattr(upload_memory, "monotonic", found)
    return found


async def settled() -> None:
    """Wait until no task can continue."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("full", ["memory", "number"])
def test_the_slowest_upload_makes_room(
    gallery: Gallery, clock: Clock, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads that have sent most of their bytes, or that are as many as a client may have, and then stall."""
    image = png(200, 150)
    monkeypatch.setattr(uploads_module, "FORM_OVERHEAD", 300)
    limits = Limits(bytes=len(image), uploads=4, client_uploads=64 if full == "memory" else 2, seconds=LONG, grace=LONG)
    sent = image[: -10 if full == "memory" else 10]
    app = create_app(gallery, limits)

    async def form(stall: asyncio.Event) -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
        yield sent
        await stall.wait()
        yield image[len(sent) :] + b"\r\n--b--\r\n"

    async def send() -> list[httpx.Response]:
        headers, stall = {"Content-Type": "multipart/form-data; boundary=b"}, asyncio.Event()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            stalled = []
            for _ in range(2):
                stalled.append(asyncio.create_task(client.post("/api/search", content=form(stall), headers=headers)))
                await settled()
                clock.now += 1
            answer = await client.post("/api/search", files={"image": image})
            stall.set()
            return [*await asyncio.gather(*stalled), answer]

    first, *others = asyncio.run(send())
    assert [each.status_code for each in others] == [200, 200]
    assert (first.status_code, first.headers["retry-after"]) == (503, "5")
    assert first.json()["detail"] == (
        "The server is busy: it receives too many uploads, and this was the slowest. Try again in 5 seconds."
    )


def test_an_upload_waits_for_searches_but_not_for_ever(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(1, 1)
    monkeypatch.setattr(gallery, "search", load.search)
    monkeypatch.setattr(service, "read_upload", load.read)
    monkeypatch.setattr(uploads_module, "FORM_OVERHEAD", 300)
    app = create_app(gallery, Limits(bytes=len(png()), uploads=2, wait_seconds=0.05))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            first = asyncio.create_task(client.post("/api/search", files={"image": png()}))
            try:
                assert await asyncio.to_thread(load.reached.wait, LONG)
                return await client.post("/api/search", files={"image": png()})
            finally:
                load.released.set()
                assert (await first).status_code == 200

    answer = asyncio.run(send())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    message = "The server is busy: the upload has waited for 0.05 seconds. Try again in 5 seconds."
    assert answer.json()["detail"] == message


class Uploads:
    """Uploads of at most 10 bytes and at most 6 per client, in a memory of 80 bytes, of which a client may use 40."""

    def __init__(self) -> None:
        self.memory = UploadMemory(Limits(client_uploads=6), 10)
        self.states: dict[str, str] = {}  # how far they have come
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.last_bytes: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, host: str, size: int) -> None:
        """Receive bytes of an upload, and wait for more."""
        self.states[name], self.last_bytes[name] = "waits", asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._upload(name, host, size))
        await settled()

    async def _upload(self, name: str, host: str, size: int) -> None:
        try:
            async with self.memory.upload(host) as arrival:
                async with arrival.arriving():
                    await arrival.receive(size)
                    self.states[name] = "arriving"
                    with arrival.reading():
                        await self.last_bytes[name].wait()
                self.states[name] = "searched"
                await asyncio.Event().wait()
        except RequestError as error:
            self.states[name] = str(error.status)

    def ended(self) -> set[str]:
        return {name for name, state in self.states.items() if state == "503"}

    async def search(self, name: str) -> None:
        """Receive the rest of an upload."""
        self.last_bytes[name].set()
        await settled()

    async def answer(self, *names: str) -> None:
        """End uploads."""
        for name in names:
            self.tasks.pop(name).cancel()
            del self.states[name]
        await settled()


def test_memory_is_taken_for_bytes_that_have_arrived(clock: Clock) -> None:
    """Without room for a client, its slowest upload is ended; without room for all, the slowest of large clients."""

    async def check() -> None:
        uploads = Uploads()
        await uploads.begin("c0", "c", 9)
        for name in ("b0", "a0", "a1", "a2", "a3"):
            clock.now += 1
            await uploads.begin(name, name[0], 10)
        await uploads.begin("a4", "a", 1)
        assert uploads.ended() == {"a0"}
        for name in ("b1", "b2", "b3"):
            await uploads.begin(name, "b", 10)
        assert uploads.ended() == {"a0"}  # there are 80 bytes
        await uploads.begin("d0", "d", 1)
        assert uploads.ended() == {"a0", "b0"}
        await uploads.answer(*uploads.states)
        gc.collect()
        assert (uploads.memory._memory._parts.total(), len(uploads.memory._clients)) == (0, 0)

    asyncio.run(check())


def test_uploads_wait_for_those_that_are_searched(clock: Clock) -> None:
    """In the order in which they ask, so that small uploads do not keep a large one waiting."""

    async def check() -> None:
        uploads = Uploads()
        for number in range(4):
            await uploads.begin(f"a{number}", "a", 9)
            clock.now += 1
        await uploads.search("a2")
        await uploads.begin("large", "a", 9)
        await uploads.begin("small", "a", 1)
        assert (uploads.states["large"], uploads.states["small"]) == ("waits", "waits")
        await uploads.answer("a2")
        assert uploads.states == dict.fromkeys(("a0", "a1", "a3", "large", "small"), "arriving")
        await uploads.answer(*uploads.states)

    asyncio.run(check())


def test_the_time_for_waiting_is_that_of_the_whole_upload(clock: Clock) -> None:
    async def check() -> None:
        uploads = Uploads()
        async with uploads.memory.upload("a") as arrival:
            for number in range(4):
                await uploads.begin(f"a{number}", "a", 10)
                await uploads.search(f"a{number}")
            waiting = asyncio.create_task(arrival.receive(1))
            await settled()
            clock.now += Limits().wait_seconds
            await uploads.answer("a0")
            await waiting
            await uploads.begin("a4", "a", 9)
            waiting = asyncio.create_task(arrival.receive(1))
            await settled()
            assert "the upload has waited for 30 seconds" in str(waiting.exception())
        await uploads.answer(*uploads.states)

    asyncio.run(check())


def test_an_upload_that_is_itself_the_slowest(clock: Clock) -> None:
    async def check() -> None:
        uploads = Uploads()
        async with uploads.memory.upload("a") as slow:
            with slow.reading():
                clock.now += 10
            for number in range(4):
                await uploads.begin(f"a{number}", "a", 10)
            with pytest.raises(RequestError, match="this was the slowest"):
                async with slow.arriving():
                    await slow.receive(1)
        assert set(uploads.states.values()) == {"arriving"}
        await uploads.answer(*uploads.states)

    asyncio.run(check())


def test_the_number_of_uploads_of_a_client(clock: Clock) -> None:
    """The addresses of IPv6 that one computer can use are one client."""

    async def check() -> None:
        uploads = Uploads()
        for number in range(6):
            await uploads.begin(f"{number}", f"2001:db8::{number}", 1)
            clock.now += 1
        await uploads.begin("other", "2001:db8:0:1::1", 1)
        assert set(uploads.states.values()) == {"arriving"}
        await uploads.begin("6", "2001:db8::6", 1)
        assert uploads.ended() == {"0"}
        await uploads.answer(*uploads.states)

    asyncio.run(check())


def test_the_rate_of_an_upload(clock: Clock) -> None:
    """One that has received most of its bytes at once, and then stalls, is soon slower than a steady one."""
    memory = UploadMemory(Limits(), 10**7)

    async def check() -> None:
        async with memory.upload("a") as stalled, memory.upload("b") as steady:
            await stalled.receive(9 * 10**6)
            assert stalled.rate == steady.rate == inf
            rates = []
            for _ in range(30):
                with stalled.reading(), steady.reading():
                    clock.now += 1
                    rates.append((stalled.rate, steady.rate))
                await steady.receive(10**5)
            assert rates[0][0] > rates[0][1] > 1000  # both have just begun
            assert rates[-1] == (pytest.approx(0, abs=10**4), pytest.approx(10**5, rel=0.2))
            clock.now += 1000  # in which the server does not read
            assert steady.rate == pytest.approx(10**5, rel=0.2)
            assert (steady.seconds, steady.received) == (30, 30 * 10**5)

    asyncio.run(check())
