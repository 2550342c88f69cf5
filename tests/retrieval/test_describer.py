"""All that decides the vector of an image, in memory and on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from shortlist.data import Catalog, FitTransform, ImageError, TestTransform
from shortlist.errors import ModelError
from shortlist.model import Embedder, MultiScale
from shortlist.retrieval import Describer, embed_images
from tests.data.pictures import picture, write
from tests.retrieval.test_evaluate import catalog

KINDS = {
    "squares": ((1.0,), TestTransform(32, 36)),
    "whole images": ((1.0,), FitTransform(48)),
    "two scales": ((1.0, 0.5), TestTransform(32, 32, "bicubic")),
}


@pytest.fixture(params=KINDS)
def describer(request: pytest.FixtureRequest) -> Describer:
    scales, transform = KINDS[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Describer(Embedder("test_efficientnet", dim=8).eval(), transform, scales)


@pytest.fixture
def images(tmp_path: Path) -> Catalog:
    for index, ending in enumerate((".png", ".jpg", ".png")):
        file = write(tmp_path / "images" / f"{index}.png", picture(40 + 30 * index, 60, seed=index))
        if ending != ".png":
            with Image.open(file) as image:
                image.save(file, format="JPEG", quality=90)
    return catalog([0, 0, 1], root=tmp_path / "images")


def test_a_picture_gets_the_vector_of_its_image(describer: Describer, images: Catalog) -> None:
    expected = embed_images(describer.network, images, describer.transform)
    files = [images.file(index) for index in range(len(images))]
    torch.testing.assert_close(describer.describe(files), expected)
    torch.testing.assert_close(describer.describe([str(file) for file in files]), expected)
    torch.testing.assert_close(describer.describe([file.read_bytes() for file in files]), expected)
    torch.testing.assert_close(describer.describe([Image.open(files[0])]), expected[:1])
    assert expected.shape == (3, describer.dim)


def test_on_disk(describer: Describer, images: Catalog, tmp_path: Path) -> None:
    again = Describer.load(describer.save(tmp_path / "model"))
    assert again.fingerprint == describer.fingerprint
    assert (again.transform, again.scales) == (describer.transform, describer.scales)
    files = [images.file(0)]
    assert torch.equal(again.describe(files), describer.describe(files))


def test_the_fingerprint_is_of_all_that_decides(describer: Describer) -> None:
    other_weights = Embedder("test_efficientnet", dim=8).eval()
    others = [
        replace(describer, embedder=other_weights),
        replace(describer, transform=TestTransform(33, 36)),
        replace(describer, scales=(1.0, 0.7)),
    ]
    assert len({each.fingerprint for each in (describer, *others)}) == 4
    assert isinstance(others[-1].network, MultiScale)


def test_what_is_no_picture(describer: Describer, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="not an image"):
        describer.describe([b"words"])
    with pytest.raises(ImageError, match="empty"):
        describer.describe([b""])
    with pytest.raises(ImageError, match="no such file"):
        describer.describe([tmp_path / "nothing.png"])


def test_a_damaged_folder(describer: Describer, tmp_path: Path) -> None:
    folder = describer.save(tmp_path)
    found = json.loads((folder / "describer.json").read_text())
    for damaged in ({**found, "sees": "words"}, {**found, "images": {"size": 3}}, [], {}):
        (folder / "describer.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=r"describer.json is damaged"):
            Describer.load(folder)
    (folder / "describer.json").unlink()
    with pytest.raises(ModelError, match=r"no describer.json"):
        Describer.load(folder)
