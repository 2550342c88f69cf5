"""Requests and responses of the JSON API."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from shortlist.data import open_collection
from shortlist.encoding import Encoder
from shortlist.errors import ShortlistError
from shortlist.gallery.gallery import Gallery
from shortlist.model import Embedder
from shortlist.serve import Limits, create_app, service
from tests.data.pictures import EPS, picture
from tests.serve.galleries import CLASSES, IMAGES, encoded, png, remove_labels, small_gallery
from tests.serve.test_uploads import bomb

ALL = CLASSES * IMAGES


def test_health(client: TestClient) -> None:
    answer = client.get("/api/health").json()
    assert answer["status"] == "ok"
    assert answer["version"]
    assert client.head("/api/health").status_code == 200


def test_gallery(client: TestClient, gallery: Gallery) -> None:
    answer = client.get("/api/gallery").json()
    assert (answer["name"], answer["images"]) == ("gallery", ALL)
    assert answer["labels"] == [{"label": f"class {number:02}", "images": IMAGES} for number in range(CLASSES)]
    assert answer["limits"] == {"bytes": 200_000, "pixels": 1_000_000, "results": 200}
    assert answer["index"] == {"kind": "flat", "recall": None, "dim": 16, "fingerprint": gallery.encoder.fingerprint}


def test_images_that_are_added_later(gallery: Gallery, tmp_path: Path) -> None:
    images = open_collection(gallery.item(0).path.parents[1])
    Gallery.create(tmp_path / "gallery", gallery.encoder).add(images.subset(range(ALL - 1)))
    with TestClient(create_app(Gallery.open(tmp_path / "gallery"))) as client:
        assert client.get(f"/api/items/{ALL - 1}").status_code == 404
        Gallery.open(tmp_path / "gallery").add(images)
        assert client.get("/api/gallery").json()["images"] == ALL
        assert client.get(f"/api/items/{ALL - 1}").status_code == 200
        (tmp_path / "gallery" / "gallery.json").unlink()
        gone = client.get("/api/gallery")
        assert gone.status_code == 503
        assert "No gallery found in" in gone.json()["detail"]
        assert client.get(f"/api/items/{ALL - 1}/similar").status_code == 200


def test_the_recall_of_an_approximate_index(gallery: Gallery, tmp_path: Path) -> None:
    approximate = Gallery.create(tmp_path / "gallery", gallery.encoder, kind="hnsw")
    approximate.add(open_collection(gallery.item(0).path.parents[1]))
    with TestClient(create_app(approximate)) as client:
        index = client.get("/api/gallery").json()["index"]
    assert (index["kind"], index["recall"]) == ("hnsw", {"recall": 1.0, "at": 10, "queries": ALL})


def test_pages_of_items(client: TestClient) -> None:
    seen, more = [], True
    while more:
        answer = client.get("/api/items", params={"offset": len(seen), "limit": 50}).json()
        seen += answer["items"]
        more = answer["more"]
    assert [item["id"] for item in seen] == list(range(ALL))
    only = client.get("/api/items", params={"label": "class 02"}).json()
    assert {item["label"] for item in only["items"]} == {"class 02"}
    assert len(only["items"]) == IMAGES
    assert not only["more"]
    assert client.get("/api/items", params={"label": "nothing"}).json() == {"items": [], "more": False}
    assert client.get("/api/items", params={"offset": 10**9}).json() == {"items": [], "more": False}


def test_one_item(client: TestClient, gallery: Gallery) -> None:
    assert client.get("/api/items/13").json() == {
        "id": 13,
        "label": "class 01",
        "labels": ["class 01"],
        "fields": {},
        "file": "class 01/1.png",
    }
    assert gallery.item(13).path.name == "1.png"


def test_similar_excludes_the_item_itself(client: TestClient, gallery: Gallery) -> None:
    answer = client.get("/api/items/5/similar", params={"k": 7}).json()
    expected = gallery.similar(5, 7)
    assert answer["query"]["id"] == 5
    assert [hit["id"] for hit in answer["results"]] == [hit.item.id for hit in expected]
    assert [hit["score"] for hit in answer["results"]] == pytest.approx([hit.score for hit in expected])
    assert 5 not in [hit["id"] for hit in answer["results"]]
    only = client.get("/api/items/5/similar", params={"k": 7, "label": "class 03"}).json()
    assert [hit["label"] for hit in only["results"]] == ["class 03"] * 7


def test_an_image_of_the_gallery_finds_itself(client: TestClient, gallery: Gallery) -> None:
    content = gallery.item(20).path.read_bytes()
    answer = client.post("/api/search", files={"image": ("any name", content)}, data={"k": 3}).json()
    assert answer["query"] is None
    assert answer["results"][0]["id"] == 20
    assert answer["results"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert len(answer["results"]) == 3
    only = client.post("/api/search", files={"image": content}, data={"label": "class 00"}).json()["results"]
    assert [hit["label"] for hit in only] == ["class 00"] * 10


def test_results_below_the_minimum_score_are_left_out(client: TestClient, gallery: Gallery) -> None:
    scores = [hit["score"] for hit in client.get("/api/items/5/similar", params={"k": 20}).json()["results"]]
    gallery.set_min_score(scores[4])
    try:
        assert client.get("/api/gallery").json()["min_score"] == scores[4]
        for options, number in (({}, 5), ({"min_score": scores[2]}, 3), ({"min_score": -1}, 20)):
            found = client.get("/api/items/5/similar", params={"k": 20, **options}).json()
            assert [hit["score"] for hit in found["results"]] == scores[:number]
            assert found["min_score"] == options.get("min_score", scores[4])
            assert found["below_min_score"] == 20 - number
        image = {"image": gallery.item(20).path.read_bytes()}
        found = client.post("/api/search", files=image, data={"min_score": 0.99999, "k": 9}).json()
        assert (len(found["results"]), found["min_score"], found["below_min_score"]) == (1, 0.99999, 8)
        refused = client.post("/api/search", files=image, data={"min_score": "2"})
        assert (refused.status_code, "min_score" in refused.json()["detail"]) == (422, True)
    finally:
        gallery.set_min_score(None)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_image_formats(client: TestClient, kind: str) -> None:
    content = encoded(Image.open(io.BytesIO(png())), kind)
    assert client.post("/api/search", files={"image": content}).status_code == 200


def test_empty_fields_are_ignored(client: TestClient) -> None:
    answer = client.post("/api/search", files={"image": png()}, data={"k": "", "label": ""})
    assert len(answer.json()["results"]) == 10


def test_size_and_caching_of_pictures(tmp_path: Path) -> None:
    gallery = small_gallery(tmp_path, 2, 1)
    with TestClient(create_app(gallery)) as client:
        for item, (name, edge) in enumerate((("thumbnail", 320), ("image", 1600))):
            wide, path = gallery.item(item).path, f"/api/items/{item}/{name}"
            Image.new("RGB", (2400, 1200), "green").save(wide)
            answer = client.get(path)
            assert answer.headers["content-type"] == "image/jpeg"
            with Image.open(io.BytesIO(answer.content)) as image:
                assert (image.format, image.size) == ("JPEG", (edge, edge // 2))
            again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            Image.new("RGB", (100, 300), "red").save(wide)  # a changed file is not served from the cache
            with Image.open(io.BytesIO(client.get(path).content)) as image:
                assert image.size == (100, 300)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    gallery = small_gallery(tmp_path, 2, 2)
    gallery.item(0).path.unlink()
    gallery.item(1).path.write_bytes(b"words")
    with TestClient(create_app(gallery)) as client:
        for item, message in ((0, "no longer exists"), (1, "cannot be read")):
            answer = client.get(f"/api/items/{item}/image")
            assert answer.status_code == 404
            assert message in answer.json()["detail"]
            assert str(tmp_path) not in answer.text
        assert client.get("/api/items/0/similar").status_code == 200  # its vector is still there


def test_files_that_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is replaced by a named pipe, which would block; a folder; an image with too many pixels, which is not
    decoded; and an image for which Pillow would start Ghostscript.
    """
    gallery = small_gallery(tmp_path, 2, 2)
    with TestClient(create_app(gallery, Limits(work_seconds=60))) as client:
        for item in range(4):
            gallery.item(item).path.unlink()
        os.mkfifo(gallery.item(0).path)
        gallery.item(1).path.mkdir()
        gallery.item(2).path.write_bytes(bomb(9_000, 9_000))
        gallery.item(3).path.write_bytes(EPS)
        monkeypatch.setattr(service, "upright_rgb", lambda _: 1 / 0)
        for item, message in enumerate(
            ("not a regular file", "Is a directory", "9000 x 9000 pixels, but at most 50 million", "its format is not")
        ):
            for name in ("image", "thumbnail"):
                answer = client.get(f"/api/items/{item}/{name}")
                assert (answer.status_code, message in answer.json()["detail"]) == (404, True), answer.text


