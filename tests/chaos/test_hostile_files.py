"""Folders with files that only look like images: no command hangs or starts another program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
from PIL import EpsImagePlugin

from shortlist import Encoder
from shortlist.data import ImageError, TestTransform, check, load_image, open_catalog, open_collection, summary
from shortlist.data.missing_files import absent_files
from shortlist.encoding.parquet import embed_to_table
from shortlist.gallery import Gallery
from shortlist.model import Embedder
from shortlist.progress import Display
from tests.data.pictures import EPS, write

GOOD = 3
REASONS = {
    "cat.jpg": "it is not an image, or its format is not one of JPEG, PNG",
    "endless.png": "it is not a regular file",
    "loop.png": "Too many levels of symbolic links",
    "pipe.png": "it is not a regular file",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder per class with images, and in one of them a file of each hostile kind."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    root = tmp_path / "images"
    for name in ("a", "b"):
        for number in range(GOOD):
            write(root / name / f"{number}.png")
    (root / "a" / "cat.jpg").write_bytes(EPS)
    (root / "a" / "endless.png").symlink_to("/dev/zero")
    (root / "a" / "loop.png").symlink_to("loop.png")
    os.mkfifo(pipe := root / "a" / "pipe.png")
    with released_later(pipe):
        yield root


class released_later:
    """End what a reader of a pipe waits for, after a while: a test fails then, and does not wait for ever."""

    def __init__(self, pipe: Path, seconds: float = 60) -> None:
        self.pipe, self.seconds, self.over = pipe, seconds, Event()

    def __enter__(self) -> None:
        self.thread = Thread(target=self._release)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _release(self) -> None:
        if not self.over.wait(self.seconds):
            while not self.over.wait(1):
                with suppress(OSError):  # nobody reads
                    os.close(os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Embedder("test_resnet", dim=8, image_size=32).eval(), TestTransform(32, 32))


@pytest.mark.parametrize("name", REASONS)
def test_loading(folder: Path, name: str) -> None:
    with pytest.raises(ImageError) as found:
        load_image(folder / "a" / name)
    assert found.value.reason.startswith(REASONS[name])


def test_data_check_and_show(folder: Path) -> None:
    catalog = open_catalog(folder)
    found = check(catalog, workers=2, display=Display())
    assert {path: reason[: len(REASONS[Path(path).name])] for path, reason in found.unreadable} == {
        f"a/{name}": reason for name, reason in REASONS.items()
    }
    assert found.images - len(found.unreadable) == 2 * GOOD
    assert summary(catalog)["unreadable"] == len(REASONS)


def test_index(folder: Path, encoder: Encoder, tmp_path: Path) -> None:
    added = Gallery.create(tmp_path / "gallery", encoder).add(open_collection(folder), workers=0, display=Display())
    reasons = {Path(path).name: reason for path, reason in added.unreadable.items()}
    assert (added.added, reasons.keys()) == (2 * GOOD, REASONS.keys())
    assert reasons["pipe.png"] == REASONS["pipe.png"]
    assert reasons["cat.jpg"].startswith(REASONS["cat.jpg"])


def test_embed(folder: Path, encoder: Encoder, tmp_path: Path) -> None:
    done = embed_to_table(encoder, open_collection(folder), tmp_path / "out.parquet", workers=0, display=Display())
    assert done.embedded == 2 * GOOD
    assert {Path(path).name for path in done.unreadable} == REASONS.keys()


def test_a_link_to_itself_does_not_hide_the_other_files_of_its_folder(folder: Path) -> None:
    paths = open_collection(folder).paths
    absent = absent_files(folder, paths)
    assert {path for path, each in zip(paths, absent, strict=True) if each} == {
        "a/endless.png",
        "a/loop.png",
        "a/pipe.png",
    }
