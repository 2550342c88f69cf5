"""An encoder with random weights, and images for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shortlist.data import Catalog, TestTransform, open_collection
from shortlist.encoding import Encoder
from tests.data.pictures import class_folders
from tests.gallery.galleries import CLASSES, small_embedder


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(small_embedder(), TestTransform(32, 32))


@pytest.fixture
def images(tmp_path: Path) -> Catalog:
    return open_collection(class_folders(tmp_path / "images", CLASSES))


@pytest.fixture(scope="session")
def shared_images(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """The same images, for tests that do not change them."""
    return open_collection(class_folders(tmp_path_factory.mktemp("shared") / "images", CLASSES))