def test_large_images_of_the_gallery_are_decoded_one_at_a_time(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    serving = service.Service(gallery, Limits())
    monkeypatch.setattr(service, "upright_rgb", lambda _: held.append(serving._large_image_lock.locked()) or picture())
    for large in (10**6, 10):
        monkeypatch.setattr(service, "LARGE_IMAGE", large)
        assert serving._picture(0, service.VIEW_SIZE, "").jpeg
    assert held == [False, True]


def test_a_gallery_that_is_replaced_by_one_of_another_model(gallery: Gallery, tmp_path: Path) -> None:
    images = open_collection(gallery.item(0).path.parents[1]).subset(range(5))
    torch.manual_seed(5)
    other = Encoder(Embedder("test_efficientnet", dim=16).eval(), gallery.encoder.transform)
    for name, encoder in (("gallery", gallery.encoder), ("other", other)):
        Gallery.build(encoder, images, tmp_path / name, workers=0)
    query = {"image": gallery.item(3).path.read_bytes()}
    with TestClient(create_app(Gallery.open(tmp_path / "gallery"))) as client:
        (tmp_path / "gallery").rename(tmp_path / "before")
        (tmp_path / "other").rename(tmp_path / "gallery")
        (tmp_path / "gallery" / "model").rename(tmp_path / "model")
        assert client.get("/api/gallery").status_code == 503
        assert client.post("/api/search", files=query).status_code == 503
        (tmp_path / "model").rename(tmp_path / "gallery" / "model")
        first = client.post("/api/search", files=query).json()["results"][0]
        assert (first["id"], first["score"]) == (3, pytest.approx(1, abs=1e-4))
        assert client.get("/api/gallery").json()["index"]["fingerprint"] == other.fingerprint


def test_an_empty_label_means_any(client: TestClient) -> None:
    assert len(client.get("/api/items?label=&limit=7").json()["items"]) == 7
    assert len(client.get("/api/items/0/similar?label=&k=7").json()["results"]) == 7


def test_without_labels(tmp_path: Path) -> None:
    gallery = small_gallery(tmp_path, 2, 2)
    remove_labels(gallery)
    with TestClient(create_app(gallery)) as client:
        assert client.get("/api/gallery").json()["labels"] == []
        assert {hit["label"] for hit in client.get("/api/items/0/similar").json()["results"]} == {None}


def test_an_empty_gallery(gallery: Gallery, tmp_path: Path) -> None:
    with TestClient(create_app(Gallery.create(tmp_path / "empty", gallery.encoder))) as client:
        assert client.get("/api/gallery").json()["images"] == 0
        assert client.get("/api/items").json() == {"items": [], "more": False}
        found = client.post("/api/search", files={"image": png()}).json()
        assert found == {"query": None, "results": [], "min_score": None, "below_min_score": 0}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/items/99999", 404, "99999"),
        ("/api/items/99999/similar", 404, "99999"),
        ("/api/items/99999/image", 404, "99999"),
        ("/api/items/-1", 422, "id: "),
        ("/api/items/..%2F..%2Fetc%2Fpasswd", 404, "Not Found"),
        ("/api/items/words", 422, "id: "),
        (f"/api/items/{10**30}/thumbnail", 422, "id: "),
        ("/api/items/0/similar?k=0", 422, "k: "),
        ("/api/items/0/similar?k=201", 422, "200"),
        ("/api/items?limit=0&offset=-1", 422, "offset: "),
        ("/api/search", 405, "GET /api/search"),
        ("/nothing", 404, "GET /nothing"),
        ("/../app.py", 404, "Not Found"),
        ("/%2e%2e/app.py", 404, "Not Found"),
    ],
)
def test_errors_have_a_message(client: TestClient, path: str, status: int, message: str) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.json().keys() == {"detail"}
    assert message in answer.json()["detail"]


