"""Progress bars, plain lines and JSON lines, with a clock that the tests control."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

from shortlist import progress
from shortlist.progress import Display, Lines, Notebook, Terminal, default_display, display_for
from tests.processes import LONG


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def lines(stream: io.StringIO, clock: Clock) -> Lines:
    return Lines(stream, clock=clock)


def written(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


class TestLines:
    def test_start_state_and_end(self, lines: Lines, stream: io.StringIO, clock: Clock) -> None:
        with lines.task("embedding shop", "images") as advance:
            assert written(stream) == ["embedding shop: started"]
            clock.now += 1
            advance(1_000, 50_000)
            assert len(written(stream)) == 1  # not due yet
            clock.now += 20
            advance(3_000, 50_000)
            assert written(stream)[1:] == [
                "embedding shop: 3,000 of 50,000 images (6 %), 100 images/s, 7 min 50 s left"
            ]
            clock.now += 5
            advance(50_000, 50_000)
        assert written(stream)[2:] == ["embedding shop: done, 50,000 images in 26 s"]
        with lines.task("embedding shop", "images") as advance:
            advance(1, 1)
        assert written(stream)[-1] == "embedding shop: done, 1 image in 0 s"

    @pytest.mark.parametrize("every", [0.01, 1, 7, 10])
    def test_at_least_every_30_seconds(self, every: float, lines: Lines, stream: io.StringIO, clock: Clock) -> None:
        steps, times, seen = int(300 / every), [clock.now], 1
        with lines.task("work") as advance:
            for step in range(steps):
                clock.now += every
                advance(step, steps)
                if len(written(stream)) > seen:
                    seen = len(written(stream))
                    times.append(clock.now)
        gaps = [later - earlier for earlier, later in zip(times, [*times[1:], clock.now], strict=True)]
        assert max(gaps) <= 30
        assert len(times) <= 300 / progress.INTERVAL + 1  # and not more often than needed

    def test_stalled_work_is_reported_with_its_next_step(self, lines: Lines, stream: io.StringIO, clock: Clock) -> None:
        with lines.task("training", "steps") as advance:
            advance(0, 4)
            clock.now += 100
            advance(1, 4, epoch=1, loss=0.25, images_per_second=40.4)
        assert written(stream)[1] == (
            "training: 1 of 4 steps (25 %), epoch 1, loss 0.25, 40 images/s, 0.01 steps/s, 5 min 00 s left"
        )

    def test_work_that_does_not_advance_is_reported_by_a_thread(
        self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress, "INTERVAL", 0.001)
        display, end = Lines(stream), time.monotonic() + LONG
        with display.task("writing model.onnx"):
            while len(written(stream)) < 3:
                assert time.monotonic() < end
                time.sleep(0.001)
        assert re.fullmatch(r"writing model.onnx: .+ so far", written(stream)[1])
        assert re.fullmatch(r"writing model.onnx: done in .+", written(stream)[-1])

    def test_no_thread_is_left(self, lines: Lines) -> None:
        before = set(threading.enumerate())
        for _ in range(3):
            with lines.task("work"), lines.task("part"):
                (own,) = set(threading.enumerate()) - before
            own.join(LONG)
            assert not own.is_alive()

    def test_an_inner_task_is_reported_if_it_takes_long(self, lines: Lines, stream: io.StringIO, clock: Clock) -> None:
        with lines.task("training", "steps") as advance:
            with lines.task("ranking"):
                pass
            assert written(stream) == ["training: started"]
            with lines.task("embedding", "images") as inner:
                inner(5, 10)
                clock.now += 25
                inner(6, 10)
            clock.now += 25
            advance(1, 2)
        assert [line.partition(":")[0] for line in written(stream)[1:]] == ["embedding", "training", "training"]

    def test_a_later_task_is_shown_only_if_it_advances(self, lines: Lines, stream: io.StringIO) -> None:
        with lines.task("building the index", later=True):
            pass
        assert written(stream) == []
        with lines.task("building the index", later=True) as advance:
            advance(2, 2)
        assert written(stream) == ["building the index: started", "building the index: done, 2 in 0 s"]

    @pytest.mark.parametrize(("unit", "count"), [("pairs", "1 pair"), ("queries", "1 query"), ("", "1")])
    def test_one_item(self, unit: str, count: str, lines: Lines, stream: io.StringIO) -> None:
        with lines.task("comparing", unit) as advance:
            advance(1, 1)
        assert written(stream)[-1] == f"comparing: done, {count} in 0 s"

    def test_work_of_an_earlier_run_is_not_speed(self, lines: Lines, stream: io.StringIO, clock: Clock) -> None:
        with lines.task("embedding", "images") as advance:
            advance(40_000, 50_000)  # done by an earlier run that is resumed
            clock.now += 50
            advance(40_100, 50_000)
        assert "2 images/s, 1 h 22 min left" in written(stream)[1]

    def test_failed_work_has_no_line_at_its_end(self, lines: Lines, stream: io.StringIO, clock: Clock) -> None:
        with pytest.raises(ZeroDivisionError), lines.task("work") as advance:
            advance(1, 1 // 0)
        clock.now += 100
        lines.report_if_due()
        assert written(stream) == ["work: started"]

    def test_messages_are_printed_immediately(self, lines: Lines, stream: io.StringIO) -> None:
        lines.message("Grüße aus [bold]", fact=1)
        assert written(stream) == ["Grüße aus [bold]"]

    def test_a_closed_stream_ends_the_thread_silently(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The worker gets an error from its own next line."""
        monkeypatch.setattr(progress, "INTERVAL", 0.001)
        stream, failed = io.StringIO(), threading.Event()
        monkeypatch.setattr(threading, "excepthook", lambda _: failed.set())
        before = threading.active_count()

        def until_the_thread_ends() -> None:
            stream.close()
            end = time.monotonic() + LONG
            while threading.active_count() > before:
                assert time.monotonic() < end
                time.sleep(0.001)

        with pytest.raises(ValueError, match="closed"), Lines(stream).task("work"):
            until_the_thread_ends()
        assert not failed.is_set()


