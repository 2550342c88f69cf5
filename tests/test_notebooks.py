"""The notebooks open anywhere, hold no output, and run from the first cell to the last."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Commands
from tests.test_docs import MANY_CORES, ROOT

pytestmark = pytest.mark.long
FOLDER = ROOT / "docs" / "notebooks"
RESULTS = {  # what a notebook should have found, as Python at its end
    "folder-to-search": "assert r1.value > 0.3 and len(hits) == 5 and len(found) == 3",
    "own-training-loop": "assert after > before + 0.1 and own_after > own_before + 0.1",
}
KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "execution_count", "id", "metadata", "outputs", "source"},
}
each_notebook = pytest.mark.parametrize("name", RESULTS)


def notebook(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return content


def test_every_notebook_is_here_and_linked() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {file.stem for file in FOLDER.iterdir()} == RESULTS.keys()
    assert all(f"](docs/notebooks/{name}.ipynb)" in readme for name in RESULTS)


@each_notebook
def test_it_opens_anywhere_and_has_no_output(name: str) -> None:
    """Version 4.5 of the format, with any kernel of Python 3."""
    content = notebook(name)
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"].keys() == {"kernelspec", "language_info"}
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    for cell in content["cells"]:
        assert cell.keys() == KEYS[cell["cell_type"]]
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,64}", each) for each in ids)


@each_notebook
def test_it_runs(name: str, commands: Commands, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    cells = ["".join(cell["source"]) for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]
    script.write_text("\n\n".join([*cells, RESULTS[name]]), encoding="utf-8")
    code, _, error = commands.run(cwd=tmp_path, before=MANY_CORES, script=script)
    assert code == 0, error
