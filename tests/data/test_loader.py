"""Chunks of images: their order, equal pixels from any number of worker processes, and errors of workers."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shortlist.data import (
    Catalog,
    FitTransform,
    ImageDataset,
    ImageError,
    TrainTransform,
    image_chunks,
    open_catalog,
)
from shortlist.data.images import IMAGE_FORMATS
from shortlist.data.loader import MAX_PER_CORE, _start, bounded_workers, process_context
from shortlist.data.transforms import Crop
from shortlist.errors import DataError
from tests.data.pictures import class_folders, picture, write
from tests.processes import Commands

KEYS = [[(0, 0), (0, 1), (0, 2)], [(1, 2)], [(1, 0), (0, 5)], [], [(2, 3), (2, 3)]]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return open_catalog(class_folders(tmp_path_factory.mktemp("mit Umlaut ä"), {"a": 3, "b": 3}))


@pytest.fixture(scope="module")
def here(catalog: Catalog) -> list[torch.Tensor]:
    """The chunks as decoded in this process."""
    return list(image_chunks(ImageDataset(catalog, TrainTransform(16), seed=3), KEYS))


def test_a_chunk_for_each_list_in_order(catalog: Catalog, here: list[torch.Tensor]):
    dataset = ImageDataset(catalog, TrainTransform(16), seed=3)
    assert [chunk.shape for chunk in here] == [(len(keys), 3, 16, 16) for keys in KEYS]
    for chunk, keys in zip(here, KEYS, strict=True):
        assert chunk.dtype == torch.uint8
        for image, key in zip(chunk, keys, strict=True):
            assert torch.equal(image, dataset[key])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_pixels_from_any_number_of_workers(catalog: Catalog, here: list[torch.Tensor], workers: int):
    dataset = ImageDataset(catalog, TrainTransform(16), seed=3)
    there = list(image_chunks(dataset, KEYS, workers))
    assert len(there) == len(here)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    other_seed = next(image_chunks(ImageDataset(catalog, TrainTransform(16), seed=4), KEYS))
    assert not torch.equal(other_seed, here[0])


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Six images of different sizes."""
    root = tmp_path_factory.mktemp("shapes")
    for number in range(6):
        write(root / "ab"[number % 2] / f"{number}.png", picture(20 + 3 * number, 30 - number, seed=number))
    return open_catalog(root)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_keep_their_shapes_are_lists(shapes: Catalog, workers: int):
    dataset = ImageDataset(shapes, FitTransform(28, flip=0.5), seed=3)
    chunks = list(image_chunks(dataset, KEYS, workers))
    assert [len(chunk) for chunk in chunks] == [len(keys) for keys in KEYS]
    for chunk, keys in zip(chunks, KEYS, strict=True):
        assert isinstance(chunk, list)
        for image, key in zip(chunk, keys, strict=True):
            assert image.dtype == torch.uint8
            assert torch.equal(image, dataset[key])
    assert len({image.shape for image in chunks[0]}) == 3
    assert len({image.untyped_storage().data_ptr() for image in chunks[0]}) == 1  # one block goes between processes


def test_a_chunk_pins_all_its_images_at_once(shapes: Catalog, monkeypatch: pytest.MonkeyPatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.shape) or self.clone())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    dataset = ImageDataset(shapes, FitTransform(28))
    (chunk,) = image_chunks(dataset, KEYS[:1], pin_memory=True)
    assert [image.shape for image in chunk] == [dataset[key].shape for key in KEYS[0]]
    assert pinned == [(sum(image.numel() for image in chunk),)]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_random_state_of_the_run_is_left_alone(catalog: Catalog, workers: int):
    before = torch.get_rng_state()
    list(image_chunks(ImageDataset(catalog, TrainTransform(16)), KEYS[:1], workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_keys_are_read_only_a_little_ahead(catalog: Catalog, workers: int):
    taken = itertools.count()
    endless = ([(next(taken), 0)] for _ in itertools.count())
    chunks = image_chunks(ImageDataset(catalog, TrainTransform(16)), endless, workers, prefetch=2)
    first = list(itertools.islice(chunks, 3))
    chunks.close()
    assert len(first) == 3
    assert next(taken) <= 3 + 2 * workers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_raises_an_image_error(tmp_path: Path, workers: int):
    catalog = open_catalog(class_folders(tmp_path, {"a": 3, "b": 3}))
    broken = catalog.file(4)
    broken.write_text("no image")
    chunks = image_chunks(ImageDataset(catalog, TrainTransform(16)), [[(0, 0)], [(0, 1), (0, 4)], [(0, 2)]], workers)
    assert next(chunks).shape == (1, 3, 16, 16)
    with pytest.raises(ImageError) as caught:
        next(chunks)
    assert type(caught.value) is ImageError
    assert caught.value.path == broken
    assert (
        str(caught.value)
        == f"Cannot read the image {broken}: it is not an image, or its format is not one of {', '.join(IMAGE_FORMATS)}"
    )


@dataclass(frozen=True)
class Deadly:
    """Kills the process that calls it."""

    size: int = 16
    interpolation: str = "bilinear"

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_worker_is_reported(catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))  # torch looks every 5 s
    with pytest.raises(
        DataError,
        match=r"has ended, often because memory ran out\. Use fewer workers; .*`workers=0` \(DataLoader worker \(pid",
    ):
        list(image_chunks(ImageDataset(catalog, Deadly()), KEYS, workers=1))


class Faulty(ImageDataset):
    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        raise RuntimeError("a mistake in the program")


def test_other_exceptions_in_a_worker_are_raised_unchanged(catalog: Catalog):
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        list(image_chunks(Faulty(catalog, TrainTransform(16)), KEYS, workers=1))


def start_two(register: Path) -> None:
    """Start a process that is initialised like a worker, and before it one that is not, as the control.

    Started second, the control would inherit and keep open the pipe by which the worker notices the end of its parent.
    """
    for name, start in (("other", int), ("worker", _start)):
        multiprocessing.get_context("fork").Process(target=stay, args=(start, register / name)).start()
    time.sleep(60)


def stay(start: Callable[[int], object], file: Path) -> None:
    start(0)
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    time.sleep(60)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait(until: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.05)
    return until()


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path):
    parent = process_context().Process(target=start_two, args=(tmp_path,))
    parent.start()
    files = [tmp_path / "worker", tmp_path / "other"]
    assert wait(lambda: all(file.exists() for file in files))
    worker, other = (int(file.read_text()) for file in files)
    assert alive(worker)
    parent.kill()
    parent.join()
    assert wait(lambda: not alive(worker))
    assert alive(other)
    os.kill(other, signal.SIGKILL)


