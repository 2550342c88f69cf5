from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from shortlist.gallery.gallery import Gallery
from shortlist.serve import Limits, create_app
from tests.serve.galleries import small_gallery

LIMITS = Limits(bytes=200_000, pixels=1_000_000, seconds=5)


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return small_gallery(tmp_path_factory.mktemp("serve"))


@pytest.fixture
def client(gallery: Gallery) -> Iterator[TestClient]:
    with TestClient(create_app(gallery, LIMITS, {"testserver"})) as client:
        yield client
