"""The Python blocks of each page of the documentation are one program, which runs as a script without warnings."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.data.pictures import write
from tests.processes import Commands, free_port
from tests.training.runs import class_folders

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
WITHOUT_PYTHON = {"licences.md", "PLAN.md", "growth.md", "results.md", "from-folder-to-search.md"}
# With two cores, a process decodes images by default. A warning is an error.
MANY_CORES = """
import os, warnings
os.cpu_count, os.sched_getaffinity = lambda: 2, lambda _: {0, 1}
warnings.simplefilter("error")
"""
# A third of the classes of glyphs, with 6 of the 16 images of each; it is enough for the default of one process.
FEW_GLYPHS = """
from shortlist.data.benchmarks import glyphs
whole = glyphs.glyphs
glyphs.glyphs = lambda *args, **options: whole(*args, **options).subset(
    [row for row in range(300 * 16) if row // 16 % 3 == 0 and row % 16 < 6]
)
"""
# The recipe for folders of images, with a model that needs no download and trains in a second.
SMALL_MODEL = """
from shortlist import recipes
packaged = recipes._packaged_values
small = {
    "images": {"size": 32},
    "model": {"backbone": "test_vit", "backbone_args": {"depth": 1}, "weights": "none", "dim": 8},
    "evaluation": {"bootstrap": 20, "before": False},
}
recipes._packaged_values = lambda name: {**packaged(name), **small} if name == "folder" else packaged(name)
"""


def program(page: Path) -> str:
    """Return the Python blocks of a page; other lines are empty, so that an error names the line of the page."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside, line = line == "```python", ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def test_pages_without_python() -> None:
    assert {page.name for page in PAGES if not program(page).strip()} == WITHOUT_PYTHON


def test_no_block_of_python_is_left_out() -> None:
    blocks = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [each for page in PAGES for each in blocks.findall(page.read_text(encoding="utf-8"))]
    unmarked = [block for language, block in found if not language]
    assert [block for block in unmarked if re.match(r"import |from \S+ import ", block)] == []


PROGRAMS = [page for page in PAGES if page.name not in WITHOUT_PYTHON]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that pages read from the current folder: images of the user."""
    folder = tmp_path_factory.mktemp("files")
    class_folders(folder / "my-images")
    for name in ("a.jpg", "b.jpg", "photo.jpg"):
        write(folder / name)
    return folder


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_a_page_runs_as_a_script(page: Path, commands: Commands, files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program(page), encoding="utf-8")
    code, _, error = commands.run(cwd=tmp_path, before=MANY_CORES + FEW_GLYPHS + SMALL_MODEL, script=script)
    assert code == 0, error


def test_the_commands_that_train_the_loss_of_a_page(commands: Commands, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    module = re.search(r"```python\n(# losses\.py\n.*?)```", page, re.DOTALL)
    given = re.findall(r"^shortlist (.*losses:.*)$", page, re.MULTILINE)
    assert module is not None
    assert len(given) == 2
    (tmp_path / "losses.py").write_text(module[1], encoding="utf-8")
    fast = ("training.epochs=null", "training.steps=1", "batch.size=16", "evaluation={before: false, bootstrap: 0}")
    for command in given:
        code, _, error = commands.run(*shlex.split(command), *fast, "data.workers=0", cwd=tmp_path, before=FEW_GLYPHS)
        assert code == 0, error
    assert "discount: 2" in (tmp_path / "runs" / "glyphs-2" / "config.yaml").read_text()


# A process that torchrun starts: it lets the fork server run the script, which thus need not import torch.
WORKER = """
import os, sys
from pathlib import Path
from tests.processes import Commands
folder, address, script = map(Path, sys.argv[1:])
launched = f"import os\\nos.environ.update({dict(os.environ)})"
code, out, err = Commands(folder / os.environ["RANK"], address, 0).run(cwd=folder, before=launched, script=script)
print(out, end="")
sys.exit(err or code)
"""


def test_the_training_loop_of_a_page_gives_the_same_on_two_nodes(commands: Commands, tmp_path: Path) -> None:
    """Two machines, here the same one, with a process each."""
    script, worker = tmp_path / "train.py", tmp_path / "worker.py"
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script.write_text(re.findall(r"```python\n(# train\.py\n.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    worker.write_text(WORKER, encoding="utf-8")
    code, one, error = commands.run(cwd=tmp_path, script=script)
    assert code == 0, error
    port = free_port()
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    command = ["--nproc-per-node=1", *map(str, (worker, tmp_path, commands.address, script))]
    launchers = [[*meeting, f"--rdzv-conf=is_host={node == 0}", *command] for node in range(2)]
    launch = "from torch.distributed.run import main\nmain({})\nraise SystemExit"
    nodes = [commands.start(cwd=tmp_path, before=launch.format(each)) for each in launchers]
    assert [each.wait() for each in nodes] == [0, 0], nodes[0].err + nodes[1].err
    (loss, norm), found = (
        [float(each) for each in re.findall(r"\d+\.\d+", text)] for text in (one, nodes[0].out + nodes[1].out)
    )
    assert found == [pytest.approx(loss, abs=2e-4), pytest.approx(norm, abs=2e-3)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
