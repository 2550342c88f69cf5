"""Servers in another process or in a thread."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from shortlist.gallery.gallery import Gallery
from shortlist.serve import Limits, create_app
from tests.processes import Commands, Running

TOKEN = "a-token-of-the-tests"


@dataclass
class Server:
    address: str
    pid: int


def address_of(running: Running) -> str:
    """Wait until the server is ready, and return its URL."""
    running.until(lambda: "Ctrl-C" in running.out)
    (address,) = re.findall(r"http://\S+", running.out)
    return address


@contextmanager
def serving(commands: Commands, gallery: Path, *options: str) -> Iterator[Server]:
    """Run `shortlist serve` on a free port. It must end without a traceback when it is interrupted."""
    with commands.started("serve", gallery, "--port", "0", *options, cwd=gallery.parent) as running:
        yield Server(address_of(running), running.pid)
        os.kill(running.pid, signal.SIGINT)
        assert (running.wait(), running.err) == (130, "")


@contextmanager
def serving_here(gallery: Gallery, limits: Limits | None = None, token: str | None = None) -> Iterator[str]:
    """Run a server in a thread and yield its URL. It ends when all connections to it are closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = create_app(gallery, limits, {"127.0.0.1"}, token=token)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
