"""Runs in a changing environment: others use their folder, the clock goes backwards, the cache is read-only."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.operations import World, disturbance
from tests.processes import Commands
from tests.training.runs import STEP_BEGINS, wait_where

MEMORY = "train memory"
BACKWARDS = """
import itertools, time
now, step = time.time(), itertools.count()
time.time = lambda: now - 3600 * next(step)
time.time_ns = lambda: int(time.time() * 1e9)
"""


def test_a_second_trainer_and_a_report_during_training(world: World, commands: Commands) -> None:
    """Both are refused, and change nothing."""
    operation, home = world.operations[MEMORY], world.copy()
    running = commands.start(*operation.command, cwd=home, before=wait_where("args[1] == 1", *STEP_BEGINS))
    running.until((home / "here").exists)
    for command, said in (
        (operation.command, "Another process is training in run-memory"),
        (("train", "--resume", "run-memory"), "Another process is training in run-memory"),
        (("report", "run-memory"), "run-memory"),
    ):
        code, _, error = commands.run(*command, cwd=home)
        assert (code, error.count("\n")) == (1, 1), error
        assert error.startswith("Error: ")
        assert said in error
    (home / "go").touch()
    assert running.wait() == 0, running.err
    assert operation.result(home) == world.whole(MEMORY).result


def test_trainers_that_start_at_the_same_time(world: World) -> None:
    operation, home = world.operations[MEMORY], world.copy()
    both = [world.start(operation, home) for _ in range(2)]
    codes = [running.wait() for running in both]
    refused = both[codes.index(1)]
    assert sorted(codes) == [0, 1], [running.err for running in both]
    assert "Another process is training" in refused.err or "already contains a run" in refused.err
    assert operation.result(home) == world.whole(MEMORY).result


def test_a_clock_that_goes_backwards(world: World, commands: Commands) -> None:
    for name in (MEMORY, "index"):
        operation, home = world.operations[name], world.copy()
        code, _, error = commands.run(*operation.command, cwd=home, before=BACKWARDS)
        assert code == 0, error
        assert operation.result(home) == world.whole(name).result


def test_a_read_only_cache(world: World, commands: Commands, tmp_path: Path) -> None:
    """Training that needs no cache succeeds, and what needs it says so."""
    cache = f"import os; os.environ['SHORTLIST_CACHE'] = {str(tmp_path)!r}\n"
    read_only = cache + disturbance(tmp_path, "read-only", 1)
    operation, home = world.operations[MEMORY], world.copy()
    code, _, error = commands.run(*operation.command, cwd=home, before=read_only)
    assert code == 0, error
    assert operation.result(home) == world.whole(MEMORY).result
    code, _, error = commands.run("data", "show", "glyphs", cwd=home, before=read_only)
    assert (code, error.count("\n")) == (1, 1), error
    assert "Read-only file system; set SHORTLIST_CACHE to another folder" in error
    assert list(tmp_path.iterdir()) == []
