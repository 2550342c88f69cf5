"""Cached features equal those of the backbone; each image is encoded once per setting, by one process at a time."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import filelock
import numpy as np
import pytest
import torch
from torch import Tensor

from shortlist.data import Catalog, TestTransform, TrainTransform
from shortlist.data.images import ViewDataset, load_crop
from shortlist.encoding import FeatureCache, Views, embed, vector_file
from shortlist.errors import DataError
from shortlist.model import Embedder
from shortlist.seeds import derived_seed
from tests.data.pictures import picture, write
from tests.evaluation.test_evaluate import catalog

IMAGES = 7
VIEWS = Views(TrainTransform(32), number=3, seed=5, dtype="float16")
PLAIN = Views(TestTransform(32, 32))


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder("test_resnet", dim=4).eval()


@pytest.fixture
def images(tmp_path: Path) -> Catalog:
    for index in range(IMAGES):
        write(tmp_path / "images" / f"{index}.png", picture(40, 36, seed=index))
    return catalog([0] * IMAGES, root=tmp_path / "images")


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def literal(embedder: Embedder, images: Catalog, views: Views) -> Tensor:
    """(n, views, channels): one image and one view at a time."""
    found = []
    for index in range(len(images)):
        for view in range(views.number):
            rng = Random(derived_seed("view", views.seed, view, images.paths[index]))
            found.append(embedder.pooled_features(load_crop(images.file(index), views.transform, rng)[None]))
    return torch.cat(found).detach().view(len(images), views.number, -1)


def features(cache: FeatureCache, embedder: Embedder, images: Catalog, views: Views = VIEWS) -> tuple[Tensor, int]:
    """(n, views, channels), and the number of images that were encoded."""
    found = cache.features(embedder, images, views, batch_size=6)
    rows, columns = np.repeat(np.arange(len(images)), views.number), np.tile(np.arange(views.number), len(images))
    return found.take(rows, columns).view(len(images), views.number, -1), found.encoded


@pytest.mark.parametrize(("views", "tolerance"), [(VIEWS, 2e-3), (PLAIN, 1e-5)])
def test_features_of_the_backbone(
    views: Views, tolerance: float, cache: FeatureCache, embedder: Embedder, images: Catalog
) -> None:
    expected = literal(embedder, images, views)
    found, encoded = features(cache, embedder, images, views)
    assert encoded == IMAGES
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.dtype == torch.float32
    assert (expected[:, :1] - expected.roll(1, 0)[:, :1]).abs().max() > 0.01  # control: images differ
    again, encoded = features(cache, embedder, images, views)
    assert encoded == 0
    assert torch.equal(again, found)


def test_anything_else_is_encoded_again(cache: FeatureCache, embedder: Embedder, images: Catalog) -> None:
    features(cache, embedder, images)
    other = Embedder("test_resnet", dim=4).eval()
    assert features(cache, other, images)[1] == IMAGES
    for change in ({"seed": 6}, {"number": 2}, {"dtype": "float32"}, {"transform": TrainTransform(32, flip=0)}):
        assert features(cache, embedder, images, replace(VIEWS, **change))[1] == IMAGES
    assert features(cache, embedder, images)[1] == 0


def test_only_new_and_changed_images_are_encoded(cache: FeatureCache, embedder: Embedder, images: Catalog) -> None:
    """This also applies to images in another order, or listed twice."""
    assert features(cache, embedder, images.subset([4, 2, 4]))[1] == 2
    found, encoded = features(cache, embedder, images)
    assert encoded == IMAGES - 2
    write(images.file(3), picture(40, 36, seed=99))
    changed, encoded = features(cache, embedder, images)
    assert encoded == 1
    assert torch.equal(changed[[0, 1, 2, 4, 5, 6]], found[[0, 1, 2, 4, 5, 6]])
    torch.testing.assert_close(changed, literal(embedder, images, VIEWS), rtol=2e-3, atol=2e-3)
    assert not torch.equal(changed[3], found[3])
    reordered, encoded = features(cache, embedder, images.subset([6, 3, 3, 0]))
    assert encoded == 0
    assert torch.equal(reordered, changed[[6, 3, 3, 0]])


def test_what_was_encoded_before_an_interruption_is_kept(
    cache: FeatureCache, embedder: Embedder, images: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features are kept bit for bit, even if other images are requested next."""
    whole, _ = features(FeatureCache(cache.folder.with_name("whole")), embedder, images)
    monkeypatch.setattr(vector_file, "NOTE_INTERVAL", 0.0)
    append = embed._append

    def stop(file: vector_file.VectorFile, vectors: Tensor, seen: int) -> None:
        if seen > 4:
            raise KeyboardInterrupt
        append(file, vectors, seen)

    monkeypatch.setattr(embed, "_append", stop)
    with pytest.raises(KeyboardInterrupt):
        features(cache, embedder, images)
    monkeypatch.undo()
    assert features(cache, embedder, images.subset([1, 6]))[1] == 1
    found, encoded = features(cache, embedder, images)
    assert encoded == IMAGES - 5
    assert torch.equal(found[:4], whole[:4])
    torch.testing.assert_close(found, whole, rtol=2e-3, atol=2e-3)
    assert not list(cache.folder.rglob(".*.part*"))


