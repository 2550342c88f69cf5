"""The commands of docs/operations.md, and its list of metrics."""

# ruff: noqa: F811 - a fixture of test_cli

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from shortlist.serve.prometheus import GAUGES
from tests.test_cli import Call, assert_error, call  # noqa: F401

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"


def test_the_commands(call: Call, folders: Path, tmp_path: Path) -> None:
    """Servers are started with a gallery that does not exist: only their options are checked."""
    for name in ("first", "second"):
        shutil.copytree(folders / "run", tmp_path / "runs" / name)
    for name in ("photos", "queries"):
        (tmp_path / name).symlink_to(folders / "images")
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) == 10
    for command in commands:
        if command[0] == "serve":
            assert_error(call("serve", "missing", *command[2:]), "No gallery found in missing")
        else:
            code, _, error = call(*command)
            assert code == 0, (command, error)
    assert (tmp_path / "comparison.html").is_file()


def test_all_metrics_are_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in GAUGES if f"`shortlist_{name}`" not in text] == []
