"""Limits of requests, and the error that refuses a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_RESULTS = 200  # results of a search, or items of a page
MAX_ID = 2**53 - 1  # the largest integer that JavaScript represents exactly
RETRY_SECONDS = 5  # after which a client may repeat a request that was refused because the server is busy


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        bytes: Maximum size of an uploaded file. Photographs of current phones have up to 15 MB.
        pixels: Maximum number of pixels of an uploaded or gallery image, read from its header. Decoding takes up to 24
            bytes per pixel.
        seconds: Maximum duration of an upload.
        grace: Number of seconds after which an upload must have reached the minimum rate.
        rate: Minimum rate of an upload in bytes per second.
        uploads: Memory for uploads, as a number of files of the maximum size. One client may use half of it.
        client_uploads: Maximum number of uploads of one client at a time.
        wait_seconds: Maximum time that a request waits for memory, and that it waits for a thread. After that, the
            status is 503.
        work_seconds: Maximum duration of other work for a request, such as opening a file or a search.
    """

    bytes: int = 20 * 2**20
    pixels: int = 50_000_000
    seconds: float = 60
    grace: float = 5
    rate: int = 2**14
    uploads: int = 8
    client_uploads: int = 64
    wait_seconds: float = 30
    work_seconds: float = 30


class RequestError(Exception):
    """A request is answered with this status and a message."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def busy(reason: str) -> RequestError:
    """Return the error for a request that may succeed later.

    >>> str(busy("it receives too many uploads"))
    'The server is busy: it receives too many uploads. Try again in 5 seconds.'
    """
    message = f"The server is busy: {reason}. Try again in {RETRY_SECONDS} seconds."
    return RequestError(503, message, {"Retry-After": str(RETRY_SECONDS)})


def describe_errors(errors: Sequence[Mapping[str, Any]]) -> str:
    """Convert pydantic's errors to a sentence that names the invalid values.

    >>> describe_errors([{"loc": ("query", "k"), "msg": "Input should be less than or equal to 200"}])
    'k: input should be less than or equal to 200.'
    """
    return "; ".join(_describe(error) for error in errors) + "."


def _describe(error: Mapping[str, Any]) -> str:
    name = str(error["loc"][-1]) if error["loc"] else "the request"
    message = str(error["msg"]).rstrip(".")
    return f"{name}: {message[:1].lower()}{message[1:]}"
