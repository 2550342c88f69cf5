"""A display that records messages and the progress of each task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shortlist.progress import Advance, Display


class Told(Display):
    def __init__(self) -> None:
        self.tasks: list[tuple[str, int, int]] = []
        self.messages: list[str] = []

    def message(self, text: str, **facts: object) -> None:
        self.messages.append(text)

    @contextmanager
    def task(self, name: str, unit: str = "", *, later: bool = False) -> Iterator[Advance]:
        yield lambda done, total, /, **facts: self.tasks.append((name, done, total))

    def of(self, name: str) -> list[tuple[int, int]]:
        """Return the progress of one task: what was done and the total."""
        return [(done, total) for each, done, total in self.tasks if each == name]
