"""Every Python block of the README and the docs runs: a page is one session, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line number and source of each block."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 1, match.group(1)) for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "docs"}
    for line, source in blocks(page):
        exec(compile("\n" * line + source, str(page), "exec"), namespace)  # errors name the page's own line


def test_there_are_blocks() -> None:
    assert all(blocks(page) for page in (ROOT / "README.md", ROOT / "docs" / "loss.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
