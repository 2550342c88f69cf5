"""Requests need the token, or the cookie that the page gets for it."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

import shortlist.serve
from shortlist.errors import ConfigError
from shortlist.gallery.gallery import Gallery
from shortlist.serve import create_app
from tests.serve.galleries import png
from tests.serve.servers import TOKEN
from tests.serve.test_command import run

RIGHT = {"Authorization": f"Bearer {TOKEN}"}
OPEN = ["/", "/app.js", "/docs", "/openapi.json", "/api/health", "/api/ready"]


@pytest.fixture
def client(gallery: Gallery) -> Iterator[TestClient]:
    with TestClient(create_app(gallery, token=TOKEN)) as client:
        yield client


def test_every_endpoint_needs_it(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    endpoints = {(method, path) for path, each in described["paths"].items() for method in each}
    endpoints = endpoints - {("get", "/api/health"), ("get", "/api/ready")} | {("post", "/api/sign-in")}
    assert len(endpoints) == 9
    for method, path in endpoints:
        refused = client.request(method, path.replace("{id}", "0"))
        assert refused.status_code == 401, path
        assert "Authorization: Bearer" in refused.json()["detail"]
        assert refused.headers["www-authenticate"] == "Bearer"
        if path != "/api/sign-in":
            assert "401" in described["paths"][path][method]["responses"]
            assert described["paths"][path][method]["security"]
        files = {"image": png()} if path == "/api/search" else None
        assert client.request(method, path.replace("{id}", "0"), headers=RIGHT, files=files).is_success, path
        client.cookies.clear()


@pytest.mark.parametrize(
    "value",
    [f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, b"Bearer \xff\xfe"],
    ids=["longer", "shorter", "nothing", "empty", "another scheme", "no scheme", "not ASCII"],
)
def test_other_tokens_are_refused(client: TestClient, value: str | bytes) -> None:
    assert client.get("/api/gallery", headers={"Authorization": value}).status_code == 401
    assert client.post("/api/sign-in", headers={"Authorization": value}).headers.get("set-cookie") is None


def test_what_is_public_says_nothing_about_the_gallery(client: TestClient, gallery: Gallery) -> None:
    for path in OPEN:
        answer = client.get(path)
        assert answer.status_code == 200
    assert "Search a gallery by image." in client.get("/openapi.json").text


def test_the_cookie_of_the_page(client: TestClient, gallery: Gallery) -> None:
    answer = client.post("/api/sign-in", headers=RIGHT)
    cookie = answer.headers["set-cookie"]
    assert (answer.status_code, TOKEN in cookie) == (204, False)
    for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age="):
        assert part in cookie
    assert "Secure" not in cookie
    assert client.get("/api/items/0/thumbnail").status_code == 200
    (name,) = client.cookies
    with TestClient(create_app(gallery, token=f"another-{TOKEN}"), cookies=client.cookies) as other:
        assert other.get("/api/gallery").status_code == 401
        other.post("/api/sign-in", headers={"Authorization": f"Bearer another-{TOKEN}"})
        assert len({*other.cookies, name}) == 2  # so that two servers on one computer do not replace their cookies
    client.cookies.clear()
    client.cookies.set(name, "0" * 64)
    assert client.get("/api/gallery").status_code == 401


def test_the_cookie_is_for_https_only_behind_https(gallery: Gallery) -> None:
    with TestClient(create_app(gallery, token=TOKEN), base_url="https://testserver") as client:
        assert "Secure" in client.post("/api/sign-in", headers=RIGHT).headers["set-cookie"]


def test_it_is_compared_in_constant_time(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    original = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for value in ("x", TOKEN[:-1], TOKEN, TOKEN * 9):
        client.get("/api/gallery", headers={"Authorization": f"Bearer {value}"})
    assert compared == [(32, 32)] * 8  # the token and the cookie, of any length, by their digests


def test_an_upload_without_it_is_not_read(client: TestClient) -> None:
    def body() -> Iterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    form = {"Content-Type": "multipart/form-data; boundary=b", "Content-Length": "1000"}
    with pytest.raises(AssertionError, match="it was read"):
        client.post("/api/search", content=body(), headers=form | RIGHT)
    answer = client.post("/api/search", content=b"--b", headers=form)
    assert answer.status_code == 401


@pytest.mark.parametrize("token", ["", "short", "fifteen-letters", "sixteen letters-", "sixteen-letters-é"])
def test_weak_and_impossible_tokens(gallery: Gallery, token: str) -> None:
    with pytest.raises(ConfigError, match="at least 16 characters"):
        create_app(gallery, token=token)


@pytest.mark.parametrize("given", ["option", "variable", "file", "nothing"])
def test_where_the_command_gets_it(
    given: str, gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[str, Any] = {}
    monkeypatch.setattr(shortlist.serve, "serve", lambda *_, **options: used.update(options))
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    if given == "variable":
        monkeypatch.setenv("SHORTLIST_TOKEN", TOKEN)
    options = {"option": ("--token", TOKEN), "file": ("--token-file", str(tmp_path / "token"))}.get(given, ())
    code, err = run(str(gallery.store.folder), *options, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, err, used["token"]) == (0, "", None if given == "nothing" else TOKEN)


def test_mistakes_on_the_command_line(
    gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)

    def error(*options: str) -> str:
        code, err = run(str(gallery.store.folder), *options, capsys=capsys, monkeypatch=monkeypatch)
        assert (code, err.count("\n")) == (1, 1)
        return err

    assert error("--token", "short").startswith("Error: --token must have at least 16 characters")
    assert "Cannot read the token file" in error("--token-file", str(tmp_path / "nothing"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "it is not a text file" in error("--token-file", str(tmp_path / "binary"))
    monkeypatch.setenv("SHORTLIST_TOKEN", TOKEN)
    assert "Two tokens are given" in error("--token-file", str(tmp_path / "binary"))
    monkeypatch.setenv("SHORTLIST_TOKEN", "")  # set by mistake, but not to the token
    assert error().startswith("Error: --token must have at least 16 characters")
