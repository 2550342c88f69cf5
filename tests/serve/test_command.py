"""The command `shortlist serve` and its error messages."""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shortlist.cli import main
from shortlist.gallery.gallery import Gallery
from tests.processes import LONG, Commands
from tests.serve.galleries import png
from tests.serve.servers import serving


def test_it_serves_until_it_is_interrupted(commands: Commands, gallery: Gallery) -> None:
    with (
        serving(commands, gallery.store.folder, "--max-pixels", "1000", "--max-bytes", "30000") as server,
        httpx.Client(base_url=server.address, timeout=LONG) as client,
    ):
        assert server.address.startswith("http://127.0.0.1:")
        assert client.get("/").headers["content-type"].startswith("text/html")
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
        assert client.get(server.address.replace("127.0.0.1", "localhost")).status_code == 200
        answer = client.post("/api/search", files={"image": png(100, 100)})
        assert (answer.status_code, "0.001 million" in answer.text) == (413, True)
        answer = client.post("/api/search", files={"image": b"x" * 30_001})
        assert (answer.status_code, "at most 0.0286102 MB" in answer.text) == (413, True)


def run(*args: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
    monkeypatch.setattr(logging.getLogger("accelerate"), "level", logging.WARNING)
    monkeypatch.setattr(sys, "argv", ["shortlist", "serve", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "TAKEN"), "Cannot listen on 127.0.0.1, port TAKEN (Address already in use): try another --port"),
        (("--host", "no.such.host.invalid"), "Cannot listen on no.such.host.invalid"),
    ],
)
def test_addresses_that_cannot_be_used(
    gallery: Gallery,
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        args = (str(gallery.store.folder), *(option.replace("TAKEN", taken) for option in options))
        code, err = run(*args, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"Error: {message.replace('TAKEN', taken)}")


def test_not_a_gallery(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, err = run(str(tmp_path), capsys=capsys, monkeypatch=monkeypatch)
    assert (code, err.count("\n")) == (1, 1)
    assert str(tmp_path) in err


@pytest.mark.parametrize("options", [(), ("--access-log", "-")])
def test_the_log_on_standard_output_has_no_other_lines(
    gallery: Gallery, options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def announce(*_: object, ready: Callable[[str, bool], None], **__: object) -> None:
        ready("http://ADDRESS", True)

    monkeypatch.setattr("shortlist.serve.serve", announce)
    code, err = run(str(gallery.store.folder), *options, capsys=capsys, monkeypatch=monkeypatch)
    messages = [f"Serving gallery with {len(gallery)} images at http://ADDRESS", "Everyone who can connect"]
    assert code == 0
    assert [message in err for message in messages] == [bool(options)] * 2


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "python_multipart"])
def test_missing_packages(commands: Commands, package: str, tmp_path: Path) -> None:
    missing = f"import sys; sys.modules[{package!r}] = None"
    code, _, err = commands.run("serve", "x", cwd=tmp_path, before=missing)
    assert code == 1
    message = f"shortlist.serve needs the package {package}, which is not installed: pip install 'shortlist[serve]'"
    assert err == f"Error: {message}\n"
