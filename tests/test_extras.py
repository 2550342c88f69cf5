"""Messages about optional dependencies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shortlist.errors import ShortlistError
from shortlist.extras import MissingExtraError, extra


def test_the_outermost_block_names_the_extra() -> None:
    with (
        pytest.raises(MissingExtraError, match=r"A page needs the package not_installed, .*shortlist\[serve\]"),
        extra("serve", "A page"),
        extra("search", "An index"),
    ):
        import not_installed  # noqa: F401


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('libfoo.so: no such file')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    message = "An index needs a package that is installed but cannot be imported: libfoo.so: no such file"
    with pytest.raises(ShortlistError, match=message), extra("serve", "A page"), extra("search", "An index"):
        import broken_package  # noqa: F401
    assert "broken_package" not in sys.modules
