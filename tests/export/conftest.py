"""Disable torch's log of traced symbols: capturing it in pytest takes longer than the tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_symbol_log() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
        yield
