"""The HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from starlette.types import ASGIApp

from shortlist.errors import ConfigError, check_known
from shortlist.gallery.gallery import Gallery
from shortlist.serve.draining import Draining
from shortlist.serve.limits import Limits
from shortlist.serve.observer import AccessLog
from shortlist.serve.prometheus import Metrics
from shortlist.serve.service import WORKERS
from shortlist.serve.web_app import create_app
from shortlist.supervisor import supervise
from shortlist.threads import threads

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
SHUTDOWN_SECONDS = 3  # time to complete requests when the server is stopped; the others are answered with 503
SENDING_SECONDS = 1  # time to send these responses
BACKENDS = ("torch", "onnx")


def serve(
    gallery: Gallery,
    host: str = "127.0.0.1",
    port: int = 8080,
    limits: Limits | None = None,
    *,
    token: str | None = None,
    processes: int = 1,
    backend: str = "torch",
    access_log: Path | str | None = None,
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
        processes: Number of processes that answer requests. They map the same files of the gallery into memory; each
            has its own model.
        backend: Runtime that computes the vectors of uploads: torch, or onnx for ONNX Runtime on the CPU, which needs
            the extra `export`. Every model is converted, and compared with PyTorch, before it is used.
        access_log: File to which a JSON object per request is appended, or - for standard output.
        ready: Called with the URL, and whether other computers can reach it, when connections are accepted.

    Raises:
        ConfigError: The server cannot listen on this host and port; the token is too short; there is no such backend;
            or several processes are requested for a gallery that only this process can open.
        ModelError: The model cannot be converted, or its vectors differ in ONNX Runtime.
        KeyboardInterrupt: The server was interrupted, not terminated.
    """
    _check_backend(backend)
    if processes > 1 and gallery.opened_as is None:
        raise ConfigError(f"Only this process can open the gallery {gallery.name}: use 1 for `processes`.")
    with _listen(host, port) as listening, tempfile.TemporaryDirectory() as temporary:
        address, port = listening.getsockname()[:2]
        local = ipaddress.ip_address(address).is_loopback
        hosts = {*LOCAL_NAMES, _url_host(host).lower()} if local else None
        cores = max(1, torch.get_num_threads() // processes)
        models = Path(temporary, "models") if backend == "onnx" else None
        settings = _Settings(limits or Limits(), hosts, token, access_log, cores, models)

        def announce() -> None:
            if ready is not None:
                ready(f"http://{_url_host(host)}:{port}", not local)

        if processes == 1:
            _answer(announce, gallery, listening, settings)
            return
        metrics = Path(temporary, "metrics")
        metrics.mkdir()
        arguments = (gallery.opened_as, listening, dataclasses.replace(settings, metrics=metrics))
        # The socket is closed first, so that no client connects without being answered.
        supervise(processes, _open_and_answer, arguments, announce, ending=listening.close)


def _check_backend(backend: str) -> None:
    """Check that there is such a backend, and that its packages are installed."""
    check_known("`backend`", backend, BACKENDS)
    if backend == "onnx":
        from shortlist.encoding.onnx_network import require_onnx

        require_onnx('`backend="onnx"`')


@dataclass(frozen=True)
class _Settings:
    limits: Limits
    hosts: Collection[str] | None
    token: str | None
    access_log: Path | str | None
    cores: int  # for this process
    models: Path | None = None  # folder for models in ONNX Runtime, which the processes share; None: PyTorch
    metrics: Path | None = None  # folder that the processes share


def _open_and_answer(
    ready: Callable[[], None], opened_as: tuple[str, str | None], listening: socket.socket, settings: _Settings
) -> None:
    with closing(Gallery.open(*opened_as)) as gallery:
        _answer(ready, gallery, listening, settings)


def _answer(ready: Callable[[], None], gallery: Gallery, listening: socket.socket, settings: _Settings) -> None:
    """Answer requests in this process."""
    with threads(max(1, settings.cores // WORKERS)), ExitStack() as stack:
        log = None if settings.access_log is None else stack.enter_context(closing(AccessLog(settings.access_log)))
        if settings.models is not None:
            from shortlist.encoding.onnx_network import in_onnx_runtime

            prepare = functools.partial(in_onnx_runtime, folder=settings.models, threads=settings.cores)
            stack.enter_context(gallery.preparing_encoders(prepare))
        metrics = Metrics(settings.metrics)
        app = create_app(
            gallery, settings.limits, settings.hosts, token=settings.token, metrics=metrics, access_log=log
        )
        server = _Server(app)
        stack.enter_context(_returning_when_terminated())  # last, so that signals end a process that loads its model
        ready()
        server.run(sockets=[listening])


class _Server(uvicorn.Server):
    """uvicorn's server. When it is stopped, it answers all requests, and prints no messages."""

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
    """Ignore the signal that uvicorn raises again after an orderly shutdown."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
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
        raise ConfigError(f"Cannot listen on {host}, port {port} ({reason}): try another `port` or `host`.") from None


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
