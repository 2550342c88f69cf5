"""Requests to Milvus: their errors are one line, and a change waits for a server that is restarted."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shortlist.gallery.store import GalleryError

if TYPE_CHECKING:
    from shortlist.gallery.milvus_address import MilvusAddress

RESTART_SECONDS = 180.0  # the longest time that a change waits for the server
RETRY_SECONDS = 0.5
# What requests get from a server that has just been started: not ready, unavailable, a collection or shard that is not
# loaded yet, nodes that are not there yet. See the error codes of Milvus.
NOT_READY = frozenset({1, 2, 101, 103, *range(400, 404), *range(500, 506), *range(900, 906)})


class ServerGone(GalleryError):  # noqa: N818 - not an error of the request
    """The server does not answer, or is not ready yet."""


class MilvusConnection:
    """A pymilvus client. Its methods are those of the client, which are used only for requests that may be repeated.

    Args:
        address: Address of the collection, for messages.
        client: The client.
    """

    def __init__(self, address: MilvusAddress, client: Any) -> None:
        self._address, self._client, self._patient = address, client, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._request, getattr(self._client, name))

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Repeat requests within the context until the server answers, for up to three minutes."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def impatient(self) -> MilvusConnection:
        """Return the same connection without patience."""
        return MilvusConnection(self._address, self._client)

    def _request(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gone_since: float | None = None
        while True:
            try:
                with translate_errors(self._address):
                    return method(*args, **kwargs)
            except ServerGone as error:
                if not self._patient:
                    raise
                if gone_since is None:
                    gone_since = time.monotonic()
                    warnings.warn(f"{error}; waiting for the server", stacklevel=2)
                if time.monotonic() - gone_since > RESTART_SECONDS:
                    raise GalleryError(
                        f"{error}, for {RESTART_SECONDS:.0f} seconds. Start the server and repeat the command, which "
                        "continues with what is stored"
                    ) from error
                time.sleep(RETRY_SECONDS)


@contextmanager
def translate_errors(address: MilvusAddress, hint: str = "") -> Iterator[None]:
    """Turn errors of Milvus into a GalleryError whose message is one line, followed by the hint."""
    from grpc import RpcError, StatusCode
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        gone = error.code in (*NOT_READY, StatusCode.UNAVAILABLE) and not address.lite
        message = f"{address}: {' '.join(str(error.message).split())}{hint}"
        raise (ServerGone if gone else GalleryError)(message) from error
    except RpcError as error:  # which pymilvus passes on, such as a deadline that was exceeded
        details = error.details() if hasattr(error, "details") else error
        raise GalleryError(f"{address}: {' '.join(str(details).split())}{hint}") from error
