"""Runs that are trained once for all tests of reports."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest

from shortlist.training import RunFolder
from tests.report.runs import CopyRun, images_with_a_nasty_class, trained


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of the runs. A test that changes them needs a copy."""
    return images_with_a_nasty_class(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def copy_run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> CopyRun:
    """Copy a run with the given overrides to a new folder; it is trained when it is first needed."""

    @cache
    def train_once(*overrides: str) -> Path:
        return trained(source, tmp_path_factory.mktemp("trained") / "run", *overrides).path

    def copy(path: Path, *overrides: str) -> RunFolder:
        return RunFolder(Path(shutil.copytree(train_once(*overrides), path)))

    return copy
