"""The header of the chaos tests, and the files that they share."""

from __future__ import annotations

import pytest

from tests.chaos.extent import LONG, SEED
from tests.chaos.operations import World
from tests.processes import Commands


def pytest_report_header() -> str:
    return f"chaos: {'long' if LONG else 'brief'}, SHORTLIST_CHAOS_SEED={SEED}"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> World:
    return World(tmp_path_factory.mktemp("world"), commands)
