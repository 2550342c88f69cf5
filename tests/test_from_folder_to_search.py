"""The commands of docs/from-folder-to-search.md, in their order, in an empty folder.

As they stand, but for the length of the training, and a free port for the page.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

from shortlist.training import Display, RunFolder
from shortlist.training.opening import open_images
from tests.processes import LONG

PAGE = Path(__file__).parents[1] / "docs" / "from-folder-to-search.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SHORTER = {"shortlist train": "training.epochs=1 evaluation.bootstrap=100", "shortlist serve": "--port 0"}


def command(block: str) -> str:
    extra = [text for start, text in SHORTER.items() if block.startswith(start)]
    return " ".join([block.rstrip("\n"), *extra])


def environment() -> dict[str, str]:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": tools, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


@contextmanager
def served(block: str, folder: Path) -> Iterator[str]:
    """The address of the page, while it is served."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command(block)}"], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG)


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder after all commands but the last, and what each printed."""
    folder, printed = tmp_path_factory.mktemp("from folder to search"), []
    for block in BLOCKS[:-1]:
        done = subprocess.run(
            ["bash", "-e", "-c", command(block)], cwd=folder, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    return folder, printed


def test_the_commands_are_five() -> None:
    assert [block.split()[1] for block in BLOCKS[1:]] == ["train", "report", "index", "search", "serve"]
    assert all(block.count("\n") == 1 for block in BLOCKS[1:])


def test_what_they_leave(after: tuple[Path, list[str]]) -> None:
    folder, _ = after
    left = {each.name for each in folder.iterdir()}
    assert left == {"characters", "new", "runs", "gallery", "found.png"}
    assert len(list((folder / "characters").glob("*/*.png"))) == 300 * 15
    assert len(list((folder / "new").iterdir())) == 300
    report = (folder / "runs" / "characters" / "report.html").read_text(encoding="utf-8")
    assert report.lower().startswith("<!doctype html>")
    with Image.open(folder / "found.png") as sheet:
        assert sheet.width > 5 * 100


def test_what_is_found(after: tuple[Path, list[str]]) -> None:
    _, printed = after
    found = printed[-1]
    assert "latin capital r.png" in found
    assert "greek capital psi.png" in found
    assert len(re.findall(r" [01]\.\d{4} ", found)) == 2 * 5


def test_the_queries_are_of_the_test(after: tuple[Path, list[str]]) -> None:
    folder, _ = after
    catalog = open_images(RunFolder.open(folder / "runs" / "characters").config(), Display()).catalog
    tested = {catalog.class_names[label] for label in catalog.split("test").classes()}
    assert set(re.findall(r"new/([^\"]+)\.png", BLOCKS[-2])) <= tested


def test_the_page(after: tuple[Path, list[str]]) -> None:
    folder, _ = after
    with served(BLOCKS[-1], folder) as address, httpx.Client(base_url=address, timeout=LONG) as client:
        assert client.get("/").text.lower().startswith("<!doctype html>")
        assert client.get("/api/health").status_code == 200
        with (folder / "new" / "greek capital psi.png").open("rb") as image:
            found = client.post("/api/search", files={"image": image}, data={"k": "5"})
        assert found.status_code == 200, found.text
        assert len(found.json()["results"]) == 5
