"""Fixtures: galleries in a folder and in Milvus, and images for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shortlist.encoding import Encoder
from shortlist.gallery import Gallery
from tests.encoding.conftest import encoder, images
from tests.gallery.galleries import Open

__all__ = ["encoder", "images"]  # fixtures


@pytest.fixture(params=["folder", "milvus"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "gallery") if request.param == "folder" else f"milvus:{tmp_path}/gallery.db"


@pytest.fixture
def new(place: str, encoder: Encoder, tmp_path: Path) -> Iterator[Open]:
    """A function that creates an empty gallery at the location, or opens the existing one."""
    opened: list[Gallery] = []

    def gallery(at: str = place, **options: object) -> Gallery:
        while opened:
            opened.pop().close()
        if not Gallery.exists(at):
            model = encoder.save(tmp_path / "run")
            opened.append(Gallery.create(at, encoder, model=model, **options))
        else:
            opened.append(Gallery.open(at, **options))
        return opened[-1]

    yield gallery
    while opened:
        opened.pop().close()
