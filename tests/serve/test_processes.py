"""A server with two processes, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from shortlist.gallery.gallery import Gallery
from tests.processes import LONG, Commands
from tests.serve.galleries import png
from tests.serve.servers import address_of
from tests.serve.test_load import begun_upload
from tests.serve.test_observing import samples
from tests.serve.test_shutdown import HEAD, PATIENT, TAIL, refuses_connections


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, so that others answer, and continue it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def in_progress(address: str) -> float:
    return samples(httpx.get(f"{address}/metrics", timeout=LONG).text)["shortlist_requests_in_progress",]


def test_a_process_that_is_killed_is_replaced(commands: Commands, gallery: Gallery, tmp_path: Path) -> None:
    """When the server is stopped, it refuses connections while a process completes a request."""
    folder, log = gallery.store.folder, tmp_path / "access.jsonl"
    options = ("--port", "0", "--processes", "2", "--access-log", str(log))
    with commands.started("serve", folder, *options, cwd=tmp_path, before=PATIENT) as running:
        address, answered = address_of(running), list[int]()

        def answer() -> int:
            """Return the process that answers a request."""
            assert httpx.get(f"{address}/api/items/3", timeout=LONG).status_code == 200
            running.until(lambda: log.read_text().count("\n") > len(answered))
            answered.append(json.loads(log.read_text().splitlines()[-1])["process"])
            return answered[-1]

        first = answer()
        with stopped(first):
            second = answer()
        os.kill(first, signal.SIGKILL)
        running.until(lambda: not psutil.pid_exists(first))
        answer()
        with stopped(second):
            third = answer()
        assert len({running.pid, first, second, third}) == 4
        counted = samples(httpx.get(f"{address}/metrics", timeout=LONG).text)
        assert counted["shortlist_request_seconds_count", "/api/items/{id}", "200"] == len(answered)
        with begun_upload(address, len(HEAD) + len(png()) + len(TAIL), HEAD) as upload:
            running.until(lambda: in_progress(address) == 2)  # the upload, and the request for the metrics
            os.kill(running.pid, signal.SIGTERM)
            running.until(lambda: refuses_connections(address))
            upload.sendall(png() + TAIL)
            assert upload.recv(100).startswith(b"HTTP/1.1 200 ")
        assert (running.wait(), running.err) == (0, "")
        assert not any(psutil.pid_exists(each) for each in answered)
