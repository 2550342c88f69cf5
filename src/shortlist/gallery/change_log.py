"""A log of the changes of a gallery: one line with a JSON object per image."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path


class ChangeLog:
    """Appends changes to a file.

    Args:
        file: The file, which is created if necessary. None: nothing is written.
        gallery: Name of the gallery.
    """

    def __init__(self, file: Path | str | None, gallery: str) -> None:
        self.file, self.gallery = None if file is None else Path(file), gallery

    def write(self, change: str, paths: Iterable[str], reasons: Mapping[str, str] | None = None) -> None:
        """Append a line per image.

        Args:
            change: added, replaced, relabelled, removed or unreadable.
            paths: Absolute paths or URLs of the images.
            reasons: Reasons of the change, by path. Default: none are written.
        """
        if self.file is None:
            return
        facts = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "gallery": self.gallery, "change": change}
        entries = ({**facts, "path": path, **({"reason": reasons[path]} if reasons else {})} for path in paths)
        lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]
        with self.file.open("a", encoding="utf-8") as stream:
            stream.writelines(lines)
