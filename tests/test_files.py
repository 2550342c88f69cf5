"""Atomic writes, checks of output paths, and JSON files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shortlist import files
from shortlist.errors import ConfigError, RunError
from shortlist.files import check_writable, read_json, remove_unfinished, write_text_atomically


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    write_text_atomically(file, "first")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*[/\\\\]file\.json'"):
        write_text_atomically(file, "second")
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_errors_name_the_target_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found:
        write_text_atomically(tmp_path / "nowhere" / "file.json", "text")
    assert found.value.filename == str(tmp_path / "nowhere" / "file.json")


class TestCheckWritable:
    def test_new_and_old_files(self, tmp_path: Path) -> None:
        (tmp_path / "old").write_text("")
        for path in (tmp_path / "old", tmp_path / "new", tmp_path / "folder" / "to" / "be" / "created"):
            check_writable(path)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is a folder"):
            check_writable(tmp_path)

    @pytest.mark.parametrize("below", ["new", "folder/new"])
    def test_a_file_where_a_folder_should_be(self, below: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"cannot be written because .*file is a file"):
            check_writable(tmp_path / "file" / below)

    def test_a_folder_without_write_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files.os, "access", lambda *_: False)  # the superuser may write everywhere
        with pytest.raises(ConfigError, match="no permission to write to"):
            check_writable(tmp_path / "folder" / "new")


def test_temporary_files_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    for name in (".a[1].txt.123", ".a[1].txt.lock", "a[1].txt", ".a1.txt.123"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path / "a[1].txt")
    assert {file.name for file in tmp_path.iterdir()} == {".a[1].txt.lock", "a[1].txt", ".a1.txt.123"}


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"\xff\xfe", b"[" * 100_000])
def test_errors_name_a_damaged_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"facts\.json is damaged: it is not valid JSON"):
        read_json(file)
