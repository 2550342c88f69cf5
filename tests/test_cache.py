"""The location of the cache, and folders that are built completely or not at all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from shortlist.cache import build_once, cache_folder
from shortlist.data.loader import process_context
from shortlist.errors import DataError


def test_the_location_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "usual"))
    assert cache_folder("x") == tmp_path / "mine" / "x"
    monkeypatch.delenv("SHORTLIST_CACHE")
    assert cache_folder("x") == tmp_path / "usual" / "shortlist" / "x"
    assert not (tmp_path / "usual").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder("x") == Path.home() / ".cache" / "shortlist" / "x"


def fill(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("content")


def test_built_once(tmp_path: Path):
    folder = tmp_path / "new" / "thing"
    assert build_once(folder, fill) == folder
    assert (folder / "sub" / "file").read_text() == "content"
    build_once(folder, lambda partial: pytest.fail("built twice"))
    assert [entry.name for entry in folder.parent.iterdir()] == ["thing"]


def test_a_failure_leaves_nothing(tmp_path: Path):
    def fails(partial: Path) -> None:
        fill(partial)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        build_once(tmp_path / "thing", fails)
    assert list(tmp_path.iterdir()) == []


def die_half_way(folder: Path) -> None:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_build_is_repeated_and_removed(tmp_path: Path):
    folder = tmp_path / "thing"
    process = process_context().Process(target=build_once, args=(folder, die_half_way))
    process.start()
    process.join()
    assert process.exitcode == -9
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".thing.")
    build_once(folder, fill)
    assert sorted(entry.name for entry in folder.iterdir()) == ["sub"]
    assert left[0].exists()  # it could belong to a running process
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(left[0], (long_ago, long_ago))
    (folder / "sub" / "file").unlink()
    (folder / "sub").rmdir()
    folder.rmdir()
    build_once(folder, fill)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_two_at_once(tmp_path: Path):
    folder = tmp_path / "thing"

    def slower(partial: Path) -> None:
        build_once(folder, fill)  # simulates another process that finishes first
        (partial / "late").touch()

    build_once(folder, slower)
    assert sorted(entry.name for entry in folder.iterdir()) == ["sub"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_a_cache_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"Cannot write to the cache .*file: .*\. Set SHORTLIST_CACHE to another"):
        build_once(tmp_path / "file" / "thing", fill)


def test_a_disk_that_fills_up(tmp_path: Path):
    def full(partial: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"Cannot write to the cache .*: No space left on device\. Set SHORTLIST_CACHE"):
        build_once(tmp_path / "thing", full)
    assert list(tmp_path.iterdir()) == []
