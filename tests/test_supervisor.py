"""Processes are restarted when they end, and end with the process that started them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shortlist.errors import ConfigError, RunError
from shortlist.supervisor import supervise

LONG = 300.0  # seconds


def wait_for_ever(ready: Callable[[], None], folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    ready()
    signal.pause()


def refuse(ready: Callable[[], None]) -> None:
    raise ConfigError("there is no such gallery")


def end(ready: Callable[[], None]) -> None:
    os._exit(3)


def test_a_process_that_is_killed_is_replaced(tmp_path: Path) -> None:
    started: list[set[str]] = []

    def pids() -> set[str]:
        return {each.name for each in tmp_path.iterdir()}

    def disturb() -> None:
        started.append(pids())
        os.kill(int(min(started[0])), signal.SIGKILL)
        until = time.monotonic() + LONG
        while len(pids()) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def note_running() -> None:
        running.update(each for each in pids() if psutil.pid_exists(int(each)))

    before, running = signal.getsignal(signal.SIGTERM), set[str]()
    supervise(2, wait_for_ever, (tmp_path,), threading.Thread(target=disturb).start, ending=note_running)
    assert (len(started[0]), len(pids())) == (2, 3)
    assert running == pids() - {min(started[0])}  # `ending` was called before they were terminated
    assert not any(psutil.pid_exists(int(each)) for each in pids())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("work", "message"), [(refuse, "there is no such gallery"), (end, "ended while it was starting")]
)
def test_a_process_that_cannot_start(work: Callable[..., None], message: str) -> None:
    with pytest.raises(RunError, match=message):
        supervise(2, work, (), lambda: pytest.fail("they are not ready"))
