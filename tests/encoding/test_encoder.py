"""Encoders in memory and on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from shortlist.data import Catalog, FitTransform, ImageError, TestTransform
from shortlist.encoding import Encoder, embed_images
from shortlist.errors import ModelError
from shortlist.model import Embedder, MultiScale
from tests.data.pictures import picture, write
from tests.evaluation.test_evaluate import catalog

KINDS = {
    "squares": ((1.0,), TestTransform(32, 36)),
    "whole images": ((1.0,), FitTransform(48)),
    "two scales": ((1.0, 0.5), TestTransform(32, 32, "bicubic")),
}


@pytest.fixture(params=KINDS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    scales, transform = KINDS[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(Embedder("test_efficientnet", dim=8).eval(), transform, scales)


@pytest.fixture
def images(tmp_path: Path) -> Catalog:
    for index, ending in enumerate((".png", ".jpg", ".png")):
        file = write(tmp_path / "images" / f"{index}.png", picture(40 + 30 * index, 60, seed=index))
        if ending != ".png":
            with Image.open(file) as image:
                image.save(file, format="JPEG", quality=90)
    return catalog([0, 0, 1], root=tmp_path / "images")


def test_paths_bytes_and_pil_images_give_the_same_vectors(encoder: Encoder, images: Catalog) -> None:
    expected = embed_images(encoder.network, images, encoder.transform)
    files = [images.file(index) for index in range(len(images))]
    torch.testing.assert_close(encoder.encode(files), expected)
    torch.testing.assert_close(encoder.encode([str(file) for file in files]), expected)
    torch.testing.assert_close(encoder.encode([file.read_bytes() for file in files]), expected)
    torch.testing.assert_close(encoder.encode([Image.open(files[0])]), expected[:1])
    assert expected.shape == (3, encoder.dim)


def test_save_and_load(encoder: Encoder, images: Catalog, tmp_path: Path) -> None:
    again = Encoder.load(encoder.save(tmp_path / "model"))
    assert again.fingerprint == encoder.fingerprint
    assert (again.transform, again.scales) == (encoder.transform, encoder.scales)
    files = [images.file(0)]
    assert torch.equal(again.encode(files), encoder.encode(files))


def test_the_fingerprint_depends_on_weights_transform_and_scales(encoder: Encoder) -> None:
    other_weights = Embedder("test_efficientnet", dim=8).eval()
    others = [
        replace(encoder, embedder=other_weights),
        replace(encoder, transform=TestTransform(33, 36)),
        replace(encoder, scales=(1.0, 0.7)),
    ]
    assert len({each.fingerprint for each in (encoder, *others)}) == 4
    assert isinstance(others[-1].network, MultiScale)


def test_unreadable_images(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="not an image"):
        encoder.encode([b"words"])
    with pytest.raises(ImageError, match="empty"):
        encoder.encode([b""])
    with pytest.raises(ImageError, match="no such file"):
        encoder.encode([tmp_path / "nothing.png"])


def test_a_damaged_folder(encoder: Encoder, tmp_path: Path) -> None:
    folder = encoder.save(tmp_path)
    found = json.loads((folder / "encoder.json").read_text())
    for damaged in ({**found, "sees": "words"}, {**found, "images": {"size": 3}}, [], {}):
        (folder / "encoder.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=r"encoder.json is damaged"):
            Encoder.load(folder)
    (folder / "encoder.json").unlink()
    with pytest.raises(ModelError, match=r"no encoder.json"):
        Encoder.load(folder)
