"""`shortlist serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from shortlist.retrieval.gallery import Gallery
from shortlist.serve import create_app


@dataclass
class Server:
    address: str
    process: subprocess.Popen[str]


@contextmanager
def serving(gallery: Path, *options: str) -> Iterator[Server]:
    """A server on a free port; it must end without a traceback when it is interrupted."""
    command = [sys.executable, "-m", "shortlist", "serve", str(gallery), "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://\S+", said)
            if found is None:
                process.wait(60)
                errors.seek(0)
                raise AssertionError(f"it does not serve: {said}{errors.read()}")
            yield Server(found.group(), process)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            errors.seek(0)
            assert errors.read() == ""
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def serving_here(gallery: Gallery) -> Iterator[str]:
    """The address of a server in a thread, which starts at once."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(gallery), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
