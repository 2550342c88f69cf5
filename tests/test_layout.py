"""The tables of CONTRIBUTING.md list all files and packages, and every file has its own name."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shortlist"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def rows(table: str) -> list[list[str]]:
    """The names in the first column of a table, row by row."""
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in table.splitlines()]


PACKAGES = rows(re.findall(r"\n\| package \| content \|\n\|---\|---\|\n((?:\|.*\n)+)", GUIDE)[0])
FILES = {  # by package
    name: rows(table)
    for name, table in re.findall(r"`(\w+)/`:\n\n\| file \| content \|\n\|---\|---\|\n((?:\|.*\n)+)", GUIDE)
}


def entries(folder: Path) -> list[str]:
    """The modules and packages in a folder, as the tables write them."""
    packages = [f"{file.parent.name}/" for file in folder.glob("*/__init__.py")]
    return sorted([*packages, *(file.name for file in folder.glob("*.py") if not file.name.startswith("__"))])


def test_all_tables_are_compared() -> None:
    assert FILES.keys() == {"gallery", "ranking"}
    assert GUIDE.count("| content |") == 1 + len(FILES)


@pytest.mark.parametrize(("table", "folder"), [(PACKAGES, ""), *((table, name) for name, table in FILES.items())])
def test_tables_list_every_entry_once(table: list[list[str]], folder: str) -> None:
    assert sorted(name for row in table for name in row) == entries(PACKAGE / folder)


def test_packages_are_in_the_order_of_the_layers() -> None:
    """Each package imports only packages above it: the last layer of the contract is the first row."""
    place = {Path(name).stem: number for number, row in enumerate(PACKAGES) for name in row}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    layers = [re.findall(r"shortlist\.(\w+)", layer) for layer in contract["layers"]]
    assert sorted(name for layer in layers for name in layer) == sorted(place)
    for upper, lower in pairwise(layers):
        assert min(place[name] for name in upper) >= max(place[name] for name in lower), (upper, lower)


def test_sub_packages_are_mentioned() -> None:
    for file in PACKAGE.glob("*/*/__init__.py"):
        assert f"`{file.parent.name}/`" in GUIDE


def test_no_two_files_share_a_name() -> None:
    names = Counter(file.name for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    assert [name for name, number in names.items() if number > 1] == []
