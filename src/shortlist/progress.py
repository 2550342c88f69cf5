"""What a person sees of long work, and what a program reads of it: bars, plain lines or JSON lines."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

INTERVAL = 20.0  # seconds between two lines about a task: 30 are kept even where a line comes late
REDRAWN = 0.1  # seconds between two pictures of a bar in a notebook

Progress = Callable[[int, int], None]  # called with the number done and the total number
Clock = Callable[[], float]


class Advance(Protocol):
    """Says how far a task has come; also serves as a `Progress`."""

    def __call__(self, done: int, total: int, /, **facts: float) -> None: ...


class Display:
    """Shows nothing. The other displays in this module are this one, made visible."""

    def message(self, text: str, **facts: Any) -> None:
        """Show a sentence to people, and the facts in it to programs."""

    @contextmanager
    def task(self, name: str, unit: str = "", *, later: bool = False) -> Iterator[Advance]:
        """Show how far a piece of work has come while it is done inside.

        Args:
            name: what is being done.
            unit: what is counted, in the plural.
            later: the work may not come at all: nothing is shown before it advances.
        """
        yield lambda done, total, /, **facts: None


class Lines(Display):
    """Lines for a pipe or a log file.

    The outermost task has a line where it starts and one where it ends. In between, while tasks are under way, the
    state of the innermost is told at least every 30 seconds, even if it does not advance.

    Args:
        stream: where they are written.
        as_json: one JSON object per line, with "message" or "progress", instead of text.
        clock: in seconds.
    """

    def __init__(self, stream: TextIO, *, as_json: bool = False, clock: Clock = time.monotonic) -> None:
        self.stream, self.as_json, self.clock = stream, as_json, clock
        self._lock = threading.RLock()  # a signal's handler may write while a line is being written
        self._tasks: list[_Task] = []  # under way, the innermost last
        self._told = 0.0  # when the last line about a task was written

    def message(self, text: str, **facts: Any) -> None:
        self._write(text, {"message": text, **facts})

    @contextmanager
    def task(self, name: str, unit: str = "", *, later: bool = False) -> Iterator[Advance]:
        task = _Task(name, unit, self.clock())

        def advance(done: int, total: int, /, **facts: float) -> None:
            with self._lock:
                if task not in self._tasks:
                    self._begin(task)
                task.advance(done, total, facts, self.clock())
                self.tell_if_due()

        if not later:
            self._begin(task)
        try:
            yield advance
            self._tell_end(task)
        finally:
            with self._lock:
                if task in self._tasks:
                    self._tasks.remove(task)
                task.ended.set()

    def tell_if_due(self) -> None:
        """Write the state of the innermost task, if there is one and nothing was told for a while."""
        with self._lock:
            now = self.clock()
            if self._tasks and now - self._told >= INTERVAL:
                self._tell(*self._tasks[-1].state(now))

    def _begin(self, task: _Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if len(self._tasks) == 1:
                self._tell(f"{task.name}: started", {"progress": task.name, "state": "started"})
                threading.Thread(target=self._keep_telling, args=(task.ended,), daemon=True).start()

    def _tell_end(self, task: _Task) -> None:
        with self._lock:
            if self._tasks[:1] == [task]:
                self._tell(*task.end(self.clock()))

    def _keep_telling(self, ended: threading.Event) -> None:
        """While tasks are under way, in a thread of its own: work that does not advance is told of as well."""
        with suppress(OSError, ValueError):  # nobody reads any more
            while not ended.wait(max(self._told + INTERVAL - self.clock(), 0.01)):
                self.tell_if_due()

    def _tell(self, text: str, facts: dict[str, Any]) -> None:
        self._told = self.clock()
        self._write(text, facts)

    def _write(self, text: str, facts: dict[str, Any]) -> None:
        with self._lock:
            print(json.dumps(facts) if self.as_json else text, file=self.stream, flush=True)


@dataclass(eq=False)
class _Task:
    name: str
    unit: str
    begun: float
    done: int | None = None
    total: int = 0
    facts: dict[str, float] = field(default_factory=dict)
    first: tuple[int, float] = (0, 0.0)  # how many were done when it was first told, and when: they may be of before
    ended: threading.Event = field(default_factory=threading.Event)

    def advance(self, done: int, total: int, facts: dict[str, float], now: float) -> None:
        if self.done is None:
            self.first = done, now
        self.done, self.total, self.facts = done, total, facts

    def state(self, now: float) -> tuple[str, dict[str, Any]]:
        """For people, and for programs."""
        facts: dict[str, Any] = {"progress": self.name, "state": "running", "seconds": round(now - self.begun, 1)}
        if self.done is None:
            return f"{self.name}: {duration(now - self.begun)} so far", facts
        of = f"{self.done:,} of {self.total:,}{self._unit} ({100 * self.done // max(self.total, 1)} %)"
        parts = [of, *shown_facts(self.facts)]
        facts |= {"done": self.done, "total": self.total, **self.facts}
        rate = (self.done - self.first[0]) / max(now - self.first[1], 1e-9)
        if rate > 0:
            left = (self.total - self.done) / rate
            parts += [f"{_number(rate)}{self._unit}/s", f"{duration(left)} left"]
            facts |= {"rate": rate, "seconds_left": round(left, 1)}
        return f"{self.name}: {', '.join(parts)}", facts

    def end(self, now: float) -> tuple[str, dict[str, Any]]:
        seconds = now - self.begun
        facts: dict[str, Any] = {"progress": self.name, "state": "done", "seconds": round(seconds, 1)}
        if self.done is None:
            return f"{self.name}: done in {duration(seconds)}", facts
        facts |= {"done": self.done, "total": self.total, **self.facts}
        return f"{self.name}: done, {self.done:,}{self._unit} in {duration(seconds)}", facts

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""


class Terminal(Display):
    """Bars in a terminal, gone when the work is done."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self.console = Console(file=stream, highlight=False)
        self._bars = _bars(console=self.console, transient=True)

    def message(self, text: str, **facts: Any) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str, unit: str = "", *, later: bool = False) -> Iterator[Advance]:
        bar = self._bars.add_task(name, total=None, note=unit, visible=not later)

        def advance(done: int, total: int, /, **facts: float) -> None:
            note = "  ".join([unit, *shown_facts(facts)])
            self._bars.update(bar, completed=done, total=total, visible=True, note=note)
            self._changed()

        self._changed()
        try:
            yield advance
            if not later and self._bars.tasks[-1].total is None:  # there was nothing to count
                advance(0, 0)  # which is a full bar
        finally:
            self._close(bar)

    def _changed(self) -> None:
        """The bars are on the screen while there is any task; a thread of theirs draws them."""
        if not self._bars.live.is_started:
            self._bars.start()

    def _close(self, bar: TaskID) -> None:
        self._bars.remove_task(bar)
        if not self._bars.tasks:
            self._bars.stop()


