"""Files whose reads fail, as on a defective disk: one error message that names the file.

test_damage.py does the same with the files of runs, galleries, packages and caches.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shortlist import Encoder
from shortlist.cli import _message_of
from shortlist.data import TestTransform, load_image, open_catalog, open_collection
from shortlist.encoding.parquet import embed_to_table
from shortlist.errors import ShortlistError
from shortlist.gallery import Gallery, GalleryError
from shortlist.model import Embedder
from shortlist.progress import Display
from shortlist.recipes import open_recipe
from shortlist.training.components import build_embedder
from shortlist.training.search_space import read_space
from tests.chaos.test_damage import UNREADABLE
from tests.processes import Commands
from tests.training.runs import class_folders, config

FAILING = {  # regular files that can be opened, and fail when they are read
    "Input/output error": UNREADABLE,  # empty, as far as its size is known
    "Invalid argument": Path("/sys/class/net/lo/speed"),  # 4096 bytes
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("unreadable") / "images", classes=1, images=3)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Embedder("test_resnet", dim=8, image_size=32).eval(), TestTransform(32, 32))


READERS: dict[str, Callable[[Path, Path, Encoder], object]] = {
    "image.jpg": lambda file, images, encoder: load_image(file),
    "recipe.yaml": lambda file, images, encoder: open_recipe(file),
    "space.yaml": lambda file, images, encoder: read_space(file),
    "table.csv": lambda file, images, encoder: open_catalog(file),
    "table.parquet": lambda file, images, encoder: open_catalog(file),
    "vectors.parquet": lambda file, images, encoder: embed_to_table(
        encoder, open_collection(images), file, workers=0, display=Display()
    ),
    "weights.pth": lambda file, images, encoder: build_embedder(config(images, f"model.weights={file}")),
    "weights.safetensors": lambda file, images, encoder: build_embedder(config(images, f"model.weights={file}")),
}


@pytest.mark.parametrize("reason", FAILING)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read(name: str, reason: str, images: Path, encoder: Encoder, tmp_path: Path) -> None:
    if not FAILING[reason].exists():
        pytest.skip("Linux has such files")
    file = tmp_path / name
    file.symlink_to(FAILING[reason])
    with pytest.raises((ShortlistError, OSError)) as found:
        READERS[name](file, images, encoder)
    message = _message_of(found.value)
    assert message is not None
    assert str(file) in message
    assert "\n" not in message
    assert reason in message or name.endswith(("parquet", "safetensors"))  # whose size is read, or which are mapped


TRUNCATES = """
import os, resource
from pathlib import Path
from shortlist.gallery import Gallery
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
gallery = Gallery.open("gallery")
(file,) = Path("gallery").glob("vectors-*.npy")
os.truncate(file, 0)
gallery.similar(gallery.items()[0].id)
"""


def test_vectors_that_become_shorter_while_they_are_searched(
    images: Path, encoder: Encoder, commands: Commands, tmp_path: Path
) -> None:
    """The end of the process, as docs/search.md says; the next one names the file."""
    Gallery.build(encoder, images, tmp_path / "gallery", workers=0, display=Display())
    (file,) = (tmp_path / "gallery").glob("vectors-*.npy")
    assert commands.start(cwd=tmp_path, before=TRUNCATES).wait() == -signal.SIGBUS
    with pytest.raises(GalleryError, match=file.name):
        Gallery.open(tmp_path / "gallery")
