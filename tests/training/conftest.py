"""The tests of this room run in one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def in_one_thread(one_thread: None) -> None:
    pass
