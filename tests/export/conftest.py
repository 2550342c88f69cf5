"""torch writes a log of every symbol that it traces; pytest would keep all of it, which takes longer than the tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def no_trace_of_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