def test_json_lines(stream: io.StringIO, clock: Clock) -> None:
    display = Lines(stream, as_json=True, clock=clock)
    display.message("9 steps", steps=9)
    with display.task("training", "steps") as advance:
        advance(0, 9)
        clock.now += 30
        advance(3, 9, epoch=1, loss=0.5)
        with display.task("ranking"):
            clock.now += 30
            display.report_if_due()
    assert [json.loads(line) for line in written(stream)] == [
        {"message": "9 steps", "steps": 9},
        {"progress": "training", "state": "started"},
        {
            "progress": "training",
            "state": "running",
            "seconds": 30.0,
            "done": 3,
            "total": 9,
            "epoch": 1,
            "loss": 0.5,
            "rate": 0.1,
            "seconds_left": 60.0,
        },
        {"progress": "ranking", "state": "running", "seconds": 30.0},
        {"progress": "training", "state": "done", "seconds": 60.0, "done": 3, "total": 9, "epoch": 1, "loss": 0.5},
    ]


class TestTerminal:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")

    def test_a_bar_and_messages_above_it(self) -> None:
        screen = Screen()
        display = display_for(screen)
        assert isinstance(display, Terminal)
        with display.task("training [1]", "steps") as advance, display.task("ranking", later=True) as ranking:
            advance(3, 9, epoch=1, loss=0.5)
            display._bars.refresh()
            assert re.search(r"training \[1\] .*3/9\S* +steps  epoch 1  loss 0.5", screen.getvalue())
            assert "ranking" not in screen.getvalue()
            ranking(1, 2)
            display._bars.refresh()
            assert re.search(r"ranking .*1/2", screen.getvalue())
            display.message("a path that is wider than the terminal " * 4)
        assert "a path that is wider than the terminal " * 4 in screen.getvalue()  # so that it can be copied
        assert not display._bars.live.is_started

    def test_a_dumb_terminal_gets_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(display_for(Screen()), Lines)

    def test_json_lines_instead_of_bars(self) -> None:
        assert isinstance(display_for(Screen(), as_json=True), Lines)


def test_a_pipe_has_no_bars(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in continuous integration
    assert isinstance(display_for(stream), Lines)


class Handle:
    def __init__(self, picture: object) -> None:
        self.pictures = [shown(picture)]

    def update(self, picture: object) -> None:
        self.pictures.append(shown(picture))


def shown(picture: object) -> str:
    """The plain text that IPython would show."""
    return picture._repr_mimebundle_(include=[], exclude=[])["text/plain"]  # type: ignore[attr-defined]


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Handle]]:
    """A notebook: what is displayed in it, one handle for each display."""
    found: list[Handle] = []

    def display(picture: object, *, display_id: bool) -> Handle:
        assert display_id
        found.append(Handle(picture))
        return found[-1]

    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return found


class TestNotebook:
    def test_bars(self, handles: list[Handle], clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
        display = Notebook(clock)
        with display.task("embedding", "images") as advance:
            with display.task("building the index", later=True) as indexing:
                for done in range(1, 101):
                    clock.now += 0.02
                    advance(done, 100)
                clock.now += 1
                indexing(1, 2)
            display.message("a message")
        (handle,) = handles
        assert "0/?" in handle.pictures[0].replace(" ", "")
        assert len(handle.pictures) <= 100 * 0.02 / progress.REDRAW_INTERVAL + 3  # not at every step
        assert "building the index" in handle.pictures[-2]
        assert "100/100" in handle.pictures[-1]  # the finished bar stays visible
        assert "building" not in handle.pictures[-1]
        assert capsys.readouterr().out == "a message\n"
        with display.task("ranking"):
            pass
        assert len(handles) == 2
        assert "0/0" in handles[-1].pictures[-1]  # finished, although nothing was counted
        with display.task("building the index", later=True):
            pass
        assert len(handles) == 2
        with pytest.raises(ZeroDivisionError), display.task("drawing"):
            1 // 0  # noqa: B018
        assert "0/?" in handles[-1].pictures[-1]

    def test_is_the_default_in_a_notebook(self, handles: list[Handle]) -> None:
        assert isinstance(default_display(), Notebook)


class TestDefault:
    def test_a_script_shows_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", Screen())
        assert type(default_display()) is Display

    def test_a_prompt_shows_bars(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        monkeypatch.setattr(sys, "stderr", Screen())
        assert type(default_display()) is Terminal
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert type(default_display()) is Display
