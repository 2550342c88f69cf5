"""A gallery that is replaced by another one while a process has it open."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shortlist.data import Catalog
from shortlist.encoding import Encoder
from shortlist.gallery import Gallery, GalleryError
from tests.gallery.galleries import small_embedder


@pytest.fixture(scope="module")
def other(encoder: Encoder) -> Encoder:
    """An encoder of the same dimension with other weights."""
    torch.manual_seed(99)
    return Encoder(small_embedder(), encoder.transform)


def replace(folder: Path, by: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    by.rename(folder)


def best(gallery: Gallery, id: int = 3) -> tuple[int, float]:  # noqa: A002
    """The first result of a search with the file of an image."""
    hit = gallery.search(gallery.item(id).path, 1)[0]
    return hit.item.id, hit.score


@pytest.fixture
def pair(encoder: Encoder, other: Encoder, shared_images: Catalog, tmp_path: Path) -> tuple[Gallery, Path]:
    """An opened gallery that has been searched, and the folder of a gallery of another model in the same generation."""
    for each, name in ((encoder, "gallery"), (other, "other")):
        Gallery.build(each, shared_images.subset(range(7)), tmp_path / name, workers=0)
    gallery = Gallery.open(tmp_path / "gallery")
    assert best(gallery) == (3, pytest.approx(1, abs=1e-4))
    return gallery, tmp_path / "other"


def test_the_model_is_loaded_again(pair: tuple[Gallery, Path], other: Encoder, tmp_path: Path) -> None:
    gallery, by = pair
    replace(tmp_path / "gallery", by)
    assert best(gallery) == (3, pytest.approx(1, abs=1e-4))  # the state that was opened
    gallery.refresh()
    assert gallery.facts()["fingerprint"] == other.fingerprint
    assert best(gallery) == (3, pytest.approx(1, abs=1e-4))
    assert gallery.encoder.fingerprint == other.fingerprint


def test_without_its_model_it_is_not_searched(pair: tuple[Gallery, Path], tmp_path: Path) -> None:
    gallery, by = pair
    before = tmp_path / "model"
    shutil.copytree(tmp_path / "gallery" / "model", before)
    new = by / "model"
    new.rename(tmp_path / "new")
    shutil.copytree(before, new)  # only the model is still the old one
    replace(tmp_path / "gallery", by)
    with pytest.raises(GalleryError, match="is not the one that computed the vectors"):
        gallery.refresh()
    with pytest.raises(GalleryError, match="is not the one that computed the vectors"):
        best(gallery)
    replace(tmp_path / "gallery" / "model", tmp_path / "new")
    assert best(gallery) == (3, pytest.approx(1, abs=1e-4))


def test_during_a_search(pair: tuple[Gallery, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vector of the old model is not compared with those of the new one."""
    gallery, by = pair
    encode = Encoder.encode

    def encode_then_replace(encoder: Encoder, images: object) -> torch.Tensor:
        vectors = encode(encoder, images)
        if by.exists():
            replace(tmp_path / "gallery", by)
            gallery.refresh()
        return vectors

    monkeypatch.setattr(Encoder, "encode", encode_then_replace)
    assert best(gallery) == (3, pytest.approx(1, abs=1e-4))
    assert not by.exists()


def test_between_the_vector_of_an_image_and_the_search(pair: tuple[Gallery, Path], tmp_path: Path) -> None:
    gallery, by = pair
    read = gallery.store.vectors
    expected = [hit.item.id for hit in Gallery.open(by).similar(3, 5)]

    def read_then_replace(ids: list[int]) -> object:
        vectors = read(ids)
        if by.exists():
            replace(tmp_path / "gallery", by)
            gallery.refresh()
        return vectors

    gallery.store.vectors = read_then_replace  # type: ignore[method-assign]
    assert [hit.item.id for hit in gallery.similar(3, 5)] == expected


def test_images_are_not_added_with_the_old_model(
    pair: tuple[Gallery, Path], shared_images: Catalog, tmp_path: Path
) -> None:
    gallery, by = pair
    replace(tmp_path / "gallery", by)
    with pytest.raises(GalleryError, match="was replaced by a gallery of another model"):
        gallery.add(shared_images, workers=0)


def test_copies_that_were_changed_differently(encoder: Encoder, shared_images: Catalog, tmp_path: Path) -> None:
    """They have the same origin and the same number of changes, rows and images, but not the same images."""
    Gallery.build(encoder, shared_images.subset(range(4)), tmp_path / "gallery", workers=0)
    shutil.copytree(tmp_path / "gallery", tmp_path / "copy")
    Gallery.open(tmp_path / "gallery").add(shared_images.subset([4]), workers=0)
    Gallery.open(tmp_path / "copy").add(shared_images.subset([5]), workers=0)
    gallery = Gallery.open(tmp_path / "gallery")
    last = gallery.item(4).path
    replace(tmp_path / "gallery", tmp_path / "copy")
    gallery.refresh()
    assert gallery.item(4).path != last
    assert best(gallery, 4) == (4, pytest.approx(1, abs=1e-4))


def test_a_collection_of_the_same_name(
    encoder: Encoder, other: Encoder, shared_images: Catalog, tmp_path: Path
) -> None:
    place = f"milvus:{tmp_path}/gallery.db"
    few = shared_images.subset(range(5))
    models = [each.save(tmp_path / name) for each, name in ((encoder, "one"), (other, "two"))]
    with closing(Gallery.build(encoder, few, place, model=models[0], workers=0)) as gallery:
        reader = Gallery(gallery.store)
        assert best(reader) == (3, pytest.approx(1, abs=1e-4))
        gallery.store.client.drop_collection(gallery.name)
        Gallery.build(other, few, place, model=models[1], workers=0)
        assert best(reader) == (3, pytest.approx(1, abs=1e-4))  # without `refresh`: searches use the current state
        assert reader.facts()["fingerprint"] == other.fingerprint
