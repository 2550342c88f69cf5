"""What a person sees of a long piece of work, and what a program reads of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]  # done, of how many


class Display:
    """Shows nothing: for use as a library."""

    def message(self, text: str, **facts: Any) -> None:
        """A sentence for people; the facts in it for programs."""

    @contextmanager
    def task(self, name: str, *, later: bool = False) -> Iterator[Advance]:
        """A bar for a piece of work; of one that comes `later`, as soon as it has begun."""
        yield lambda done, total: None

    @contextmanager
    def training(self, step: int, steps_an_epoch: int, total_steps: int) -> Iterator[None]:
        """Bars for the epochs and for the steps of one."""
        yield

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""


class Lines(Display):
    """A JSON object a line, for programs: messages only; the steps are in the run's metrics.jsonl."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def message(self, text: str, **facts: Any) -> None:
        print(json.dumps({"message": text, **facts}), file=self.stream, flush=True)


class Terminal(Display):
    """Progress bars."""

    def __init__(self, stream: TextIO) -> None:
        self.console = Console(file=stream, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._epochs = self._steps = TaskID(0)
        self._steps_an_epoch = 1

    def message(self, text: str, **facts: Any) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """The bars are on the screen while any task is."""
        outermost = not self._progress.live.is_started
        if outermost:
            self._progress.start()
        try:
            yield
        finally:
            if outermost:
                self._progress.stop()

    @contextmanager
    def task(self, name: str, *, later: bool = False) -> Iterator[Advance]:
        with self._shown():
            bar = self._progress.add_task(name, total=None, note="", visible=not later)
            try:
                yield lambda done, total: self._progress.update(bar, completed=done, total=total, visible=True)
            finally:
                self._progress.remove_task(bar)

    @contextmanager
    def training(self, step: int, steps_an_epoch: int, total_steps: int) -> Iterator[None]:
        self._steps_an_epoch = steps_an_epoch
        with self._shown():
            self._epochs = self._progress.add_task("run", total=total_steps, completed=step, note="")
            self._steps = self._progress.add_task("epoch", total=steps_an_epoch, note="")
            try:
                yield
            finally:
                self._progress.remove_task(self._epochs)
                self._progress.remove_task(self._steps)

    def step(self, record: dict[str, Any]) -> None:
        note = f"loss {record['loss']:.4f}  {record['images_per_second']:.0f} images/s"
        within = (record["step"] - 1) % self._steps_an_epoch + 1
        self._progress.update(self._epochs, completed=record["step"], note="steps")
        self._progress.update(self._steps, description=f"epoch {record['epoch']}", completed=within, note=note)


def display_for(stream: TextIO) -> Display:
    return Terminal(stream) if stream.isatty() else Lines(stream)
