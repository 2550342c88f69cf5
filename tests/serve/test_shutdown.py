"""Shutdown of the server while requests are in progress."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx

from shortlist.gallery.gallery import Gallery
from tests.processes import LONG, Commands
from tests.serve.galleries import png
from tests.serve.servers import address_of
from tests.serve.test_load import begun_upload

SECONDS = "import shortlist.serve.server as server; server.SHUTDOWN_SECONDS = {}"
PATIENT = f"""{SECONDS.format(LONG)}
import functools, shortlist.serve as package
package.Limits = functools.partial(package.Limits, seconds={LONG}, grace={LONG})"""  # however busy the machine is
HEAD = '--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
TAIL = b"\r\n--b--\r\n"


def refuses_connections(address: str) -> bool:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port)).close()
    except ConnectionError:
        return True
    return False


def test_unfinished_uploads_are_answered_with_503(commands: Commands, gallery: Gallery) -> None:
    folder = gallery.store.folder
    with (
        commands.started("serve", folder, "--port", "0", cwd=folder.parent, before=SECONDS.format(0.1)) as running,
        ExitStack() as opened,
    ):
        address = address_of(running)
        stalled = [opened.enter_context(begun_upload(address, 1000, HEAD)) for _ in range(12)]
        assert httpx.get(f"{address}/api/health", timeout=LONG).status_code == 200  # the uploads have begun
        os.kill(running.pid, signal.SIGTERM)
        for each in stalled:
            answer = b"".join(iter(lambda each=each: each.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b'"The server is being stopped."' in answer
        assert (running.wait(), running.err) == (0, "")


def test_requests_in_progress_are_completed(commands: Commands, gallery: Gallery) -> None:
    folder = gallery.store.folder
    with commands.started("serve", folder, "--port", "0", cwd=folder.parent, before=PATIENT) as running:
        address = address_of(running)
        with begun_upload(address, len(HEAD) + len(png()) + len(TAIL), HEAD) as upload:
            assert httpx.get(f"{address}/api/health", timeout=LONG).status_code == 200  # the upload has begun
            os.kill(running.pid, signal.SIGTERM)
            running.until(lambda: refuses_connections(address))
            upload.sendall(png() + TAIL)
            assert upload.recv(100).startswith(b"HTTP/1.1 200 ")
        assert (running.wait(), running.err) == (0, "")
