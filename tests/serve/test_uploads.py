"""Uploads are limited in bytes, pixels and time, decoded in memory, and never stored."""

from __future__ import annotations

import asyncio
import struct
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from shortlist.gallery.gallery import Gallery
from shortlist.serve import Limits, create_app
from tests.data.pictures import EPS, picture
from tests.serve.galleries import encoded, png


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes whose header declares this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def refused(client: TestClient, content: bytes, status: int) -> str:
    answer = client.post("/api/search", files={"image": ("holiday.png", content)})
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"detail"}
    return str(answer.json()["detail"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"words", "not an image"),
        (b"", "empty"),
        (b"\x00" * 5000, "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (EPS, "not an image"),  # Pillow would start Ghostscript
        (encoded(picture(), "PPM"), "not an image"),  # allowed in galleries only
        (png()[:200], "damaged"),
        (encoded(picture(300, 200), "JPEG")[:1500], "damaged"),
        (bomb(10, 10), "damaged"),
    ],
    ids=["words", "empty", "zeros", "svg", "eps", "ppm", "half a png", "half a jpeg", "no pixels"],
)
def test_not_an_image(client: TestClient, content: bytes, message: str) -> None:
    assert message in refused(client, content, 422)


@pytest.mark.parametrize("size", [(1001, 1000), (10_000, 10_000), (15_000, 15_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs(client: TestClient, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*_: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(Image.Image, "load", decoded)
    assert "1 million" in refused(client, bomb(*size), 413)


def test_the_maximum_number_of_pixels(client: TestClient) -> None:
    largest = encoded(Image.new("L", (1000, 1000)), "PNG")
    assert client.post("/api/search", files={"image": largest}).status_code == 200


def test_too_many_bytes(client: TestClient) -> None:
    assert "at most 0.19" in refused(client, b"x" * 200_001, 413)  # checked after it is received
    assert "too large" in refused(client, b"x" * 2_000_000, 413)  # refused by its declared length


NAMED = b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n1\r\n--b--\r\n'


def endless(sent: list[int]) -> Iterator[bytes]:
    yield b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
    for _ in range(10_000):
        sent.append(50_000)
        yield b"x" * 50_000


def test_an_upload_without_a_declared_length(gallery: Gallery) -> None:
    app = create_app(gallery, Limits(bytes=200_000))
    sent: list[int] = []

    async def post() -> httpx.Response:
        async def body() -> Any:
            for part in endless(sent):
                yield part

        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/api/search", content=body(), headers=headers)

    answer = asyncio.run(post())
    assert answer.status_code == 413
    assert sum(sent) <= 400_000  # the rest is not read


@pytest.mark.parametrize(
    ("headers", "content", "status", "message"),
    [
        ({}, b"", 415, "multipart/form-data"),
        ({"Content-Type": "application/json"}, b"{}", 415, "multipart/form-data"),
        ({"Content-Type": "multipart/form-data"}, b"x", 422, "boundary"),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b"x", 422, "form cannot be read"),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b"--b--\r\n", 422, "no image"),
        ({"Content-Type": "multipart/form-data; boundary="}, b"--\r\n", 422, "form"),
        ({"Content-Type": "multipart/form-data; boundary=b; charset=undefined"}, NAMED, 422, "form cannot be read"),
        ({"Content-Type": f"multipart/form-data; boundary={'b' * 5000}"}, b"--b", 422, "form"),
    ],
    ids=["nothing", "json", "no boundary", "no form", "empty form", "empty boundary", "no charset", "long boundary"],
)
def test_invalid_forms(client: TestClient, headers: dict[str, str], content: bytes, status: int, message: str) -> None:
    answer = client.post("/api/search", content=content, headers=headers)
    assert (answer.status_code, message in answer.json()["detail"]) == (status, True), answer.text


def test_invalid_fields(client: TestClient) -> None:
    def error(**form: Any) -> str:
        answer = client.post("/api/search", **form)
        assert answer.status_code == 422
        return str(answer.json()["detail"])

    assert "no image" in error(files={"picture": png()})
    assert "no image" in error(files={"image": (None, "words")})
    assert "Too many files" in error(files=[("image", png()), ("image", png())])
    assert "k: " in error(files={"image": png()}, data={"k": "many"})
    assert "200" in error(files={"image": png()}, data={"k": "201"})
    assert "label: " in error(files={"image": png()}, data={"label": "x" * 1001})
    assert "form cannot be read" in error(files={"image": png()}, data={"label": "x" * 100_000})
    assert "Too many fields" in error(files={"image": png()}, data={str(number): "" for number in range(20)})


def test_nothing_is_written_to_the_disk(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    def rollover(_: object) -> None:
        raise AssertionError("the upload went to a file")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", rollover)
    large = encoded(Image.new("L", (1100, 1000)), "PNG", compress_level=0)
    assert len(large) > 2**20  # Starlette would write it to disk
    with TestClient(create_app(gallery)) as client:
        assert client.post("/api/search", files={"image": large}).status_code == 200


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(seconds=0.2), "The upload took longer than 0.2 seconds."),
        (Limits(seconds=300, grace=0.2, rate=10_000), "The upload is slower than 10 kB per second."),
        (Limits(seconds=0.3, grace=0.2, rate=10), "The upload took longer than 0.3 seconds."),  # 5 bytes in 0.5 s
    ],
    ids=["too long", "too slow", "fast enough"],
)
def test_slow_uploads_are_refused(gallery: Gallery, limits: Limits, message: str) -> None:
    async def post() -> httpx.Response:
        async def body() -> Any:
            yield b"--b\r\n"
            await asyncio.sleep(20)

        app = create_app(gallery, limits)
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/api/search", content=body(), headers=headers)

    answer = asyncio.run(post())
    assert (answer.status_code, answer.json()["detail"]) == (408, message)
