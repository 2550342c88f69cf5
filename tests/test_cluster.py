"""The scripts in docs/cluster cover all shards, and the Slurm script really embeds them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from shortlist.cli import embedding  # noqa: F401 - registers its command
from shortlist.cli.app import app
from shortlist.encoding import Shard

CLUSTER = Path(__file__).parents[1] / "docs" / "cluster"
PRINTING = '#!/bin/sh\nfor each in "$@"; do echo "$each"; done\n'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables in which `shortlist` prints its arguments, one per line."""
    (tmp_path / "shortlist").write_text(PRINTING)
    (tmp_path / "shortlist").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


def run(command: list[str | Path], environment: dict[str, str], **variables: object) -> list[str]:
    """Return the arguments that a command starts `shortlist` with, whose options must exist."""
    values = {name: str(value) for name, value in variables.items()}
    result = subprocess.run(command, env={**environment, **values}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    arguments = result.stdout.splitlines()
    known = {option for each in get_command(app).commands[arguments[0]].params for option in each.opts}
    assert {each for each in arguments if each.startswith("-")} <= known
    return arguments


def all_shards(number: int) -> list[Shard]:
    return [Shard(index, number) for index in range(number)]


def job(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specification of a Kubernetes job, and its only container."""
    read = yaml.safe_load((CLUSTER / name).read_text())
    assert (read["apiVersion"], read["kind"], read["metadata"]["name"]) == ("batch/v1", "Job", Path(name).stem)
    pod = read["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"  # which backoffLimitPerIndex requires
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    return read["spec"], container


def test_slurm(environment: dict[str, str]) -> None:
    script = CLUSTER / "embed-shards.sh"
    (array,) = [
        line.partition("=")[2] for line in script.read_text().splitlines() if line.startswith("#SBATCH --array")
    ]
    first, last = map(int, array.split("-"))
    command = ["bash", script, "my run", "images", "out.parquet"]
    found = [run(command, environment, SLURM_ARRAY_TASK_ID=index) for index in range(first, last + 1)]
    assert found[0][:-1] == ["embed", "my run", "images", "--out", "out.parquet", "--shard"]
    assert [Shard.parse(arguments[-1]) for arguments in found] == all_shards(last + 1)
    with pytest.raises(AssertionError, match="Parquet file"):
        run(command[:-1], environment, SLURM_ARRAY_TASK_ID=0)


def test_kubernetes(environment: dict[str, str]) -> None:
    shards, container = job("embed-shards.yaml")
    _, merging = job("embed-merge.yaml")
    number = shards["completions"]
    assert (shards["completionMode"], shards["parallelism"]) == ("Indexed", number)
    command = [*container["command"], *container["args"]]
    found = [run(command, environment, JOB_COMPLETION_INDEX=index) for index in range(number)]
    assert [Shard.parse(arguments[-1]) for arguments in found] == all_shards(number)
    merge = run([*merging["command"], *merging["args"]], environment)
    assert merge == [*found[0][:-2], "--merge"]
    assert merging["image"] == container["image"]
