"""A gallery in Milvus gives the same responses as one in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from shortlist.data import open_catalog
from shortlist.gallery.gallery import Gallery
from shortlist.serve import create_app


@pytest.fixture(scope="module")
def twin(gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    """The same images in a Milvus Lite file."""
    folder: Path = tmp_path_factory.mktemp("milvus")
    model = gallery.encoder.save(folder / "model")
    twin = Gallery.create(f"milvus:{folder / 'gallery.db'}", gallery.encoder, model=model)
    twin.add(open_catalog(gallery.item(0).path.parents[1]))
    yield twin
    twin.close()


def test_the_same_responses(gallery: Gallery, twin: Gallery) -> None:
    image = gallery.item(20).path.read_bytes()
    paths = ["/api/items", "/api/items?label=class 03&limit=5", f"/api/items?offset={10**15}", "/api/items/7"]
    paths += ["/api/items/7/thumbnail", "/api/items/999999", '/api/items/7/similar?label=it\'s "so"']
    with TestClient(create_app(gallery)) as one, TestClient(create_app(twin)) as other:
        for path in paths:
            expected, found = one.get(path), other.get(path)
            assert found.status_code == expected.status_code, found.text
            assert found.status_code == 404 or found.content == expected.content
        assert other.get("/api/gallery").json()["labels"] == one.get("/api/gallery").json()["labels"]
        for k in (5, 200):
            expected, found = (client.get(f"/api/items/7/similar?k={k}").json() for client in (one, other))
            assert [hit["id"] for hit in found["results"]] == [hit["id"] for hit in expected["results"]]
        first = other.post("/api/search", files={"image": image}).json()["results"][0]
        assert first["id"] == 20
        assert first["score"] == pytest.approx(1, abs=1e-5)


def test_concurrent_requests(twin: Gallery) -> None:
    image = twin.item(3).path.read_bytes()
    with TestClient(create_app(twin)) as client, ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: client.post("/api/search", files={"image": image}), range(16)))
        found += threads.map(lambda item: client.get(f"/api/items/{item}/similar"), range(16))
        assert {answer.status_code for answer in found} == {200}
        assert {answer.json()["results"][0]["id"] for answer in found[:16]} == {3}
