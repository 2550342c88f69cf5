"""User-defined modules and objects by name, and errors if they do not exist."""

from __future__ import annotations

import os.path
from pathlib import Path

import pytest

from shortlist.errors import ConfigError
from shortlist.imports import call, given_name, import_modules, import_object, is_reference
from tests import user_parts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nets:build", True),
        ("my_package.nets:Net.tiny", True),
        ("_nets2:_build", True),
        ("resnet50.a1_in1k", False),
        ("pml.TripletMarginLoss", False),
        ("nets", False),
        ("nets:", False),
        (":build", False),
        ("C:\\images", False),
        ("milvus:gallery.db#x", False),
        ("nets:build:again", False),
        ("nets: build", False),
        ("2nets:build", False),
        ("given in Python: Net", False),
    ],
)
def test_references(name: str, expected: bool) -> None:
    assert is_reference(name) == expected


def test_objects_are_found() -> None:
    assert import_object("tests.user_parts:build", "key") is user_parts.build
    assert import_object("os.path:join", "key") is os.path.join
    assert import_object("tests.user_parts:Net.forward", "key") is user_parts.Net.forward


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "no_such_module_7:build",
            r"^loss.name: there is no module 'no_such_module_7'; install it, or start",
        ),
        ("tests.no_such_module_7:build", r"there is no module 'tests.no_such_module_7'"),
        (
            "tests.user_parts:biuld",
            r"^loss.name: tests.user_parts \(.*user_parts.py\) has no 'biuld'; did you mean",
        ),
        ("tests.user_parts:Net.forwrd", r"has no 'forwrd'; did you mean 'forward'"),
    ],
)
def test_missing_objects(reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_object(reference, "loss.name")


def test_modules_that_fail(folder: Path) -> None:
    (folder / "needs_other_7.py").write_text("import nothing_of_that_name\n")
    (folder / "fails_7.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"^`imports`: importing needs_other_7 fails with .*nothing_of_that_name"):
        import_modules(["needs_other_7"])
    with pytest.raises(ConfigError, match=r"^--import: importing fails_7 fails with ZeroDivisionError: division"):
        import_modules(["fails_7"], "--import")


def test_modules_are_imported_in_order(folder: Path) -> None:
    (folder / "first_7.py").write_text("")
    (folder / "second_7.py").write_text("import sys\nassert 'first_7' in sys.modules\n")
    import_modules(["first_7", "second_7"])


def test_a_call_that_fails_says_with_what() -> None:
    assert call(user_parts.build, {"dim": 3}, "parts:build", "key").linear.out_features == 3
    with pytest.raises(ConfigError, match=r"^key: build\(dims=3\) fails with TypeError: .*unexpected.*'dims'"):
        call(user_parts.build, {"dims": 3}, "parts:build", "key")


def test_names_of_given_parts() -> None:
    assert given_name(user_parts.Net()) == "given in Python: Net"
    assert given_name(user_parts.pull) == "given in Python: pull"
    assert not is_reference(given_name(user_parts.Net()))
