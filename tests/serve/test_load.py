"""Many concurrent requests, and slow ones, to a server in another process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from PIL import Image

from shortlist.gallery.gallery import Gallery
from tests.processes import LONG, Commands
from tests.serve.galleries import encoded, png
from tests.serve.servers import Server, serving

REQUESTS = 32
MAX_MEMORY = 500 * 2**20  # measured: 212 MB, and 1,102 MB if all images are read and decoded at once


@pytest.fixture(scope="module")
def server(commands: Commands, gallery: Gallery) -> Iterator[Server]:
    with serving(commands, gallery.store.folder) as server:
        yield server


def search(server: Server, image: bytes) -> httpx.Response:
    return httpx.post(f"{server.address}/api/search", files={"image": image}, timeout=LONG)


def own_memory(process: psutil.Process) -> int:
    """Return the memory of a process in bytes, without mapped files and libraries."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def test_a_slow_upload_does_not_block_other_requests(server: Server) -> None:
    parts = urlsplit(server.address)
    head = (
        f"POST /api/search HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        "Content-Length: 100000\r\n\r\n--b\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port)) as slow:
        slow.sendall(head.encode())
        assert httpx.get(f"{server.address}/api/health", timeout=LONG).json()["status"] == "ok"
        assert search(server, png()).status_code == 200
    assert (
        httpx.get(f"{server.address}/api/health", timeout=LONG).status_code == 200
    )  # after the upload was interrupted


def test_many_large_images_at_once(server: Server) -> None:
    image = encoded(Image.effect_noise((3660, 2740), 60), "PNG", compress_level=1)
    assert len(image) > 5 * 2**20
    assert search(server, image).status_code == 200
    process = psutil.Process(server.pid)
    before, peak, ended = own_memory(process), 0, threading.Event()

    def watch() -> int:
        """Count the health checks that are answered meanwhile."""
        nonlocal peak
        answered = 0
        while not ended.wait(0.05):
            peak = max(peak, own_memory(process))
            answered += httpx.get(f"{server.address}/api/health", timeout=LONG).status_code == 200
        return answered

    with ThreadPoolExecutor(REQUESTS + 1) as threads:
        watching = threads.submit(watch)
        answers = [threads.submit(search, server, image) for _ in range(REQUESTS)]
        statuses = [answer.result().status_code for answer in answers]
        ended.set()
    assert statuses == [200] * REQUESTS
    assert watching.result() > 0
    assert peak - before < MAX_MEMORY


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Server) -> None:
    parts = urlsplit(server.address)
    head = (
        f"POST /api/search HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {10**12}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=LONG) as asking:
        asking.sendall(head.encode())
        assert asking.recv(100).startswith(b"HTTP/1.1 413 ")
