"""The examples in docstrings give the results that they show.

`pytest --doctest-modules` would import every module of the package in each process of pytest.
"""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.processes import SOURCES

MODULES = [
    ".".join(file.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(SOURCES.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0
    assert found.attempted or name == "shortlist.runs"  # whose examples need images
