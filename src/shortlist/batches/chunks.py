"""The images of a batch, as chunks that can be read twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from shortlist.batches.memory import is_out_of_memory
from shortlist.batches.sizes import Images
from shortlist.errors import RunError


class Parts:
    """The images as a sequence of parts that can be read again, each read from its iterator only once."""

    def __init__(self, images: Images | Iterable[Images]) -> None:
        whole = isinstance(images, Tensor | list | tuple)
        self._read: list[Images] = [images] if whole else []  # type: ignore[list-item]
        self._rest: Iterator[Any] = iter(()) if whole else iter(images)

    def __iter__(self) -> Iterator[Images]:
        yield from self._read
        while (part := self._next()) is not None:
            self._read.append(part)
            yield part

    def _next(self) -> Images | None:
        try:
            part: Images | None = next(self._rest, None)
        except Exception as error:
            if is_out_of_memory(error):  # an iterator that failed cannot be asked again
                raise RunError(
                    "Out of memory while images were read. Use fewer or smaller images, or `keep_graphs=False`."
                ) from error
            raise
        return part


def split(parts: Iterable[Images], size: int) -> Iterator[Images]:
    """Chunks of at most so many images; none crosses the border of a part."""
    for part in parts:
        for start in range(0, len(part), size):
            yield part[start : start + size]