def test_an_unavailable_gallery(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ShortlistError("the database is down")

    monkeypatch.setattr(gallery, "similar", fails)
    with TestClient(create_app(gallery)) as client:
        answer = client.get("/api/items/0/similar")
        assert (answer.status_code, answer.json()["detail"]) == (
            503,
            "The gallery is not available: the database is down",
        )
        assert client.get("/api/health").status_code == 200


def test_internal_errors_have_a_message(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "labels", lambda: 1 / 0)
    with TestClient(create_app(gallery), raise_server_exceptions=False) as client:
        answer = client.get("/api/gallery")
        assert answer.status_code == 500
        assert answer.json().keys() == {"detail"}
        assert "division" not in answer.text


def test_the_openapi_description_is_complete(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/api/health",
        "/api/ready",
        "/metrics",
        "/api/gallery",
        "/api/search",
        "/api/items",
        "/api/items/{id}",
        "/api/items/{id}/similar",
        "/api/items/{id}/image",
        "/api/items/{id}/thumbnail",
    }
    assert "HTTPValidationError" not in described["components"]["schemas"]  # all errors have one shape
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert operation["description"], path
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert response["content"]["application/json"]["schema"]["$ref"].endswith("/Problem")


def test_the_search_form_is_described(client: TestClient) -> None:
    search = client.get("/openapi.json").json()["paths"]["/api/search"]["post"]
    form = search["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["image"]
    fields = form["properties"]
    assert all(field.pop("description") for field in fields.values())
    assert fields == {
        "image": {"type": "string", "format": "binary"},
        "k": {"type": "integer", "minimum": 1, "maximum": 200, "default": 10},
        "label": {"type": "string", "maxLength": 1000},
        "min_score": {"type": "number", "minimum": -1, "maximum": 1},
    }
