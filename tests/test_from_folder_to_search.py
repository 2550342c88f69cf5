"""The commands of docs/from-folder-to-search.md, in their order, in an empty folder.

As they stand, but for a short training of a small network, and a free port for the page.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx
import pytest
from PIL import Image

from shortlist.training import Display, RunFolder
from shortlist.training.datasets import open_images
from tests.processes import LONG, Commands
from tests.serve.servers import address_of

PAGE = Path(__file__).parents[1] / "docs" / "from-folder-to-search.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SMALL = "model.backbone_args={channels: [8, 8, 16, 16], stem_width: 8, norm_layer: groupnorm1}"
OTHERWISE = {
    "train": ["training.epochs=null", "training.steps=2", "evaluation.bootstrap=100", "data.workers=0", SMALL],
    "index": ["--workers", "0"],
    "serve": ["--port", "0"],
}


def args(block: str) -> list[str]:
    """Of a block with one command."""
    program, name, *others = shlex.split(block)
    assert program == "shortlist"
    return [name, *others, *OTHERWISE.get(name, [])]


@pytest.fixture(scope="module")
def after(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder after all commands but the last, and what each printed."""
    folder, printed = tmp_path_factory.mktemp("from folder to search"), []
    begin, end = "python - <<'END'\n", "END\n"  # between them, a shell changes nothing
    assert BLOCKS[0].startswith(begin)
    assert BLOCKS[0].endswith(end)
    script = tmp_path_factory.mktemp("script") / "draw.py"
    script.write_text(BLOCKS[0].removeprefix(begin).removesuffix(end), encoding="utf-8")
    code, out, err = commands.run(cwd=folder, script=script)
    assert code == 0, f"{out}\n{err}"
    for block in BLOCKS[1:-1]:
        code, out, err = commands.run(*args(block), cwd=folder)
        assert code == 0, f"{block}\n{out}\n{err}"
        printed.append(out)
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


def test_the_page(after: tuple[Path, list[str]], commands: Commands) -> None:
    folder, _ = after
    with (
        commands.started(*args(BLOCKS[-1]), cwd=folder) as running,
        httpx.Client(base_url=address_of(running), timeout=LONG) as client,
    ):
        assert client.get("/").text.lower().startswith("<!doctype html>")
        assert client.get("/api/health").status_code == 200
        with (folder / "new" / "greek capital psi.png").open("rb") as image:
            found = client.post("/api/search", files={"image": image}, data={"k": "5"})
        assert found.status_code == 200, found.text
        assert len(found.json()["results"]) == 5
