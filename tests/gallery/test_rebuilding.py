"""Rebuilding a gallery with another model, and switching to it by name."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from shortlist.data import Catalog, open_collection
from shortlist.encoding import Encoder
from shortlist.errors import ConfigError
from shortlist.files import read_json
from shortlist.gallery import Gallery, GalleryError, rebuild, switch, switch_back
from shortlist.gallery.adding import folder_to_prune
from tests.gallery.galleries import small_embedder


@pytest.fixture(scope="module")
def other(encoder: Encoder) -> Encoder:
    """An encoder with other weights, whose vectors have another dimension."""
    torch.manual_seed(99)
    return Encoder(small_embedder(encoder.dim + 8), encoder.transform)


def contents(gallery: Gallery) -> dict[int, tuple[Path, str | None]]:
    return {item.id: (item.path, item.label) for item in gallery.items(limit=len(gallery))}


class TestRebuilding:
    @pytest.mark.parametrize("kind", ["folder", "milvus"])
    def test_images_keep_their_ids_and_labels(
        self, encoder: Encoder, other: Encoder, shared_images: Catalog, tmp_path: Path, kind: str
    ) -> None:
        gallery = Gallery.build(encoder, shared_images.subset(range(9)), tmp_path / "old", workers=0)
        gallery.remove([0, 4])
        place = str(tmp_path / "new") if kind == "folder" else f"milvus:{tmp_path}/new.db"
        new, added = rebuild(gallery, other, place, model=other.save(tmp_path / "run"), workers=0)
        with closing(new):
            assert (added.added, added.removed) == (7, 0)
            assert contents(new) == contents(gallery)
            assert new.store.fingerprint == other.fingerprint
            item = new.item(5)
            assert new.search(item.path, 1)[0].item == item
            gallery.add(shared_images.subset(range(9, 11)), workers=0)
            assert max(contents(gallery)) == 10  # the ids of removed images are not used again
            rebuild(gallery, other, tmp_path / "again", workers=0)
            assert contents(Gallery.open(tmp_path / "again")) == contents(gallery)

    def test_again_after_changes(self, encoder: Encoder, other: Encoder, images: Catalog, tmp_path: Path) -> None:
        """Only images that have changed are embedded."""
        gallery = Gallery.build(encoder, images.subset(range(8)), tmp_path / "old", workers=0)
        rebuild(gallery, other, tmp_path / "new", workers=0)
        gallery.remove([2])
        shutil.copy(images.file(9), images.file(5))
        gallery.add(images.subset([5, 8]), workers=0)
        new, added = rebuild(gallery, other, tmp_path / "new", workers=0)
        assert (added.added, added.replaced, added.unchanged, added.removed) == (1, 1, 6, 1)
        assert contents(new) == contents(gallery)

    def test_ids_that_were_used_by_other_images(
        self, encoder: Encoder, other: Encoder, shared_images: Catalog, tmp_path: Path
    ) -> None:
        gallery = Gallery.build(encoder, shared_images.subset(range(4)), tmp_path / "old", workers=0)
        new = Gallery.build(other, shared_images.subset([7, 8]), tmp_path / "new", workers=0)
        rebuild(gallery, other, tmp_path / "new", workers=0)
        new.refresh()
        assert sorted(contents(new)) == [2, 3, 4, 5]
        assert sorted(contents(new).values()) == sorted(contents(gallery).values())

    def test_several_labels_and_fields(
        self, encoder: Encoder, other: Encoder, shared_images: Catalog, tmp_path: Path
    ) -> None:
        files = [str(shared_images.file(row)) for row in range(3)]
        table = pa.table({"path": files, "label": [["red", "round"], ["red"], ["green"]], "price": [1.5, 2.5, None]})
        parquet.write_table(table, tmp_path / "table.parquet")
        gallery = Gallery.build(encoder, tmp_path / "table.parquet", tmp_path / "old", workers=0)
        new, _ = rebuild(gallery, other, tmp_path / "new", workers=0)
        assert [item.labels for item in new.items()] == [("red", "round"), ("red",), ("green",)]
        assert new.items() == gallery.items()
        assert new.item(1).fields["price"] == 2.5

    def test_an_empty_gallery(self, encoder: Encoder, other: Encoder, tmp_path: Path) -> None:
        with pytest.raises(GalleryError, match="The gallery old has no images"):
            rebuild(Gallery.create(tmp_path / "old", encoder), other, tmp_path / "new")


@pytest.fixture
def named(encoder: Encoder, other: Encoder, shared_images: Catalog, tmp_path: Path) -> Path:
    """The name of a gallery; next to it, there is another one of another model."""
    for each, name in ((encoder, "one"), (other, "two")):
        Gallery.build(each, shared_images.subset(range(6)), tmp_path / name, workers=0)
    switch(tmp_path / "live", tmp_path / "one")
    return tmp_path / "live"


class TestSwitching:
    def test_there_and_back(self, named: Path, encoder: Encoder, other: Encoder) -> None:
        gallery = Gallery.open(named)
        query = gallery.item(3).path
        for now, name in ((encoder, "one"), (other, "two"), (encoder, "one")):
            if name == "two":
                switch(named, named.with_name(name))
            elif gallery.name != name:
                switch_back(named)
            gallery.refresh()
            assert (gallery.name, gallery.encoder.fingerprint) == (name, now.fingerprint)
            hit = gallery.search(query, 1)[0]
            assert (hit.item.id, hit.score) == (3, pytest.approx(1, abs=1e-4))

    def test_during_a_search(self, named: Path, other: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Vectors of the old model cannot be used in the new gallery, whose vectors have more dimensions."""
        gallery, encode, switched = Gallery.open(named), Encoder.encode, []

        def encode_then_switch(encoder: Encoder, images: object) -> torch.Tensor:
            vectors = encode(encoder, images)
            if not switched:
                switched.append(switch(named, named.with_name("two")))
                gallery.refresh()
            return vectors

        _ = gallery.encoder
        monkeypatch.setattr(Encoder, "encode", encode_then_switch)
        assert gallery.search(gallery.item(3).path, 1)[0].item.id == 3
        assert switched
        assert gallery.encoder.fingerprint == other.fingerprint

    def test_the_gallery_that_is_in_use_stays_until_the_new_one_is_loaded(self, named: Path, encoder: Encoder) -> None:
        gallery = Gallery.open(named)
        _ = gallery.encoder
        switch(named, named.with_name("two"))
        shutil.rmtree(named.with_name("two") / "model")
        with pytest.raises(Exception, match="model"):
            gallery.refresh()
        assert gallery.search(gallery.item(3).path, 1)[0].item.id == 3
        assert gallery.encoder.fingerprint == encoder.fingerprint

    def test_encoders_are_prepared(self, named: Path, encoder: Encoder, other: Encoder) -> None:
        """The encoder of the next gallery is prepared as well. After the block, encoders are not prepared."""
        gallery = Gallery.open(named)
        query, before = gallery.item(3).path, gallery.encoder
        used: list[Encoder] = []

        def prepare(loaded: Encoder) -> Encoder:
            def runtime(images: torch.Tensor) -> torch.Tensor:
                used.append(loaded)
                return loaded.network(images)

            return replace(loaded, runtime=runtime)

        with gallery.preparing_encoders(prepare):
            assert gallery.search(query, 1)[0].item.id == 3
            switch(named, named.with_name("two"))
            gallery.refresh()
            assert gallery.search(query, 1)[0].item.id == 3
            assert [each.fingerprint for each in used] == [encoder.fingerprint, other.fingerprint]
            switch_back(named)
            gallery.refresh()
        assert gallery.encoder is before
        switch(named, named.with_name("two"))
        gallery.refresh()
        assert gallery.search(query, 1)[0].item.id == 3
        assert len(used) == 2

    def test_a_gallery_without_its_model_is_refused(self, named: Path) -> None:
        before = named.read_text()
        shutil.rmtree(named.with_name("two") / "model")
        with pytest.raises(Exception, match="model"):
            switch(named, named.with_name("two"))
        assert named.read_text() == before

    def test_relative_paths_are_relative_to_the_name(self, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(named.parent)
        (named.parent / "names").mkdir()
        switch("names/live", "one")
        assert read_json(named.parent / "names" / "live") == {
            "gallery": os.path.join("..", "one"),  # noqa: PTH118
            "previous": None,
        }
        monkeypatch.chdir("/")
        assert Gallery.open(named.parent / "names" / "live").name == "one"
        assert Gallery.exists(named.parent / "names" / "live")
        assert Gallery.check(named.parent / "names" / "live").ok

    def test_images_are_added_to_the_gallery_that_a_name_stands_for(
        self, named: Path, encoder: Encoder, shared_images: Catalog
    ) -> None:
        Gallery.build(encoder, shared_images.subset(range(8)), named, workers=0)
        assert len(Gallery.open(named.with_name("one"))) == 8

    def test_refusals(self, named: Path) -> None:
        for name, new, match in (
            (named, named, "is itself the name of a gallery"),
            (named.with_name("two"), named.with_name("one"), "a folder, not a name"),
            (named, named.with_name("three"), "No gallery found in"),
        ):
            with pytest.raises(GalleryError, match=match):
                switch(name, new)
        with pytest.raises(GalleryError, match=r"has not been switched yet: it refers to .*one, its first gallery"):
            switch_back(named)
        with pytest.raises(GalleryError, match="Unknown name"):
            switch_back(named.with_name("other"))
        switch(named, named.with_name("two"))
        shutil.rmtree(named.with_name("one"))
        with pytest.raises(GalleryError, match="no longer exists"):
            switch_back(named)
        named.write_text("words")
        with pytest.raises(GalleryError, match="neither a gallery nor a name of one"):
            Gallery.open(named)


def test_pruning(encoder: Encoder, images: Catalog, tmp_path: Path) -> None:
    """Only images of the folder that no longer exist are removed."""
    gallery = Gallery.build(encoder, images, tmp_path / "gallery", workers=0)
    elsewhere = tmp_path / "images-2" / "c" / "one.png"
    elsewhere.parent.mkdir(parents=True)
    shutil.copy(images.file(0), elsewhere)
    gallery.add(open_collection(elsewhere.parent), workers=0)
    images.file(1).unlink()
    left = open_collection(images.root)
    assert gallery.add(left, workers=0).removed == 0
    assert gallery.add(left, workers=0, prune=folder_to_prune(left, images.root)).removed == 1
    paths = {path for path, _ in contents(gallery).values()}
    assert elsewhere in paths
    assert images.file(1) not in paths
    assert len(paths) == len(images)
    with pytest.raises(ConfigError, match="`prune` is for folders and tables"):
        folder_to_prune(open_collection(elsewhere), elsewhere)
