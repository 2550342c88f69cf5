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
from tests.serve.servers import address_of
from tests.serve.test_observing import samples


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, so that others answer, and continue it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_process_that_is_killed_is_replaced(commands: Commands, gallery: Gallery, tmp_path: Path) -> None:
    folder, log = gallery.store.folder, tmp_path / "access.jsonl"
    options = ("--port", "0", "--processes", "2", "--access-log", str(log))
    with commands.started("serve", folder, *options, cwd=tmp_path) as running:
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
        os.kill(running.pid, signal.SIGTERM)
        assert (running.wait(), running.err) == (0, "")
        assert not any(psutil.pid_exists(each) for each in answered)
