"""Fixtures: galleries in a folder and in Milvus, and images for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shortlist.data import Catalog
from shortlist.encoding import Encoder
from shortlist.gallery import Gallery
from tests.encoding.conftest import encoder, images, shared_images
from tests.gallery.galleries import Open

__all__ = ["encoder", "images", "shared_images"]  # fixtures


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


@pytest.fixture(scope="module")
def filled_folder(encoder: Encoder, shared_images: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """A gallery in a folder with all images, opened again. Tests that change it copy the folder."""
    folder = tmp_path_factory.mktemp("filled") / "gallery"
    Gallery.build(encoder, shared_images, folder, workers=0)
    return Gallery.open(folder)


@pytest.fixture(scope="module")
def filled_milvus(
    encoder: Encoder, shared_images: Catalog, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gallery]:
    """A gallery in Milvus with all images, opened again, for tests that do not change it."""
    folder = tmp_path_factory.mktemp("filled")
    place = f"milvus:{folder}/gallery.db"
    Gallery.build(encoder, shared_images, place, model=encoder.save(folder / "run"), workers=0).close()
    with closing(Gallery.open(place)) as gallery:
        yield gallery


@pytest.fixture(params=["folder", "milvus"])
def filled(request: pytest.FixtureRequest) -> Gallery:
    """A gallery with all images, for tests that do not change it."""
    gallery: Gallery = request.getfixturevalue(f"filled_{request.param}")
    return gallery
