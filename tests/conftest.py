"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from shortlist.errors import ConfigError
from shortlist.processor import require_bfloat16
from tests.processes import Commands, commands

try:
    require_bfloat16()  # before torch computes anything; what the tests start inherits the environment
except ConfigError as error:
    raise pytest.UsageError(str(error)) from None


def pytest_configure() -> None:
    """A shell's background jobs begin by ignoring Ctrl-C, and so would all that the tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models as small as those of the tests, more only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Starts commands and scripts without importing torch for each of them."""
    with commands(tmp_path_factory.mktemp("processes")) as opened:
        yield opened
