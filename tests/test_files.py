"""Files that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from shortlist import files
from shortlist.files import write_atomically


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    write_atomically(file, "first")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "second")
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
