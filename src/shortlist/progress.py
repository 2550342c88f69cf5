"""Progress and messages of long-running work: bars in a terminal or notebook, plain lines, or JSON lines."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from shortlist.extras import extra

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

INTERVAL = 20.0  # seconds between two lines about a task; less than the documented 30, since a line may be late
REDRAW_INTERVAL = 0.1  # seconds between two updates of a bar in a notebook

Progress = Callable[[int, int], None]  # called with the number done and the total number
Clock = Callable[[], float]


class Advance(Protocol):
    """Callback that reports the progress of a task and facts such as the loss. Also usable as a `Progress`.

    The fact `seconds_left` is an estimate of the remaining time, by default computed from the rate so far.
    """

    def __call__(self, done: int, total: int, /, **facts: float) -> None: ...


class Display:
    """A display that shows nothing, and the interface of the other displays."""

    shows = False  # whether anything is shown

    def message(self, text: str, **facts: Any) -> None:
        """Show a message.

        Args:
            text: The message for people.
            facts: The same information for programs: the fields of a JSON line.
        """

    @contextmanager
    def task(self, name: str, unit: str = "", *, later: bool = False) -> Iterator[Advance]:
        """Show the progress of the work done inside the `with` block.

        Args:
            name: Description of the task, such as "embedding images".
            unit: What is counted, in the plural, such as "images".
            later: Show nothing before the task advances, because it may turn out to be unnecessary.

        Yields:
            Callback that reports the progress.
        """
        yield lambda done, total, /, **facts: None


class Lines(Display):
    """Plain or JSON lines, for a pipe or a log file.

    The outermost task prints a line when it starts and one when it ends. In between, the state of the innermost
    running task is printed at least every 30 seconds, even if it does not advance.

    Args:
        stream: Stream to write to.
        as_json: Write one JSON object per line, with the key "message" or "progress", instead of text.
        clock: Function that returns the time in seconds.
    """

    shows = True

    def __init__(self, stream: TextIO, *, as_json: bool = False, clock: Clock = time.monotonic) -> None:
        self.stream, self.as_json, self.clock = stream, as_json, clock
        self._lock = threading.RLock()  # a signal handler may write while a line is being written
        self._tasks: list[_Task] = []  # running tasks, the innermost last
        self._last_report = 0.0  # time of the last line about a task

    def message(self, text: str, **facts: Any) -> None:
        self._write(text, {"message": text, **facts})

    @contextmanager
    def task(self, name: str, unit: str = "", *, later: bool = False) -> Iterator[Advance]:
        task = _Task(name, unit, self.clock())

        def advance(done: int, total: int, /, **facts: float) -> None:
            with self._lock:
                if task not in self._tasks:
                    self._start(task)
                task.advance(done, total, facts, self.clock())
                self.report_if_due()

        if not later:
            self._start(task)
        try:
            yield advance
            self._report_end(task)
        finally:
            with self._lock:
                if task in self._tasks:
                    self._tasks.remove(task)
                task.ended.set()

    def report_if_due(self) -> None:
        """Write the state of the innermost task if no line was written for `INTERVAL` seconds."""
        with self._lock:
            now = self.clock()
            if self._tasks and now - self._last_report >= INTERVAL:
                self._report(*self._tasks[-1].state(now))

    def _start(self, task: _Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if len(self._tasks) == 1:
                self._report(f"{task.name}: started", {"progress": task.name, "state": "started"})
                threading.Thread(target=self._report_periodically, args=(task.ended,), daemon=True).start()

    def _report_end(self, task: _Task) -> None:
        with self._lock:
            if self._tasks[:1] == [task]:
                self._report(*task.end(self.clock()))

    def _report_periodically(self, ended: threading.Event) -> None:
        """Report periodically until the task ends, in a separate thread, so that stalled work is reported as well."""
        with suppress(OSError, ValueError):  # the stream was closed
            while not ended.wait(max(self._last_report + INTERVAL - self.clock(), 0.01)):
                self.report_if_due()

    def _report(self, text: str, facts: dict[str, Any]) -> None:
        self._last_report = self.clock()
        self._write(text, facts)

    def _write(self, text: str, facts: dict[str, Any]) -> None:
        with self._lock:
            print(json.dumps(facts) if self.as_json else text, file=self.stream, flush=True)


@dataclass(eq=False)
class _Task:
    name: str
    unit: str
    started: float
    done: int | None = None
    total: int = 0
    facts: dict[str, float] = field(default_factory=dict)
    first: tuple[int, float] = (0, 0.0)  # items done at the first report (maybe by an earlier run), and its time
    end_expected: float | None = None  # time, if the caller reports `seconds_left`
    ended: threading.Event = field(default_factory=threading.Event)

    def advance(self, done: int, total: int, facts: dict[str, float], now: float) -> None:
        if self.done is None:
            self.first = done, now
        self.done, self.total, self.facts = done, total, dict(facts)
        seconds = self.facts.pop("seconds_left", None)
        self.end_expected = None if seconds is None else now + seconds

    def rate(self, now: float) -> float:
        """Return the number of items per second."""
        return ((self.done or 0) - self.first[0]) / max(now - self.first[1], 1e-9)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimate of the remaining time, if there is one yet."""
        if self.end_expected is not None:
            return max(0.0, self.end_expected - now)
        rate = self.rate(now)
        return (self.total - (self.done or 0)) / rate if rate > 0 else None

    def state(self, now: float) -> tuple[str, dict[str, Any]]:
        """Return the current state as text and as facts."""
        facts: dict[str, Any] = {"progress": self.name, "state": "running", "seconds": round(now - self.started, 1)}
        if self.done is None:
            return f"{self.name}: {format_duration(now - self.started)} so far", facts
        count = f"{self.done:,} of {self.total:,}{self._unit} ({100 * self.done // max(self.total, 1)} %)"
        parts = [count, *format_facts(self.facts)]
        facts |= {"done": self.done, "total": self.total, **self.facts}
        rate, left = self.rate(now), self.seconds_left(now)
        if rate > 0 and left is not None:
            parts += [f"{_format_rate(rate)}{self._unit}/s", f"{format_duration(left)} left"]
            facts |= {"rate": rate, "seconds_left": round(left, 1)}
        return f"{self.name}: {', '.join(parts)}", facts

    def end(self, now: float) -> tuple[str, dict[str, Any]]:
        seconds = now - self.started
        facts: dict[str, Any] = {"progress": self.name, "state": "done", "seconds": round(seconds, 1)}
        if self.done is None:
            return f"{self.name}: done in {format_duration(seconds)}", facts
        facts |= {"done": self.done, "total": self.total, **self.facts}
        count = format_count(self.done, self.unit) if self.unit else f"{self.done:,}"
        return f"{self.name}: done, {count} in {format_duration(seconds)}", facts

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""


