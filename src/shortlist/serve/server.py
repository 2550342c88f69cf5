"""The HTTP server."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import uvicorn
from starlette.types import ASGIApp

from shortlist.errors import ConfigError
from shortlist.gallery.gallery import Gallery
from shortlist.process import threads
from shortlist.serve.draining import Draining
from shortlist.serve.limits import Limits
from shortlist.serve.service import WORKERS
from shortlist.serve.web_app import create_app

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
SHUTDOWN_SECONDS = 3  # after which requests in progress when the server is stopped are answered with 503
SENDING_SECONDS = 1  # to send these answers


def serve(
    gallery: Gallery,
    host: str = "127.0.0.1",
    port: int = 8080,
    limits: Limits | None = None,
    *,
    token: str | None = None,
    ready: Callable[[str, bool], None] | None = None,
) -> None:
    """Serve the search page and its JSON API until interrupted (Ctrl-C) or terminated (SIGTERM).

    Requests in progress are then completed. Those that take longer than 3 seconds are answered with the status 503.

    Args:
        gallery: The gallery to search.
        host: Address or name to listen on. Loopback addresses can be reached from this computer only.
        port: Port to listen on; 0 chooses a free one.
        limits: Limits of requests.
        token: Token that requests must carry; see `create_app`.
        ready: Called with the URL, and whether other computers can reach it, when connections are accepted.

    Raises:
        ConfigError: The server cannot listen on this host and port, or the token is too short.
        KeyboardInterrupt: The server was interrupted, not terminated.
    """
    cores = max(1, torch.get_num_threads() // WORKERS)  # workers share cores
    with _listen(host, port) as listening, threads(cores), _returning_when_terminated():
        address, port = listening.getsockname()[:2]
        local = ipaddress.ip_address(address).is_loopback
        hosts = {*LOCAL_NAMES, _url_host(host).lower()} if local else None
        server = _Server(create_app(gallery, limits, hosts, token=token))
        if ready is not None:
            ready(f"http://{_url_host(host)}:{port}", not local)
        server.run(sockets=[listening])


class _Server(uvicorn.Server):
    """uvicorn's server, with an end that leaves no request without an answer, and no message on the terminal."""

    def __init__(self, app: ASGIApp) -> None:
        self._draining = Draining(app)
        # Without log_config, which would change the logging of the process.
        super().__init__(uvicorn.Config(self._draining, log_config=None, server_header=False))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(SHUTDOWN_SECONDS, self._draining.end)
        loop.call_later(SHUTDOWN_SECONDS + SENDING_SECONDS, self._disconnect)
        await super().shutdown(sockets)

    def _disconnect(self) -> None:
        """Close the connections of clients that do not read their responses."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@contextmanager
def _returning_when_terminated() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after an orderly end."""
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise responses are delayed by 40 ms
        return listening
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # without the address, which is in the message
        raise ConfigError(f"cannot listen on {host}, port {port} ({reason}): try another `port` or `host`") from None


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
