"""Settings of all tests: one thread per process, random numbers seeded per test, and no file or socket left open."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from zlib import crc32

import hypothesis
import pytest
import torch

from shortlist.bfloat16 import require_bfloat16
from shortlist.errors import ConfigError
from tests.processes import Commands

try:
    require_bfloat16()  # before torch computes anything; what the tests start inherits the environment
except ConfigError as error:
    raise pytest.UsageError(str(error)) from None

gc.disable()  # until the tests are collected: imports leave little to collect, and looking for it takes seconds


def pytest_configure() -> None:
    os.fsync = os.fstat  # also an error for a closed file, but no wait for the disk: no test cuts the power
    torch.set_num_threads(1)  # make test starts a worker per core, and models this small gain nothing from more
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, and for the processes that tests start
    # A shell starts background jobs with SIGINT ignored, which the processes that tests interrupt would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unhurried = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("any machine", **unhurried)
    hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start modules with the mark `long` first: a worker that gets one last would keep the others waiting.

    pytest-xdist gives each worker a contiguous part of the list. The long modules are divided among the starts of the
    parts; a module stays together, since its tests share fixtures.
    """
    long = [item for item in items if item.get_closest_marker("long") is not None]
    others = iter([item for item in items if item.get_closest_marker("long") is None])
    starts: list[list[pytest.Item]] = [[] for _ in range(getattr(config, "workerinput", {}).get("workercount", 1))]
    for number, (_, module) in enumerate(itertools.groupby(long, key=lambda item: item.path)):
        starts[number % len(starts)].extend(module)
    ordered: list[pytest.Item] = []
    for number, start in enumerate(starts, 1):
        ordered += start
        ordered += itertools.islice(others, max(len(items) * number // len(starts) - len(ordered), 0))
    items[:] = ordered


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # what has been imported stays: later collections need not look at it


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """A socket that a module leaves open is an error of that module, and not of a later one."""
    yield
    gc.collect()
    gc.freeze()  # including what its tests have imported


@pytest.fixture(scope="session")
def commands(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Starts commands and scripts without importing torch for each of them."""
    run, owner = tmp_path_factory.getbasetemp(), os.getpid()
    if hasattr(request.config, "workerinput"):  # a process of pytest-xdist, which shares all with the others
        run, owner = run.parent, os.getppid()
    with closing(Commands(tmp_path_factory.mktemp("commands"), run / "fork-server", owner)) as opened:
        yield opened


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`images`, and `run`: a finished run on them. A test that changes them needs a copy."""
    from shortlist.training import train_run
    from tests.training.runs import class_folders, fast_config

    root = tmp_path_factory.mktemp("Bilder und Läufe")
    images = class_folders(root / "images")
    train_run(fast_config(images, "training.epochs=1", "data.validation=none"), root / "run")
    return root


# pytest-randomly seeds random and numpy. torch is seeded here, by name: neither the order of the tests, nor which of
# them is the first to need a fixture, changes what they draw. torch.manual_seed would also store the stack of its call
# for each kind of GPU that there is not, which takes a millisecond.


def _seed(name: str) -> None:
    seed = crc32(name.encode())
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    _seed(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _seed(item.name)
