"""Metrics, the access log, readiness, and galleries that are switched while they are served."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient

from shortlist.data import TestTransform
from shortlist.encoding import Encoder
from shortlist.errors import ConfigError
from shortlist.gallery import Gallery, rebuild, switch
from shortlist.model import Embedder
from shortlist.serve import create_app, serve, service
from shortlist.serve.observer import AccessLog
from shortlist.serve.prometheus import GAUGES, ROUTES, Metrics
from shortlist.serve.server import _open_and_answer, _Settings
from tests.processes import LONG
from tests.serve.conftest import LIMITS
from tests.serve.galleries import png
from tests.serve.servers import TOKEN

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+)\})? (\S+)')  # of the text format


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Parse the text format: values by name and labels."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            found[(name, *re.findall(r'"((?:[^"\\]|\\.)*)"', labels or ""))] = float(value)
    return found


class TestMetrics:
    def test_requests_are_counted(self, client: TestClient, gallery: Gallery) -> None:
        for _ in range(3):
            assert client.post("/api/search", files={"image": png()}).status_code == 200
        client.post("/api/search", files={"image": b"words"})
        client.get("/api/items/7")
        client.get("/api/items/7000")
        client.get("/nothing")
        answer = client.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = samples(answer.text)
        counts = {key[1:]: value for key, value in found.items() if key[0] == "shortlist_request_seconds_count"}
        assert counts == {
            ("/api/search", "200"): 3,
            ("/api/search", "422"): 1,
            ("/api/items/{id}", "200"): 1,
            ("/api/items/{id}", "404"): 1,
            ("other", "404"): 1,
        }
        assert found["shortlist_request_seconds_bucket", "/api/search", "200", "+Inf"] == 3
        assert found["shortlist_gallery_images",] == len(gallery)
        assert found["shortlist_requests_in_progress",] == 1  # the request for the metrics
        assert found["shortlist_requests_waiting",] == 0
        created = gallery.store.now.manifest.created
        assert ("shortlist_gallery_info", gallery.name, created, gallery.store.fingerprint) in found
        described = re.findall("# HELP shortlist_([a-z_]+) [A-Z]", answer.text)
        assert described == re.findall("# TYPE shortlist_([a-z_]+)", answer.text)
        assert {*GAUGES, "request_seconds", "gallery_images", "gallery_info", "info"} == set(described)

    def test_buckets_are_cumulative(self) -> None:
        metrics = Metrics()
        for seconds in (0.001, 0.005, 0.3, 100):
            metrics.record("/api/search", 200, seconds)
        found = samples(metrics.text({}, {}))
        buckets = {key[-1]: value for key, value in found.items() if key[0].endswith("_bucket")}
        assert [buckets[each] for each in ("0.005", "0.01", "0.25", "0.5", "10", "+Inf")] == [2, 2, 2, 3, 3, 4]
        assert found["shortlist_request_seconds_sum", "/api/search", "200"] == pytest.approx(100.306)

    def test_sums_over_processes(self, tmp_path: Path) -> None:
        """Requests of a process that has ended count, but none of them is in progress."""
        metrics = Metrics(tmp_path)
        metrics.record("/api/items", 200, 0.1)
        metrics.change("requests_in_progress", 1)
        (tmp_path / str(2**22 + 1)).write_bytes((tmp_path / str(os.getpid())).read_bytes())  # no such process
        (tmp_path / "1").write_bytes(b"")  # has just started
        found = samples(metrics.text({}, {}))
        assert found["shortlist_request_seconds_count", "/api/items", "200"] == 2
        assert found["shortlist_requests_in_progress",] == 1

    def test_labels_are_escaped(self) -> None:
        text = Metrics().text({}, {"info": {"name": 'a "b"\n\\'}})
        assert samples(text) == {
            ("shortlist_requests_in_progress",): 0,
            ("shortlist_requests_waiting",): 0,
            ("shortlist_info", r"a \"b\"\n\\"): 1,
        }

    def test_all_routes_of_the_api_are_measured(self, client: TestClient) -> None:
        described = set(client.get("/openapi.json").json()["paths"])
        assert described == set(ROUTES) - {"other"}

    def test_the_token_is_required(self, gallery: Gallery) -> None:
        with TestClient(create_app(gallery, token=TOKEN)) as client:
            assert client.get("/metrics").status_code == 401
            assert client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
            assert client.get("/api/ready").json() == {"status": "ready"}


def test_access_log(gallery: Gallery, tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    with TestClient(create_app(gallery, LIMITS, access_log=AccessLog(file))) as client:
        answer = client.get("/api/items/3?secret=1")
        file.rename(tmp_path / "access.jsonl.1")
        client.get("/api/items/7000")
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("access.jsonl.1", "access.jsonl"))
    assert first.pop("seconds") > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    facts = {"client": "testclient", "method": "GET", "path": "/api/items/3", "status": 200, "process": os.getpid()}
    assert first == {**facts, "bytes": len(answer.content)}
    assert (second["path"], second["status"]) == ("/api/items/7000", 404)


def test_not_ready(gallery: Gallery, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_: Gallery) -> int:
        raise ConfigError("the server does not answer")

    monkeypatch.setattr(Gallery, "__len__", unavailable)
    assert client.get("/api/ready").status_code == 503
    assert client.get("/api/health").status_code == 200


def test_another_gallery_takes_its_place(gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request fails before, during or after the switch."""
    monkeypatch.setattr(service, "REFRESH_SECONDS", 0.01)
    torch.manual_seed(3)
    other = Encoder(Embedder("test_efficientnet", dim=24).eval(), TestTransform(32, 36))
    rebuild(gallery, other, tmp_path / "new", workers=0)
    switch(tmp_path / "live", gallery.store.folder)
    with TestClient(create_app(Gallery.open(tmp_path / "live"))) as client:
        image = gallery.item(5).path.read_bytes()

        def searched() -> tuple[int, str]:
            answer = client.post("/api/search", files={"image": image}, data={"k": 1})
            assert answer.status_code == 200, answer.text
            (info,) = (key for key in samples(client.get("/metrics").text) if key[0] == "shortlist_gallery_info")
            return answer.json()["results"][0]["id"], info[1]

        assert searched() == (5, "gallery")
        switch(tmp_path / "live", tmp_path / "new")
        end = time.monotonic() + LONG
        while (now := searched()) == (5, "gallery"):
            assert time.monotonic() < end
        assert now == (5, "new")


def test_what_processes_are_given_can_be_pickled() -> None:
    settings = _Settings(LIMITS, {"localhost"}, TOKEN, Path("log"), 1)
    given = (_open_and_answer, ("gallery", None), settings)
    assert pickle.loads(pickle.dumps(given)) == given


def test_a_gallery_that_only_this_process_can_open(gallery: Gallery) -> None:
    created = Gallery(gallery.store)
    with pytest.raises(ConfigError, match="Only this process can open the gallery"):
        serve(created, port=0, processes=2)