class Terminal(Display):
    """Progress bars in a terminal, removed when the work is done."""

    shows = True

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.console = _console(file=stream, highlight=False)
        self._bars = _bars(console=self.console, transient=True)

    def message(self, text: str, **facts: Any) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str, unit: str = "", *, later: bool = False) -> Iterator[Advance]:
        bar = self._bars.add_task(name, total=None, note=unit, visible=not later)
        task = _Task(name, unit, self.clock())

        def advance(done: int, total: int, /, **facts: float) -> None:
            task.advance(done, total, facts, self.clock())
            left = task.seconds_left(self.clock())
            note = "  ".join(
                [unit, *format_facts(task.facts), *([] if left is None else [f"{format_duration(left)} left"])]
            )
            self._bars.update(bar, completed=done, total=total, visible=True, note=note)
            self._changed()

        self._changed()
        try:
            yield advance
            if not later and self._bars.tasks[-1].total is None:  # nothing was counted
                advance(0, 0)  # shown as a full bar
        finally:
            self._close(bar)

    def _changed(self) -> None:
        """Start the thread that draws the bars, unless it is running."""
        if not self._bars.live.is_started:
            self._bars.start()

    def _close(self, bar: TaskID) -> None:
        self._bars.remove_task(bar)
        if not self._bars.tasks:
            self._bars.stop()


class Notebook(Terminal):
    """Progress bars in the output of a notebook cell; those of outermost tasks stay visible.

    They are displayed by IPython, which every notebook has. The widgets of rich would need ipywidgets.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        from IPython.display import display

        super().__init__(sys.stdout, clock)
        self._display, self._drawn = display, -REDRAW_INTERVAL
        self._handle: Any = None  # display handle of the current bars

    def message(self, text: str, **facts: Any) -> None:
        print(text, flush=True)

    def _changed(self) -> None:
        if self.clock() - self._drawn >= REDRAW_INTERVAL:
            self._draw()

    def _close(self, bar: TaskID) -> None:
        if len(self._bars.tasks) == 1:
            self._draw()
            self._handle = None  # the next task is drawn below
        self._bars.remove_task(bar)

    def _draw(self) -> None:
        if not any(task.visible for task in self._bars.tasks):
            return
        self._drawn = self.clock()
        table = self._bars.make_tasks_table(self._bars.tasks)
        if self._handle is None:
            self._handle = self._display(table, display_id=True)
        else:
            self._handle.update(table)


def _console(**options: Any) -> Console:
    with extra("training", "A progress bar"):
        from rich.console import Console
    return Console(**options)


def _bars(**options: Any) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        **options,
    )


def display_for(stream: TextIO, *, as_json: bool = False) -> Display:
    """Return the display for a stream: bars in a terminal that can draw them, plain lines elsewhere, or JSON lines."""
    if not as_json and stream.isatty() and not _console(file=stream).is_dumb_terminal:
        return Terminal(stream)
    return Lines(stream, as_json=as_json)


def default_display() -> Display:
    """Return the display for calls from Python: bars in a notebook or interactive session, nothing in a script."""
    if _console().is_jupyter:
        return Notebook()
    return Terminal(sys.stderr) if hasattr(sys, "ps1") and sys.stderr.isatty() else Display()


def format_facts(facts: dict[str, float]) -> list[str]:
    """Format facts for people.

    Example:
        >>> format_facts({"epoch": 3, "loss": 0.12345, "images_per_second": 1234.6})
        ['epoch 3', 'loss 0.1235', '1,235 images/s']
    """
    rate = "_per_second"
    return [
        f"{_format_rate(value)} {name.removesuffix(rate)}/s" if name.endswith(rate) else f"{name} {value:.4g}"
        for name, value in facts.items()
    ]


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def format_count(number: int, plural: str) -> str:
    """Format a number of things for people.

    Example:
        >>> format_count(1, "images"), format_count(1, "queries"), format_count(1, "classes")
        ('1 image', '1 query', '1 class')
        >>> format_count(2000, "images")
        '2,000 images'
    """
    if number != 1:
        return f"{number:,} {plural}"
    endings = (("ies", "y"), ("sses", "ss"), ("s", ""))
    return next(f"1 {plural.removesuffix(old)}{new}" for old, new in endings if plural.endswith(old))


def format_duration(seconds: float) -> str:
    """Format a duration for people.

    Example:
        >>> [format_duration(seconds) for seconds in (0.4, 59.6, 3599, 7265)]
        ['0 s', '1 min 00 s', '59 min 59 s', '2 h 01 min']
    """
    minutes, left = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"
