"""Disable torch's log of traced symbols: capturing it in pytest takes longer than the tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def no_symbol_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
