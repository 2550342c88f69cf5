"""Files that only look like images or text: no command hangs or starts another program."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
from PIL import EpsImagePlugin

from shortlist import Encoder
from shortlist.config import read_yaml_file
from shortlist.data import ImageError, TestTransform, check, load_image, open_catalog, open_collection, summary
from shortlist.data.benchmarks.lists import read_csv, read_lines
from shortlist.data.missing_files import absent_files
from shortlist.data.unpickling import read_plain_pickle
from shortlist.encoding.parquet import embed_to_table
from shortlist.errors import ShortlistError
from shortlist.files import read_json
from shortlist.gallery import Gallery
from shortlist.model import Embedder
from shortlist.progress import Display
from shortlist.training import RunFolder
from shortlist.training.checkpoint import latest_state
from shortlist.training.sweep_study import open_study
from tests.chaos.test_damage import UNREADABLE
from tests.data.pictures import EPS, write

GOOD = 3
REASONS = {
    "cat.jpg": "it is not an image, or its format is not one of JPEG, PNG",
    "endless.png": "it is not a regular file",
    "loop.png": "Too many levels of symbolic links",
    "pipe.png": "it is not a regular file",
}
if UNREADABLE.exists():
    REASONS["broken.png"] = "Input/output error"


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
    if "broken.png" in REASONS:
        (root / "a" / "broken.png").symlink_to(UNREADABLE)
    os.mkfifo(pipe := root / "a" / "pipe.png")
    with released_later(pipe):
        yield root


class released_later:
    """Release readers of a pipe after a while, so that a test that reads it fails and does not block."""

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


@pytest.mark.parametrize(
    "read",
    [
        read_json,
        lambda file: RunFolder(file.parent).facts(),
        lambda file: RunFolder(file.parent).config(),
        lambda file: RunFolder(file.parent).metrics(),
        lambda file: RunFolder(file.parent).recommended_min_score(),
        lambda file: latest_state(file.parent),
        lambda file: read_yaml_file(file, "space"),
        lambda file: read_lines(file, "sop"),
        lambda file: read_csv(file, "gldv1", ("a", "b"), ("a", "b"), ""),
        read_plain_pickle,
        lambda file: open_study(file.parent, None).__enter__(),
    ],
)
def test_text_in_a_pipe(read: Callable[[Path], object], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    names = ("config.yaml", "facts.json", "metrics.jsonl", "min-score.json", "step-1.safetensors", "journal.log")
    os.mkfifo(pipe)
    for name in names:
        (tmp_path / name).symlink_to(pipe)
    with released_later(pipe), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checkpoints that cannot be read
        with pytest.raises((ShortlistError, OSError), match=r"it is not a regular file|All checkpoints in"):
            read(pipe)
