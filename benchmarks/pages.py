"""Tables in the documentation that a benchmark writes, between two comments with the name of the table."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def fill(page: str, name: str, table: str) -> None:
    """Replace the text between `<!-- name -->` and `<!-- end of name -->` in a page of the documentation."""
    path = DOCS / page
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text, number = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _: f"{begin}\n{table}\n{end}",
        path.read_text(),
        flags=re.DOTALL,
    )
    if number != 1:
        raise SystemExit(f"{path} has {number} places for {name}")
    path.write_text(text)