def test_a_damaged_file_is_encoded_again(cache: FeatureCache, embedder: Embedder, images: Catalog) -> None:
    found, _ = features(cache, embedder, images)
    (file,) = cache.folder.rglob("*.npy")
    file.write_bytes(file.read_bytes()[:-1])
    again, encoded = features(cache, embedder, images)
    assert encoded == IMAGES
    assert torch.equal(again, found)


def test_another_process_is_waited_for(cache: FeatureCache, embedder: Embedder, images: Catalog) -> None:
    """The other process encodes everything while this one waits."""
    found, _ = features(FeatureCache(cache.folder.with_name("other")), embedder, images)
    (folder,) = cache.folder.with_name("other").iterdir()
    place = cache.folder / folder.name
    place.mkdir(parents=True)
    held, waiting = threading.Event(), threading.Event()

    def encode() -> None:
        with filelock.FileLock(place / ".lock"):
            held.set()
            waiting.wait(60)
            for file in folder.glob("[!.]*"):
                file.rename(place / file.name)

    other = threading.Thread(target=encode)
    other.start()
    held.wait(60)
    told: list[str] = []
    waiter = FeatureCache(cache.folder, lambda text: told.append(text) or waiting.set())
    again, encoded = features(waiter, embedder, images)
    other.join()
    assert told == [f"Another process is encoding images in {place}. Waiting until it has finished."]
    assert encoded == 0
    assert torch.equal(again, found)


def test_a_missing_image_is_named(cache: FeatureCache, embedder: Embedder, images: Catalog) -> None:
    images.file(2).unlink()
    with pytest.raises(DataError, match=r"2\.png: the file does not exist"):
        features(cache, embedder, images)


# Views


def test_views_depend_on_the_path_only(images: Catalog) -> None:
    whole, part = ViewDataset(images, TrainTransform(32), 3), ViewDataset(images.subset([5, 2]), TrainTransform(32), 3)
    for view in range(3):
        assert torch.equal(whole[view, 2], part[view, 1])
    assert not torch.equal(whole[0, 2], whole[1, 2])
    assert not torch.equal(whole[0, 2], ViewDataset(images, TrainTransform(32), 3, seed=1)[0, 2])


def test_a_file_is_decoded_once_and_large_enough_for_all_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "0.jpg", picture(800, 600), quality=95)
    images = replace(catalog([0], root=tmp_path), paths=np.array(["0.jpg"], dtype=object))
    opened: list[Path] = []
    module = "shortlist.data.images.open_image"
    real = __import__("shortlist.data.images", fromlist=["open_image"]).open_image
    monkeypatch.setattr(module, lambda path, content: opened.append(path) or real(path, content))
    dataset, transform = ViewDataset(images, TrainTransform(32), 8), TrainTransform(32)
    views = [dataset[view, 0] for view in range(8)]
    assert len(opened) == 1
    for view, found in enumerate(views):
        alone = load_crop(images.file(0), transform, Random(derived_seed("view", 0, view, "0.jpg")))
        assert (found.int() - alone.int()).abs().float().mean() < 2
