"""Atomic writes, checks of output paths, and JSON files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from shortlist import files
from shortlist.errors import ConfigError, RunError
from shortlist.files import (
    atomic_folder,
    check_writable,
    read_json,
    remove_unfinished,
    write_json,
    write_text_atomically,
)


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


def test_folders_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"

    def write(content: str, error: OSError | None = None) -> None:
        with atomic_folder(folder) as temporary:
            (temporary / "file").write_text(content)
            if error is not None:
                raise error

    with pytest.raises(OSError, match=r"No space left on device: '.*folder'"):
        write("half", OSError(28, "No space left on device"))
    assert list(folder.parent.iterdir()) == []
    for content in ("first", "second"):
        write(content)
        assert (folder / "file").read_text() == "first"  # an existing folder is not changed
        assert list(folder.parent.iterdir()) == [folder]


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
    (tmp_path / ".a[1].txt.456").mkdir()
    remove_unfinished(tmp_path / "a[1].txt", older_than=3600)
    assert len(list(tmp_path.iterdir())) == 5
    remove_unfinished(tmp_path / "a[1].txt")
    assert {file.name for file in tmp_path.iterdir()} == {".a[1].txt.lock", "a[1].txt", ".a1.txt.123"}


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"\xff\xfe", b"[" * 100_000])
def test_errors_name_a_damaged_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"facts\.json is damaged: it is not valid JSON"):
        read_json(file)


class TestVersionsAndDigests:
    def test_objects_get_both_and_lists_none(self, tmp_path: Path) -> None:
        file = tmp_path / "facts.json"
        for value in ({"a": [1, None, 0.1, "ü"]}, {}, [1, 2]):
            write_json(file, value)
            assert read_json(file) == value
            found = json.loads(file.read_text())
            assert ({"format", "sha256"} <= set(found)) is isinstance(value, dict)

    @pytest.mark.parametrize("content", ['{"a": 1}', '{"a": 1, "format": 1}', '{"a": 1, "sha256": ""}'])
    def test_files_without_them_are_refused(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "facts.json").write_text(content)
        with pytest.raises(RunError, match=r"facts\.json is damaged"):
            read_json(tmp_path / "facts.json")

    def test_other_contents(self, tmp_path: Path) -> None:
        file = tmp_path / "facts.json"
        write_json(file, {"score": 0.5})
        file.write_text(file.read_text().replace("0.5", "0.4"))
        with pytest.raises(RunError, match=r"facts\.json is damaged: its contents differ from what was written"):
            read_json(file)

    @pytest.mark.parametrize(
        ("version", "said"),
        [
            (3, "has format 3, of a later version of shortlist. Update shortlist"),
            (1, "has format 1, which only earlier versions of shortlist read"),
            ("2", "is damaged: its format version is '2'"),
        ],
    )
    def test_other_versions(self, version: object, said: str, tmp_path: Path) -> None:
        file = tmp_path / "facts.json"
        write_json(file, {"a": 1}, 2)
        assert read_json(file, version=2) == {"a": 1}
        write_json(file, {"a": 1, "format": version})
        with pytest.raises(RunError, match=re.escape(said)):
            read_json(file, version=2)

    def test_any_number_of_brackets(self, tmp_path: Path) -> None:
        """Some can be parsed, but are too many for the digest."""
        file = tmp_path / "facts.json"
        for number in (10, *range(sys.getrecursionlimit() - 200, sys.getrecursionlimit())):
            file.write_text('{"format": 1, "sha256": "", "a": ' + "[" * number + "]" * number + "}")
            with pytest.raises(RunError, match="is damaged"):
                read_json(file)
