"""The commands of docs/from-folder-to-search.md, in their order, in an empty folder.

Unlike on the page, training is short and uses a few classes and a small network, the pretrained model is small and has
random weights, and the port is a free one.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import httpx
import pytest
from PIL import Image

from shortlist.data import open_catalog
from tests.processes import LONG, Commands
from tests.serve.servers import address_of

PAGE = Path(__file__).parents[1] / "docs" / "from-folder-to-search.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SMALL = "model.backbone_args={channels: [8, 8, 16, 16], stem_width: 8, norm_layer: groupnorm1}"
QUERIES = ("latin capital r", "greek capital psi")
CLASSES = 24  # that are trained on and tested, with all 15 images of each
PRETRAINED = {"timm:tf_efficientnet_lite0": "timm:test_resnet@none"}
OTHERWISE = {
    "train": [
        *("training.epochs=null", "training.steps=2", "batch.size=40", "evaluation.bootstrap=100", "data.workers=0"),
        SMALL,
    ],
    "index": ["--workers", "0"],
    "serve": ["--port", "0"],
}


def args(block: str) -> list[str]:
    """The arguments of a block with one command."""
    program, name, *others = shlex.split(block)
    assert program == "shortlist"
    return [name, *(PRETRAINED.get(each, each) for each in others), *OTHERWISE.get(name, [])]


@pytest.fixture(scope="module")
def images(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the first block, which draws the images."""
    folder = tmp_path_factory.mktemp("from folder to search")
    begin, end = "python - <<'END'\n", "END\n"  # a shell changes nothing between them
    assert BLOCKS[0].startswith(begin)
    assert BLOCKS[0].endswith(end)
    script = tmp_path_factory.mktemp("script") / "draw.py"
    script.write_text(BLOCKS[0].removeprefix(begin).removesuffix(end), encoding="utf-8")
    code, out, err = commands.run(cwd=folder, script=script)
    assert code == 0, f"{out}\n{err}"
    return folder


@pytest.fixture(scope="module")
def after(images: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with some of the images, after all commands but the last, and the output of each."""
    folder, printed = tmp_path_factory.mktemp("after"), []
    shutil.copytree(images / "new", folder / "new")
    names = sorted({each.name for each in (images / "characters").iterdir()} - {*QUERIES})
    for name in (*QUERIES, *names[: CLASSES - len(QUERIES)]):
        shutil.copytree(images / "characters" / name, folder / "characters" / name)
    for block in BLOCKS[1:-1]:
        code, out, err = commands.run(*args(block), cwd=folder)
        assert code == 0, f"{block}\n{out}\n{err}"
        printed.append(out)
    return folder, printed


def test_commands_of_the_page() -> None:
    before, after = ["index", "search", "evaluate"], ["train", "compare", "index", "search", "serve"]
    assert [block.split()[1] for block in BLOCKS[1:]] == before + after
    assert sum(name in block for block in BLOCKS for name in PRETRAINED) == 3
    assert all(block.count("\n") == 1 for block in BLOCKS[1:])


def test_images_are_drawn(images: Path) -> None:
    assert {each.name for each in images.iterdir()} == {"characters", "new"}
    assert len(list((images / "characters").glob("*/*.png"))) == 300 * 15
    assert len(list((images / "new").iterdir())) == 300


def test_the_queries_show_test_classes(images: Path) -> None:
    assert set(re.findall(r"new/([^\"]+)\.png", BLOCKS[-2])) == {*QUERIES}
    seed = re.search(r"data\.split_seed=(\d+)", "".join(BLOCKS))
    assert seed is not None
    catalog = open_catalog(images / "characters", split_seed=int(seed[1]))
    assert {*QUERIES} <= {catalog.class_names[label] for label in catalog.split("test").classes()}


def test_files_that_the_commands_write(after: tuple[Path, list[str]]) -> None:
    folder, _ = after
    assert {each.name for each in folder.iterdir()} == {
        *("characters", "new", "runs", "gallery", "trained", "comparison.html", "found.png")
    }
    report = (folder / "runs" / "characters" / "report.html").read_text(encoding="utf-8")
    assert report.lower().startswith("<!doctype html>")
    with Image.open(folder / "found.png") as sheet:
        assert sheet.width > 5 * 100


def test_results_of_the_search(after: tuple[Path, list[str]]) -> None:
    _, printed = after
    for found in (printed[1], printed[-1]):
        assert all(f"{query}.png" in found for query in QUERIES)
        assert len(re.findall(r" [01]\.\d{4} ", found)) == 2 * 5


def test_results_on_the_labels(after: tuple[Path, list[str]]) -> None:
    _, printed = after
    assert re.search(r"r@1 +│ \d", printed[2])
    assert "timm:test_resnet@none" in printed[4]
    assert "r@1" in printed[4]


def test_the_search_page(after: tuple[Path, list[str]], commands: Commands) -> None:
    folder, _ = after
    with (
        commands.started(*args(BLOCKS[-1]), cwd=folder) as running,
        httpx.Client(base_url=address_of(running), timeout=LONG) as client,
    ):
        assert client.get("/").text.lower().startswith("<!doctype html>")
        assert client.get("/api/health").status_code == 200
        with (folder / "new" / "greek capital psi.png").open("rb") as image:
            found = client.post("/api/search", files={"image": image}, data={"k": "5", "min_score": "-1"})
        assert found.status_code == 200, found.text
        assert len(found.json()["results"]) == 5
