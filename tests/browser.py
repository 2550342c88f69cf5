"""The system's Chromium, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
PATIENCE = 60_000  # milliseconds: the time limit on a busy machine


def chromium() -> str:
    """Return the path of Chromium. Without it the test is skipped, or fails in continuous integration."""
    found = os.environ.get("SHORTLIST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        reason = f"there is no Chromium ({', '.join(NAMES)}, or the path in SHORTLIST_CHROMIUM)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return found


@contextmanager
def started_browser() -> Iterator[Browser]:
    path = chromium()
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS, timeout=PATIENCE)
        yield browser
        browser.close()
