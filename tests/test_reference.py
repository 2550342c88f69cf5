"""The API reference contains every name of shortlist that the documentation uses."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import shortlist
from tests.test_docs import PAGES, ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
FILES = {"shortlist.json"}  # names of files, which look like those of modules


@cache
def reference() -> dict[str, set[str]]:
    """The members of each module in the reference."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    packages = {f"shortlist.{name}": public_members(f"shortlist.{name}") for name in site.PACKAGES}
    modules = {f"shortlist.{name}": set(members) for name, members in site.MODULES.items()}
    return {"shortlist": set(shortlist.__all__), **packages, **modules}


def public_members(name: str) -> set[str]:
    """The names that mkdocstrings shows: those in `__all__`, or those that the module itself defines."""
    module = import_module(name)
    own = (each for each, value in vars(module).items() if getattr(value, "__module__", name) == name)
    return set(getattr(module, "__all__", ())) or {each for each in own if not each.startswith("_")}


def used_names(text: str) -> set[str]:
    """The names that a text imports from shortlist, or writes with dots."""
    found = set(re.findall(r"\bshortlist(?:\.[A-Za-z_]\w*)+", text)) - FILES
    for module, names in re.findall(r"from (shortlist[\w.]*) import (\([^)]*\)|.*)", re.sub(r" #.*", "", text)):
        found |= {f"{module}.{name}" for name in re.findall(r"(?:^|,)\s*(\w+)", names.strip("()"))}
    return found


def missing_names(text: str) -> set[str]:
    """The used names that are not in the reference: neither modules nor their members, nor attributes of these."""
    members = {f"{module}.{name}" for module, names in reference().items() for name in names}
    known = members | reference().keys()
    return {name for name in used_names(text) if name not in known and name.rpartition(".")[0] not in members}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_every_name_is_in_the_reference(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert missing_names(text) == set()


def test_missing_names_are_found() -> None:
    text = """
from shortlist.batches.memory import (
    GraphSize,  # of a graph
    available_memory as available,
)
from shortlist import train, Recall  # Gallery
`shortlist.training.loop.Trainer`, `shortlist.plan()`, `shortlist.Gallery.open` and `shortlist.runs`
"""
    assert missing_names(text) == {
        *("shortlist.batches.memory", "shortlist.batches.memory.GraphSize"),
        *("shortlist.batches.memory.available_memory", "shortlist.Recall", "shortlist.training.loop.Trainer"),
    }


def test_members_of_modules_exist() -> None:
    for module, names in reference().items():
        assert [name for name in names if not hasattr(import_module(module), name)] == [], module
