"""Runs in a changing environment: others use their folder, the clock goes backwards, the cache is read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.operations import World, disturbance
from tests.training.runs import STEP_BEGINS, wait_where

MEMORY = "train memory"
BACKWARDS = """
import datetime, itertools, time
from optuna.storages.journal import _storage
now, step = time.time(), itertools.count()
time.time = lambda: now - 3600 * next(step)
time.time_ns = lambda: int(time.time() * 1e9)
class Backwards(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
_storage.datetime = Backwards  # it measures the time of trials
"""


def test_a_second_trainer_and_a_report_during_training(world: World) -> None:
    """Both are refused, and change nothing."""
    operation, home = world.operations[MEMORY], world.copy()
    running = world.begin(*operation.command, cwd=home, before=wait_where("args[1] == 1", *STEP_BEGINS))
    running.until((home / "here").exists)
    in_use = "Another process is training in run-memory. Wait until it has finished, or choose another folder."
    for command, said in (
        (operation.command, in_use),
        (("train", "--resume", "run-memory"), in_use),
        (
            ("report", "run-memory"),
            "The run in run-memory is not finished. To finish it: shortlist train --resume run-memory",
        ),
    ):
        code, _, error = world.run(*command, cwd=home)
        assert (code, error) == (1, f"Error: {said}\n")
    (home / "go").touch()
    assert running.wait() == 0, running.err
    assert operation.result(home) == world.whole(MEMORY).result


def test_a_report_while_a_finished_run_is_resumed(world: World) -> None:
    """Both write the report, which is complete at any time."""
    operation, home = world.operations["report"], world.copy()
    waits = wait_where("True", "shortlist.report.run_report", "write_page")
    running = world.begin("train", "--resume", "run", cwd=home, before=waits)
    running.until((home / "here").exists)
    code, _, error = world.run(*operation.command, cwd=home)
    assert code == 0, error
    assert operation.result(home) == world.whole("report").result
    (home / "run" / "report.html").unlink()
    (home / "go").touch()
    assert running.wait() == 0, running.err
    assert operation.result(home) == world.whole("report").result


def test_trainers_that_start_at_the_same_time(world: World) -> None:
    operation, home = world.operations[MEMORY], world.copy()
    both = sorted((world.start(operation, home) for _ in range(2)), key=lambda running: running.wait())
    assert [running.code for running in both] == [0, 1], [running.err for running in both]
    refused = both[1].err
    assert "Another process is training" in refused or "already contains a run" in refused
    assert operation.result(home) == world.whole(MEMORY).result


@pytest.mark.parametrize("name", [MEMORY, "index", "sweep"])
def test_a_clock_that_goes_backwards(world: World, name: str) -> None:
    operation, home = world.operations[name], world.copy()
    code, _, error = world.run(*operation.command, cwd=home, before=BACKWARDS)
    assert code == 0, error
    assert operation.result(home) == world.whole(name).result


def test_a_read_only_cache(world: World, tmp_path: Path) -> None:
    """Training that needs no cache succeeds, and what needs it says so."""
    cache = f"import os; os.environ['SHORTLIST_CACHE'] = {str(tmp_path)!r}\n"
    read_only = cache + disturbance(tmp_path, "read-only", 1)
    operation, home = world.operations[MEMORY], world.copy()
    code, _, error = world.run(*operation.command, cwd=home, before=read_only)
    assert code == 0, error
    assert operation.result(home) == world.whole(MEMORY).result
    code, _, error = world.run("data", "show", "glyphs", cwd=home, before=read_only)
    assert (code, error.count("\n")) == (1, 1), error
    assert "Read-only file system. Set SHORTLIST_CACHE to another folder" in error
    assert list(tmp_path.iterdir()) == []
