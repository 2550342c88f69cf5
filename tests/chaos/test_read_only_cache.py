"""Images in an object store, with a cache that cannot be written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq

from tests.chaos.operations import disturbance
from tests.processes import Commands


def test_remote_images(folders: Path, commands: Commands, tmp_path: Path) -> None:
    """What the cache contains is used. An image that has changed in the store is an error."""
    home, cache = tmp_path / "home", tmp_path / "cache"
    shutil.copytree(folders / "images" / "class 01", home / "images")
    chosen = f"import os; os.environ['SHORTLIST_CACHE'] = {str(cache)!r}\n"

    def embed(out: str, before: str) -> tuple[int, str]:
        command = ("embed", str(folders / "run"), "local://images", "--out", out)  # relative to the current folder
        code, _, error = commands.run(*command, cwd=home, before=before)
        return code, error

    assert embed("first.parquet", chosen)[0] == 0
    files = [file for file in cache.rglob("*") if file.is_file()]
    read_only = chosen + disturbance(cache, "read-only", 1)
    code, error = embed("second.parquet", read_only)
    assert code == 0, error
    first, second = (pq.read_table(home / f"{name}.parquet") for name in ("first", "second"))
    assert first.equals(second)
    shutil.copy(home / "images" / "1.png", home / "images" / "0.png")
    code, error = embed("third.parquet", read_only)
    assert (code, [line for line in error.splitlines() if line.startswith("Error: ")][1:]) == (1, [])
    assert "Read-only file system. Set SHORTLIST_CACHE to another folder" in error
    assert [file for file in cache.rglob("*") if file.is_file()] == files
