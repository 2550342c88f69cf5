"""How much a visitor may ask for, and what is said to who asks for more."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 200  # results, or items of a page
LARGEST_ID = 2**53 - 1  # what a browser can count to


@dataclass(frozen=True)
class Limits:
    """Bounds of uploads.

    Args:
        bytes: of one file. Photographs of today's telephones have up to 15 MB.
        pixels: of one image; known from its header before it is decoded, which takes up to 24 bytes a pixel.
        seconds: for sending one file.
        uploads: files in memory at a time; more requests wait for their turn.
    """

    bytes: int = 20 * 2**20
    pixels: int = 50_000_000
    seconds: float = 60
    uploads: int = 8


class Refused(Exception):  # noqa: N818 - an answer
    """A request that gets a 4xx, and a sentence that says why."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
