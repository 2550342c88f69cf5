"""A local stand-in for the Hugging Face Hub: the requests to create a repository and to commit to it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_only_for_the_fake_hub"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0


@dataclass
class FakeHub:
    """Contents of the Hub. If `refuse` is set, every commit is answered with this status."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    refuse: int | None = None
    address: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if (method, path) == ("POST", "/api/repos/create"):
            return self.create(json.loads(body))
        if (method, path) == ("POST", "/api/validate-yaml"):
            _, head, _ = json.loads(body)["content"].split("---\n", 2)
            return 200, {"errors": [] if "license" in yaml.safe_load(head) else ["no license"], "warnings": []}
        if method == "PUT":
            self.large[path.removeprefix("/large/")] = body
            return 200, {}
        name = "/".join(path.removeprefix("/api/models").removesuffix(".git/info/lfs/objects/batch").split("/")[1:3])
        repository, action = self.repositories[name], path.rpartition(name)[2]
        if action == "":
            return 200, {"id": name, "private": repository.private, "siblings": [], "tags": []}
        if action == "/preupload/main":
            return 200, {"files": [_upload_mode(each["path"]) for each in json.loads(body)["files"]]}
        if action == ".git/info/lfs/objects/batch":
            return 200, {"transfer": "basic", "objects": [self._place(each) for each in json.loads(body)["objects"]]}
        assert action == "/commit/main", path
        return self.commit(name, [json.loads(line) for line in body.splitlines()])

    def create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{self.address}/{name}", "id": name}
        if name in self.repositories:
            return 409, answer
        self.repositories[name] = Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
        return 200, answer

    def commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        if self.refuse is not None:
            return self.refuse, {"error": "no"}
        repository = self.repositories[name]
        repository.commits += 1
        for value in (line["value"] for line in lines if line["key"] == "file"):
            repository.files[value["path"]] = base64.b64decode(value["content"])
        for value in (line["value"] for line in lines if line["key"] == "lfsFile"):
            repository.files[value["path"]] = self.large[value["oid"]]
            assert hashlib.sha256(self.large[value["oid"]]).hexdigest() == value["oid"]
        return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.address}/{name}/commit/{'0' * 40}"}

    def _place(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {**asked, "actions": {"upload": {"href": f"{self.address}/large/{asked['oid']}", "header": {}}}}


def _upload_mode(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A Hub that answers at `address` until the end of the block."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            allowed = self.command == "PUT" or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            path = self.path.partition("?")[0]
            status, answer = hub.answer(self.command, path, body) if allowed else (401, {"error": "who are you?"})
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # seconds until it sees its end
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
