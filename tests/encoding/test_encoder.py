"""Encoders in memory and on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shortlist.data import Catalog, FitTransform, ImageError, TestTransform
from shortlist.encoding import Encoder, ImageLike, embed_images
from shortlist.errors import ConfigError, DataError, ModelError
from shortlist.model import MultiScale
from tests.data.pictures import picture, write
from tests.displays import Told
from tests.evaluation.test_evaluate import catalog
from tests.gallery.galleries import small_embedder

KINDS = {
    "squares": ((1.0,), TestTransform(32, 36)),
    "whole images": ((1.0,), FitTransform(48)),
    "two scales": ((1.0, 0.5), TestTransform(32, 32, "bicubic")),
}


def new_encoder(kind: str) -> Encoder:
    scales, transform = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(small_embedder(), transform, scales)


@pytest.fixture(params=KINDS, scope="module")
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return new_encoder(request.param)


@pytest.fixture(scope="module")
def squares() -> Encoder:
    """An encoder for tests that do not depend on the transform and the scales."""
    return new_encoder("squares")


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
    other_weights = small_embedder()
    others = [
        replace(encoder, embedder=other_weights),
        replace(encoder, transform=TestTransform(33, 36)),
        replace(encoder, scales=(1.0, 0.7)),
    ]
    assert len({each.fingerprint for each in (encoder, *others)}) == 4
    assert isinstance(others[-1].network, MultiScale)


def test_unreadable_images(squares: Encoder, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="not an image"):
        squares.encode([b"words"])
    with pytest.raises(ImageError, match="empty"):
        squares.encode([b""])
    with pytest.raises(ImageError, match="the file does not exist"):
        squares.encode([tmp_path / "nothing.png"])


def test_a_damaged_folder(squares: Encoder, tmp_path: Path) -> None:
    folder = squares.save(tmp_path)
    found = json.loads((folder / "encoder.json").read_text())
    for damaged in ({**found, "transform": "words"}, {**found, "images": {"size": 3}}, [], {}):
        (folder / "encoder.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=r"encoder.json is damaged"):
            Encoder.load(folder)
    (folder / "encoder.json").unlink()
    with pytest.raises(ModelError, match=r"encoder\.json, which defines the image preprocessing, was not found in"):
        Encoder.load(folder)


class TestInputs:
    """Inputs of `encode`, with several transforms if they matter."""

    def test_pixels_in_memory_are_treated_like_files(self, encoder: Encoder, tmp_path: Path) -> None:
        image = picture(70, 50, seed=2)
        file = write(tmp_path / "image.png", image)
        array = np.asarray(image)
        tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
        expected = encoder.encode(file)
        assert expected.shape == (1, encoder.dim)
        for each in (str(file), file.read_bytes(), image, array, tensor, tensor / 255, array / 255.0):
            assert torch.equal(encoder.encode(each), expected)
            assert torch.equal(encoder.encode([each]), expected)
        assert torch.equal(encoder.encode(tensor[None]), expected)
        assert torch.equal(encoder.encode(array[None]), expected)
        grey = image.convert("L")
        in_grey = encoder.encode(grey)
        assert torch.equal(encoder.encode(np.asarray(grey)), in_grey)
        assert torch.equal(encoder.encode(torch.from_numpy(np.array(grey))[None]), in_grey)

    @pytest.mark.parametrize("batch_size", [1, 2, 64])
    def test_the_order_is_kept_in_any_batches(self, encoder: Encoder, batch_size: int, tmp_path: Path) -> None:
        mixed: list[ImageLike] = [
            picture(60, 40, seed=0),
            write(tmp_path / "image.png", picture(40, 80, seed=1)),
            torch.randint(256, (3, 60, 44), dtype=torch.uint8),
            np.asarray(picture(60, 40, seed=3)),
            picture(90, 90, seed=4),
        ]
        expected = torch.cat([encoder.encode(each) for each in mixed])
        found = encoder.encode(iter(mixed), batch_size=batch_size)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert found.dtype == torch.float32
        assert not found.requires_grad
        assert expected.unique(dim=0).shape == expected.shape  # all different

    def test_no_images(self, squares: Encoder) -> None:
        assert squares.encode([]).shape == (0, squares.dim)

    def test_progress_is_shown_for_several_batches(self, squares: Encoder) -> None:
        images = [picture(40, 40, seed=seed) for seed in range(5)]
        told = Told()
        squares.encode(images, batch_size=2, display=told)
        assert told.of("encoding") == [(2, 5), (4, 5), (5, 5)]
        told = Told()
        squares.encode(images, display=told)
        assert told.of("encoding") == []

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            (torch.zeros(40, 40, 3), r"must be a tensor \(3, height, width\), not of shape \(40, 40, 3\)"),
            (torch.zeros(40, 40), r"must be a tensor \(3, height, width\), not of shape \(40, 40\)"),
            (np.zeros((3, 40, 40), np.uint8), r"must be an array \(height, width, 3\), not of shape \(3, 40, 40\)"),
            (np.zeros((40, 40, 4), np.uint8), r"not of shape \(40, 40, 4\)"),
            (torch.zeros(3, 0, 4), r"not of shape \(3, 0, 4\)"),
            (torch.randn(3, 40, 40), r"numbers from 0 to 1 that are not normalised, not float32 from -"),
            (torch.full((3, 4, 4), torch.nan), r"not float32 from nan to nan"),
            (torch.full((3, 4, 4), 200.0), r"not float32 from 200 to 200"),
            (torch.zeros(3, 4, 4, dtype=torch.long), r"not int64 from 0 to 0"),
        ],
    )
    def test_invalid_pixels(self, image: ImageLike, message: str, squares: Encoder) -> None:
        with pytest.raises(DataError, match=message):
            squares.encode([image])

    def test_an_invalid_batch_size(self, squares: Encoder) -> None:
        with pytest.raises(ConfigError, match="`batch_size` must be at least 1, not 0"):
            squares.encode([], batch_size=0)
