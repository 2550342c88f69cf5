"""The HTTP server."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import torch
import uvicorn

from shortlist.errors import ConfigError
from shortlist.gallery.gallery import Gallery
from shortlist.process import threads
from shortlist.serve.limits import Limits
from shortlist.serve.service import WORKERS
from shortlist.serve.web_app import create_app

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
SHUTDOWN_SECONDS = 3  # for requests in progress when the server is stopped


def serve(
    gallery: Gallery,
    host: str = "127.0.0.1",
    port: int = 8080,
    limits: Limits | None = None,
    *,
    ready: Callable[[str, bool], None] | None = None,
) -> None:
    """Serve the search page and its JSON API until interrupted (Ctrl-C).

    Args:
        gallery: The gallery to search.
        host: Address or name to listen on. Loopback addresses can be reached from this computer only.
        port: Port to listen on; 0 chooses a free one.
        limits: Limits of uploads.
        ready: Called with the URL, and whether other computers can reach it, when connections are accepted.

    Raises:
        ConfigError: The server cannot listen on this host and port.
    """
    with _listen(host, port) as listening, threads(max(1, torch.get_num_threads() // WORKERS)):  # workers share cores
        address, port = listening.getsockname()[:2]
        local = ipaddress.ip_address(address).is_loopback
        app = create_app(gallery, limits, {*LOCAL_NAMES, _url_host(host).lower()} if local else None)
        config = uvicorn.Config(  # without log_config, which would change the logging of the process
            app, log_config=None, server_header=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS
        )
        if ready is not None:
            ready(f"http://{_url_host(host)}:{port}", not local)
        uvicorn.Server(config).run(sockets=[listening])


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
