"""Listen, say where, and answer until stopped."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import torch
import uvicorn

from shortlist.errors import ConfigError
from shortlist.gallery.gallery import Gallery
from shortlist.process import threads
from shortlist.serve.app import create_app
from shortlist.serve.limits import Limits
from shortlist.serve.service import WORKERS

LOCAL = ("localhost", "127.0.0.1", "[::1]")  # what this computer calls itself
GRACE = 3  # seconds for answers that are under way when the server is stopped


def serve(
    gallery: Gallery,
    host: str = "127.0.0.1",
    port: int = 8080,
    limits: Limits | None = None,
    *,
    ready: Callable[[str, bool], None] | None = None,
) -> None:
    """Answer until interrupted (Ctrl-C).

    Args:
        gallery: what is searched.
        host: address or name to listen on. While it is of this computer only, so are the visitors.
        port: 0 takes a free one.
        limits: of uploads.
        ready: is told the address, and whether others can reach it, when connections are accepted.

    Raises:
        ConfigError: it cannot listen there.
    """
    with _listen(host, port) as listening, threads(max(1, torch.get_num_threads() // WORKERS)):  # workers share cores
        address, port = listening.getsockname()[:2]
        local = ipaddress.ip_address(address).is_loopback
        app = create_app(gallery, limits, {*LOCAL, _in_url(host).lower()} if local else None)
        config = uvicorn.Config(  # without log_config: logging is set up by whoever owns the process
            app, log_config=None, server_header=False, timeout_graceful_shutdown=GRACE
        )
        if ready is not None:
            ready(f"http://{_in_url(host)}:{port}", not local)
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or every answer waits 40 ms for its end
        return listening
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # without the address, which is told anyway
        raise ConfigError(f"cannot listen on {host}, port {port} ({why}): try another `port` or `host`") from None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
