"""The header of the chaos tests."""

from __future__ import annotations

from tests.chaos.extent import LONG, SEED


def pytest_report_header() -> str:
    return f"chaos: {'long' if LONG else 'brief'}, SHORTLIST_CHAOS_SEED={SEED}"
