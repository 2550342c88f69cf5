"""Allowed hosts, requests from other sites, and security headers."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from shortlist.gallery.gallery import Gallery
from shortlist.serve import create_app, web_app


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/health", "/api/items/0/image", "/nothing", "/docs"])
def test_headers_of_every_response(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "cache-control" in headers
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "[::1]:8080", "[::1]"])
def test_names_of_this_computer(gallery: Gallery, host: str) -> None:
    client = TestClient(create_app(gallery, hosts={"localhost", "127.0.0.1", "[::1]"}))
    assert client.get("/api/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8080", "127.0.0.1.nip.io", "", "::1", "a:b"])
def test_other_host_names_are_refused(gallery: Gallery, host: str) -> None:
    client = TestClient(create_app(gallery, hosts={"localhost", "127.0.0.1", "[::1]"}))
    answer = client.get("/api/items/0/image", headers={"Host": host})
    assert answer.status_code == 400
    assert "localhost" in answer.json()["detail"]


def test_any_host_name_by_default(gallery: Gallery) -> None:
    assert TestClient(create_app(gallery)).get("/api/health", headers={"Host": "server"}).status_code == 200


def test_requests_from_other_sites_are_refused(client: TestClient) -> None:
    for path in ("/api/items/0/image", "/api/gallery"):
        answer = client.get(path, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})
        assert answer.status_code == 403
    assert client.post("/api/search", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200  # following a link is allowed
    assert client.post("/api/search", headers=link).status_code == 403  # submitting a form is not


def test_the_page_loads_nothing_from_other_sites() -> None:
    for file in web_app.PAGE.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), file.name
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\bstyle=|\son[a-z]+=", text), file.name
