"""Division of a batch of images into chunks that can be read twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shortlist.batches.by_size import Images
from shortlist.batches.memory import is_out_of_memory
from shortlist.errors import RunError


class BufferedParts:
    """Parts of a batch of images that can be iterated over repeatedly, though their source is read only once."""

    def __init__(self, parts: Iterable[Images]) -> None:
        self._buffer: list[Images] = []
        self._source: Iterator[Images] = iter(parts)

    def __iter__(self) -> Iterator[Images]:
        yield from self._buffer
        while (part := self._read()) is not None:
            self._buffer.append(part)
            yield part

    def _read(self) -> Images | None:
        try:
            return next(self._source, None)
        except Exception as error:
            if is_out_of_memory(error):  # the step cannot be repeated, because a failed iterator cannot be resumed
                raise RunError(
                    "Out of memory while reading images. Use fewer or smaller images, or `keep_graphs=False`."
                ) from error
            raise


def split(parts: Iterable[Images], size: int) -> Iterator[Images]:
    """Split parts into chunks of at most `size` images. No chunk contains images of two parts."""
    for part in parts:
        for start in range(0, len(part), size):
            yield part[start : start + size]