class Notebook(Terminal):
    """Bars in the output of a notebook's cell, where those of outermost tasks stay.

    IPython shows them, which is in every notebook; rich's own way needs ipywidgets, which is not.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        from IPython.display import display

        super().__init__(sys.stdout)
        self.clock, self._display, self._drawn = clock, display, -REDRAWN
        self._handle: Any = None  # of the picture in the output

    def message(self, text: str, **facts: Any) -> None:
        print(text, flush=True)

    def _changed(self) -> None:
        if self.clock() - self._drawn >= REDRAWN:
            self._draw()

    def _close(self, bar: TaskID) -> None:
        if len(self._bars.tasks) == 1:
            self._draw()
            self._handle = None  # what comes next is drawn below
        self._bars.remove_task(bar)

    def _draw(self) -> None:
        if not any(task.visible for task in self._bars.tasks):
            return
        self._drawn = self.clock()
        picture = self._bars.make_tasks_table(self._bars.tasks)
        if self._handle is None:
            self._handle = self._display(picture, display_id=True)
        else:
            self._handle.update(picture)


def _bars(**options: Any) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        **options,
    )


def display_for(stream: TextIO, *, as_json: bool = False) -> Display:
    """Bars in a terminal; plain lines in a pipe, in a file and in a terminal that cannot draw; or JSON lines."""
    if not as_json and stream.isatty():
        from rich.console import Console

        if not Console(file=stream).is_dumb_terminal:
            return Terminal(stream)
    return Lines(stream, as_json=as_json)


def default_display() -> Display:
    """For a call from Python: bars where a person is watching, in a notebook or at a prompt; a script shows nothing."""
    from rich.console import Console

    if Console().is_jupyter:
        return Notebook()
    return Terminal(sys.stderr) if hasattr(sys, "ps1") and sys.stderr.isatty() else Display()


def shown_facts(facts: dict[str, float]) -> list[str]:
    """For people.

    >>> shown_facts({"epoch": 3, "loss": 0.12345, "images_per_second": 1234.6})
    ['epoch 3', 'loss 0.1235', '1,235 images/s']
    """
    rate = "_per_second"
    return [
        f"{_number(value)} {name.removesuffix(rate)}/s" if name.endswith(rate) else f"{name} {value:.4g}"
        for name, value in facts.items()
    ]


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def duration(seconds: float) -> str:
    """For people.

    >>> [duration(seconds) for seconds in (0.4, 59.6, 3599, 7265)]
    ['0 s', '1 min 00 s', '59 min 59 s', '2 h 01 min']
    """
    minutes, left = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"
