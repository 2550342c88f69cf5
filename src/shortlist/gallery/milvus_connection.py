"""Requests to Milvus, with one-line errors. A change waits for a server that is restarting."""

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

RESTART_SECONDS = 180.0  # maximum time that a change waits for the server
RETRY_SECONDS = 0.5
# Error codes of Milvus for a server that has just been started: it is not ready or unavailable, a collection or shard
# is not loaded yet, or nodes are missing.
NOT_READY = frozenset({1, 2, 101, 103, *range(400, 404), *range(500, 506), *range(900, 906)})


class ServerUnavailable(GalleryError):  # noqa: N818 - not an error of the request
    """The server does not answer, or is not ready yet."""


class MilvusConnection:
    """A pymilvus client, with the same methods. They must be used only for requests that may be repeated.

    Args:
        address: Address of the collection, for messages.
        client: The client.
    """

    def __init__(self, address: MilvusAddress, client: Any) -> None:
        self._address, self._client, self._retries = address, client, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._request, getattr(self._client, name))

    @contextmanager
    def retrying(self) -> Iterator[None]:
        """Repeat requests within the context until the server answers, for up to three minutes."""
        self._retries = True
        try:
            yield
        finally:
            self._retries = False

    def without_retries(self) -> MilvusConnection:
        """Return the same connection, which does not repeat requests."""
        return MilvusConnection(self._address, self._client)

    def _request(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        unavailable_since: float | None = None
        while True:
            try:
                with translate_errors(self._address):
                    return method(*args, **kwargs)
            except ServerUnavailable as error:
                if not self._retries:
                    raise
                if unavailable_since is None:
                    unavailable_since = time.monotonic()
                    warnings.warn(f"{error}; waiting for the server", stacklevel=2)
                if time.monotonic() - unavailable_since > RESTART_SECONDS:
                    raise GalleryError(
                        f"{error}, for {RESTART_SECONDS:.0f} seconds. Start the server and repeat the command to "
                        "resume it."
                    ) from error
                time.sleep(RETRY_SECONDS)


@contextmanager
def translate_errors(address: MilvusAddress, hint: str = "") -> Iterator[None]:
    """Convert errors of Milvus to a GalleryError whose message is one line, followed by the hint."""
    from grpc import RpcError, StatusCode
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        unavailable = error.code in (*NOT_READY, StatusCode.UNAVAILABLE) and not address.lite
        message = f"{address}: {' '.join(str(error.message).split())}{hint}"
        raise (ServerUnavailable if unavailable else GalleryError)(message) from error
    except RpcError as error:  # not converted by pymilvus, such as an exceeded deadline
        details = error.details() if hasattr(error, "details") else error
        raise GalleryError(f"{address}: {' '.join(str(details).split())}{hint}") from error
