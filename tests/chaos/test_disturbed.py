"""Commands that are killed, or whose disk is full or fails: the result is the same, or nothing has changed."""

from __future__ import annotations

import signal
import time

import pytest

from tests.chaos.extent import LONG, chance, times
from tests.chaos.operations import RUN_FILES, World, run_result

NAMES = (
    *("train simix", "train memory", "embed", "index", "gallery add", "gallery remove", "sweep", "report", "export"),
    "export to a file",
)


def test_changes_of_a_run_are_noticed(world: World) -> None:
    """Negative control: all files that a training writes at its end are part of its result."""
    home, result = world.copy(), run_result("run")
    expected = result(world.template)
    assert result(home) == expected
    for file in (home / "run" / name for name in RUN_FILES):
        content = file.read_bytes()
        file.unlink()
        assert result(home) != expected
        file.write_bytes(content + b" ")
        assert result(home) != expected
        file.write_bytes(content)


def test_files_that_are_left_behind_are_noticed(world: World) -> None:
    """Negative control: also if the operation itself has succeeded."""
    operation, home = world.operations["gallery remove"], world.copy()
    assert world.start(operation, home).wait() == 0
    (home / "gallery" / "left").touch()
    with pytest.raises(AssertionError, match=r"left behind: .*gallery/left"):
        world.check(operation, home)


@pytest.mark.parametrize("name", NAMES if LONG else ("train memory", "gallery remove", "export"))
def test_killed_when_a_file_changes(world: World, name: str) -> None:
    operation, draw = world.operations[name], chance(name)
    events = world.whole(name).events
    for _ in range(times(1, 10)):
        home, event = world.copy(), draw.randint(1, events)
        print(f"{name}: killed at change {event} of {events}")
        assert world.start(operation, home, "kill", event).wait() == -signal.SIGKILL
        world.check(operation, home)


@pytest.mark.skipif(not LONG, reason="make chaos runs it")
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_any_time(world: World, name: str) -> None:
    operation, draw, kills, seconds = world.operations[name], chance(name), 0, world.whole(name).seconds
    while kills < 5:
        home, after = world.copy(), draw.random() * seconds
        running = world.start(operation, home)
        print(f"{name}: killed after {after:.3f} seconds")
        end = time.monotonic() + after
        killed = running.kill(lambda running=running, end=end: running.ended() or time.monotonic() > end)
        world.check(operation, home)
        if killed == -signal.SIGKILL:
            kills += 1
        else:
            seconds /= 2  # it has ended before, because the machine is less busy now


@pytest.mark.parametrize("name", NAMES if LONG else ("embed", "gallery remove", "report"))
def test_a_full_disk(world: World, name: str) -> None:
    """One change of a file fails, or all that follow do, or files stay below a size, so that a write stops halfway."""
    operation, whole, draw = world.operations[name], world.whole(name), chance(name)
    moments = [(how, event) for event in range(1, whole.events + 1) for how in ("error", "full")]
    for how, event in moments if LONG else draw.sample(moments, 1):
        home, room = world.copy(), draw.choice((0, round(whole.largest ** draw.random())))
        print(f"{name}: {how} at change {event} of {whole.events}, files of {room} bytes")
        code, out, error = world.disturb(operation, home, how, event, room)
        assert code in (0, 1), error
        assert "Traceback" not in error
        if code == 0:  # a training that cannot write its report says so
            assert operation.result(home) == whole.result or "The report could not be written (" in out, error
        else:
            (said,) = [line for line in error.splitlines() if line.startswith("Error: ")]
            assert "No space left" in said or "File too large" in said, error
            assert any(word in said for word in ("The folder", *operation.command[1:])), error  # it names the place
        world.check(operation, home, leaves=False)
