"""Galleries in a folder and in Milvus, and images for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shortlist.data import Catalog, TestTransform, open_collection
from shortlist.model import Embedder
from shortlist.retrieval import Describer, Gallery
from tests.data.pictures import class_folders
from tests.retrieval.galleries import CLASSES, DIM, Open


@pytest.fixture(scope="session")
def describer() -> Describer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Describer(Embedder("test_efficientnet", dim=DIM).eval(), TestTransform(32, 32))


@pytest.fixture
def images(tmp_path: Path) -> Catalog:
    return open_collection(class_folders(tmp_path / "images", CLASSES))


@pytest.fixture(params=["folder", "milvus"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "gallery") if request.param == "folder" else f"milvus:{tmp_path}/gallery.db"


@pytest.fixture
def new(place: str, describer: Describer, tmp_path: Path) -> Iterator[Open]:
    """Makes an empty gallery at the place; or opens the one that is there."""
    opened: list[Gallery] = []

    def gallery(at: str = place, **options: object) -> Gallery:
        while opened:
            opened.pop().close()
        if not Gallery.exists(at):
            model = describer.save(tmp_path / "run")
            opened.append(Gallery.create(at, describer, model=model, **options))
        else:
            opened.append(Gallery.open(at, **options))
        return opened[-1]

    yield gallery
    while opened:
        opened.pop().close()