@dataclass(frozen=True)
class Interrupted(TrainTransform):
    """Sends SIGINT to its process, as Ctrl-C in a terminal does to every process."""

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        os.kill(os.getpid(), signal.SIGINT)
        return super().crop(width, height, rng)


def test_ctrl_c_is_left_to_the_parent(catalog: Catalog):
    chunks = list(image_chunks(ImageDataset(catalog, Interrupted(16)), KEYS[:2], workers=1))
    assert len(chunks) == 2
    with pytest.raises(KeyboardInterrupt):  # control: without workers
        list(image_chunks(ImageDataset(catalog, Interrupted(16)), KEYS[:2], workers=0))


SCRIPT = """
import sys
from dataclasses import dataclass
from shortlist.data import ImageDataset, TrainTransform, image_chunks, open_catalog

print("imported as", __name__)

@dataclass(frozen=True)
class Mine(TrainTransform):
    pass

def work(transform):
    catalog = open_catalog(sys.argv[1])
    print(*(len(chunk) for chunk in image_chunks(ImageDataset(catalog, transform(16)), [[(0, 0)], [(0, 1)]], 1)))

"""
GUARD = 'if __name__ == "__main__":\n    '
QUICKLY = """
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)  # torch looks for killed workers every 5 s
"""


@pytest.mark.parametrize(
    ("end", "imported", "code"),
    [
        ("work(TrainTransform)", ["__main__"], 0),
        (f"{GUARD}work(Mine)", ["__main__", "__mp_main__"], 0),  # the worker needs the script's class
        ("work(Mine)", ["__main__", "__mp_main__"], 70),
    ],
    ids=["no guard", "a transform of its own", "a transform of its own and no guard"],
)
def test_workers_import_a_script_only_if_they_need_its_classes(
    catalog: Catalog, end: str, imported: list[str], code: int, commands: Commands, tmp_path: Path
):
    (tmp_path / "script.py").write_text(SCRIPT + end)
    found, out, error = commands.run(catalog.root, cwd=tmp_path, before=QUICKLY, script=tmp_path / "script.py")
    assert found == code, error
    assert re.findall("imported as (.*)", out) == imported
    if code:
        assert re.search(r'DataError: .* under `if __name__ == "__main__":`; .* `workers=0`', error)
    else:
        assert out.splitlines()[-1] == "1 1"


@pytest.mark.parametrize("failure", [BrokenPipeError(), ConnectionResetError(), EOFError()])
def test_a_fork_server_that_has_ended(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, failure: Exception):
    def fail(loader: object) -> None:
        raise failure

    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", fail)
    with pytest.raises(DataError, match=rf"has ended.*\({type(failure).__name__}\)"):
        next(image_chunks(ImageDataset(catalog, TrainTransform(16)), KEYS, workers=1))


def test_a_negative_number_of_workers(catalog: Catalog):
    with pytest.raises(ValueError, match="`workers` must be 0 or more, not -1"):
        next(image_chunks(ImageDataset(catalog, TrainTransform(16)), KEYS, workers=-1))


def test_the_number_of_workers_is_bounded(catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
    most, started = MAX_PER_CORE * (os.cpu_count() or 1), []
    assert bounded_workers(most) == most

    def start(*_: object, num_workers: int, **__: object) -> list[object]:
        started.append(num_workers)
        return []

    monkeypatch.setattr("shortlist.data.loader.DataLoader", start)
    with pytest.warns(UserWarning, match=rf"so {most} processes decode images instead of 100000"):
        list(image_chunks(ImageDataset(catalog, TrainTransform(16)), KEYS, workers=100_000))
    assert started == [most]
