"""The Python blocks of each page of the documentation are one program, which runs as a script without warnings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Commands

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
WITHOUT_PYTHON = {"licences.md", "PLAN.md", "results.md", "from-folder-to-search.md"}
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


PROGRAMS = [page for page in PAGES if page.name not in WITHOUT_PYTHON]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_a_page_runs_as_a_script(page: Path, commands: Commands, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program(page), encoding="utf-8")
    code, _, error = commands.run(cwd=tmp_path, before=MANY_CORES + FEW_GLYPHS, script=script)
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


def test_the_training_loop_of_a_page_gives_the_same_in_two_processes(commands: Commands, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(program(ROOT / "docs" / "distributed.md"), encoding="utf-8")
    code, one, error = commands.run(cwd=tmp_path, script=script)
    assert code == 0, error
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*launcher, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (loss, norm), found = ([float(each) for each in re.findall(r"\d+\.\d+", text)] for text in (one, done.stdout))
    assert found == [pytest.approx(loss, abs=2e-4), pytest.approx(norm, abs=2e-3)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
