"""Galleries in a folder and in Milvus give the same results, are kept up to date, and never mix models."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shortlist.data import Catalog, ImageError, TestTransform, open_collection
from shortlist.encoding import Encoder, embed_images
from shortlist.errors import ConfigError, DataError, ModelError
from shortlist.gallery import Gallery, GalleryError, Hit, NoSuchItem, index
from shortlist.model import Embedder
from shortlist.search import nearest
from tests.data.pictures import picture, write
from tests.displays import Told
from tests.gallery.galleries import CLASSES, DIM, NUMBER, Open, small_embedder
from tests.user_parts import Net


def ids(hits: list[Hit]) -> list[int]:
    return [hit.item.id for hit in hits]


class TestSearch:
    def test_results_are_those_of_exact_search(self, filled: Gallery, shared_images: Catalog, encoder: Encoder) -> None:
        vectors = embed_images(encoder.network, shared_images, encoder.transform)
        scores, rows = nearest(vectors, vectors, 5)
        for query in range(NUMBER):
            for hits in (filled.search(shared_images.file(query), 5), filled.search_vectors(vectors[[query]], 5)[0]):
                assert ids(hits) == rows[query].tolist()
                assert [hit.score for hit in hits] == pytest.approx(scores[query].tolist(), abs=1e-5)

    def test_several_queries(self, filled: Gallery, shared_images: Catalog) -> None:
        files = [shared_images.file(query) for query in (7, 0, 3)]
        expected = [filled.search(file, 4) for file in files]
        for queries in (files, tuple(map(str, files)), [Image.open(file) for file in files]):
            assert [ids(hits) for hits in filled.search(queries, 4)] == [ids(hits) for hits in expected]
        assert ids(filled.search(files[:1], 4)[0]) == ids(expected[0])
        pixels = torch.stack([torch.from_numpy(np.array(Image.open(files[0]))).permute(2, 0, 1)] * 2)
        assert len(filled.search(pixels, 4)) == 2
        assert ids(filled.search(pixels[0], 4)) == ids(expected[0])
        assert filled.search([], 4) == []

    def test_an_item_is_the_image_that_was_added(self, filled: Gallery, shared_images: Catalog) -> None:
        first = filled.search(shared_images.file(7), 1)[0].item
        assert first.path == shared_images.file(7).absolute()
        assert first.label == shared_images.class_names[shared_images.labels[7]]
        assert first == filled.item(first.id)
        assert filled.name
        assert filled.facts()["images"] == len(filled) == NUMBER
        assert filled.facts()["dim"] == DIM

    def test_any_kind_of_picture(self, filled: Gallery, shared_images: Catalog) -> None:
        file = shared_images.file(3)
        with Image.open(file) as opened:
            for each in (str(file), file.read_bytes(), opened):
                assert ids(filled.search(each, 3)) == ids(filled.search(file, 3))
        with pytest.raises(ImageError, match="not an image"):
            filled.search(b"words")

    def test_similar_leaves_out_itself_but_not_its_copy(self, new: Open, images: Catalog, tmp_path: Path) -> None:
        copy = tmp_path / "images" / "bolt" / "copy.jpg"
        copy.write_bytes((tmp_path / "images" / "bolt" / "0.jpg").read_bytes())
        gallery = new()
        gallery.add(open_collection(tmp_path / "images"))
        by_path = {item.path.name: item.id for item in gallery.items(label="bolt")}
        found = gallery.similar(by_path["0.jpg"], 3)
        assert found[0].item.path == copy
        assert by_path["0.jpg"] not in ids(found)
        assert len(found) == 3

    @pytest.mark.parametrize("label", CLASSES)
    def test_only_images_with_a_label(self, filled: Gallery, shared_images: Catalog, label: str) -> None:
        everything = filled.search(shared_images.file(0), NUMBER)
        assert filled.search(shared_images.file(0), NUMBER, label=label) == [
            Hit(hit.item, pytest.approx(hit.score)) for hit in everything if hit.item.label == label
        ]
        assert len(filled.items(label=label)) == CLASSES[label]

    def test_minimum_score(self, new: Open, images: Catalog) -> None:
        gallery = new()
        gallery.add(images)
        scores = [hit.score for hit in gallery.similar(0, 6)]
        assert gallery.min_score is None
        gallery.set_min_score(scores[3])
        gallery = new()  # opened again
        assert gallery.min_score == gallery.facts()["min_score"] == scores[3]
        file = images.file(0)
        for found, number in ((gallery.similar(0, 6), 4), (gallery.similar(0, 6, min_score=-1), 6)):
            assert [hit.score for hit in found] == scores[:number]
        assert len(gallery.search(file, 7, min_score=(scores[1] + scores[2]) / 2)) == 3  # and itself
        assert gallery.similar(0, 6, min_score=1) == []
        with pytest.raises(
            ConfigError, match="`min_score`, the minimum cosine similarity of a result, is from -1 to 1"
        ):
            gallery.set_min_score(1.5)
        with pytest.raises(ConfigError, match="`min_score`"):
            gallery.search(file, min_score=float("nan"))

    def test_fewer_results_than_k(self, filled: Gallery, shared_images: Catalog) -> None:
        assert filled.search(shared_images.file(0), label="no such") == []
        assert len(filled.search(shared_images.file(0), k=100)) == NUMBER
        assert filled.search_vectors(np.empty((0, DIM), dtype=np.float32)) == []

    def test_invalid_arguments(self, filled: Gallery, shared_images: Catalog) -> None:
        with pytest.raises(DataError, match=r"must have shape \(q, 8\), not \(1, 3\)"):
            filled.search_vectors(torch.ones(1, 3))
        with pytest.raises(ConfigError, match="`k`, the number of results, must be an integer of at least 1"):
            filled.search(shared_images.file(0), k=0)
        for ask in (filled.item, filled.similar):
            with pytest.raises(NoSuchItem, match="no image 999"):
                ask(999)

    def test_many_threads(self, filled: Gallery) -> None:
        expected = [ids(filled.similar(each, 4)) for each in range(NUMBER)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda each: ids(filled.similar(each % NUMBER, 4)), range(5 * NUMBER)))
        assert found == 5 * expected


class TestItems:
    def test_pages_in_the_order_of_ids(self, filled: Gallery) -> None:
        pages = [filled.items(offset=offset, limit=5) for offset in range(0, NUMBER + 5, 5)]
        assert [len(page) for page in pages] == [5, 5, 2, 0]
        assert [item.id for page in pages for item in page] == list(range(NUMBER))
        assert filled.labels() == dict(sorted(CLASSES.items()))

    def test_an_empty_gallery_and_images_without_labels(self, new: Open, tmp_path: Path) -> None:
        files = [write(tmp_path / "flat" / f"{number}.png", picture(seed=number)) for number in range(3)]
        gallery = new()
        assert gallery.search(files[0]) == []
        assert gallery.items() == []
        assert gallery.labels() == {}
        gallery.add(open_collection(tmp_path / "flat"))
        assert [item.label for item in gallery.items()] == [None] * 3
        assert gallery.labels() == {}


class TestChanges:
    def test_stored_images_are_not_embedded_again(
        self, new: Open, images: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert new().add(images).added == NUMBER
        gallery = new()
        monkeypatch.setattr("shortlist.encoding.shards.encode_to_file", None)  # may not be called
        again = gallery.add(images)
        assert (again.added, again.unchanged) == (0, NUMBER)

    def test_new_changed_and_unreadable(self, new: Open, images: Catalog, tmp_path: Path) -> None:
        new().add(images)
        folder = tmp_path / "images"
        write(folder / "bolt" / "new.png", picture(seed=100))
        write(folder / "bolt" / "1.jpg", picture(seed=101))
        os.utime(folder / "bolt" / "1.jpg", ns=(1, 1))
        (folder / "bolt" / "bad.png").write_text("words")
        (folder / "bolt" / "empty.png").touch()
        gallery = new()
        done = gallery.add(open_collection(folder))
        assert (done.added, done.replaced, done.unchanged) == (1, 1, NUMBER - 1)
        assert [Path(each).name for each in done.unreadable] == ["bad.png", "empty.png"]
        assert len(gallery) == NUMBER + 1
        assert gallery.search(picture(seed=101), 1)[0].item.path.name == "1.jpg"
        assert sorted(item.id for item in gallery.items()) == [0, *range(2, NUMBER + 2)]  # 1 is never used again

    def test_a_new_label_replaces_the_old_one_and_a_missing_label_keeps_it(
        self, new: Open, images: Catalog, tmp_path: Path
    ) -> None:
        gallery = new()
        gallery.add(images)
        table = tmp_path / "table.csv"
        table.write_text("path,label\nimages/bolt/0.jpg,screw\nimages/bolt/1.jpg,\n")
        done = gallery.add(open_collection(table))
        assert (done.unchanged, done.relabelled) == (2, 1)
        assert [gallery.item(each).label for each in (0, 1)] == ["screw", "bolt"]
        assert gallery.labels()["screw"] == 1
        assert ids(gallery.similar(0, 1)) == ids(new().similar(0, 1))

    def test_fields_and_several_labels_come_back(self, new: Open, images: Catalog) -> None:
        gallery = new()
        first, second, third = (str(images.file(row).absolute()) for row in range(3))
        table = Path(first).parent / "table.csv"
        table.write_text(f"path,label,sku\n{first},red|50%_|bolt,A\n{second},red,\n{third},bolts,C")
        gallery.add(open_collection(table, label_separator="|"))
        item = gallery.item(0)
        assert (item.labels, item.label, item.fields) == (("red", "50%_", "bolt"), "red, 50%_, bolt", {"sku": "A"})
        assert gallery.labels() == {"50%_": 1, "bolt": 1, "bolts": 1, "red": 2}
        for label, expected in (
            ("red", [0, 1]),
            ("50%_", [0]),
            ("bolt", [0]),
            ("bolts", [2]),
            ("5", []),
            ("red, 50%_", []),
        ):
            assert [each.id for each in gallery.items(label=label)] == expected
        assert [hit.item for hit in gallery.similar(2, label="50%_")] == [item]
        table.write_text(f"path,label,sku\n{first},red|bolt,A\n{second},red,B\n{third},bolts,C")
        assert gallery.add(open_collection(table, label_separator="|")).relabelled == 2
        gallery = new()  # opened again
        assert gallery.item(0).labels == ("red", "bolt")
        assert [each.fields for each in gallery.items()] == [{"sku": "A"}, {"sku": "B"}, {"sku": "C"}]
        assert gallery.add(open_collection(Path(first))).relabelled == 0  # a source without them keeps them
        assert gallery.item(0).fields == {"sku": "A"}

    def test_remove_by_id_path_and_folder(self, new: Open, images: Catalog, tmp_path: Path) -> None:
        gallery = new()
        gallery.add(images)
        folder = tmp_path / "images"
        assert gallery.remove([0, folder / "bolt" / "1.jpg", str(folder / 'nut "M8"'), 0]) == 6
        for again in (False, True):
            opened = new() if again else gallery
            assert len(opened) == NUMBER - 6
            assert 'nut "M8"' not in opened.labels()
            left = {item.id for item in opened.items()}
            assert {0, 1}.isdisjoint(left)
            assert set(ids(opened.search(images.file(0), NUMBER))) == left
            with pytest.raises(NoSuchItem, match="no image 0"):
                opened.item(0)
        with pytest.raises(NoSuchItem, match="has no image at"):
            opened.remove([folder / "bol"])
        assert opened.remove([]) == 0

    def test_an_id_is_never_used_twice(self, new: Open, images: Catalog, tmp_path: Path) -> None:
        new().add(images)
        new().remove([tmp_path / "images"])
        gallery = new()
        assert len(gallery) == 0
        gallery.add(images)
        assert [item.id for item in gallery.items()] == list(range(NUMBER, 2 * NUMBER))

    def test_catalogs_without_readable_images_or_with_boxes_are_refused(
        self, encoder: Encoder, shared_images: Catalog, tmp_path: Path
    ) -> None:
        """Catalogs are checked before the gallery is changed, wherever it is stored."""
        gallery = Gallery.create(tmp_path / "gallery", encoder)
        (tmp_path / "bad.png").write_text("words")
        with pytest.raises(DataError, match="none of its 1 images can be read"):
            gallery.add(open_collection(tmp_path / "bad.png"))
        boxes = np.full((NUMBER, 4), np.nan)
        boxes[2] = (0, 0, 5, 5)
        with pytest.raises(DataError, match="whole images"):
            gallery.add(replace(shared_images, boxes=boxes))
        roles = np.where(np.arange(NUMBER) == 2, "query", "gallery")  # queries are not added
        assert gallery.add(replace(shared_images, boxes=boxes, roles=roles)).added == NUMBER - 1


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Encoder, Path]:
    other = Encoder(small_embedder(), TestTransform(32, 32))
    return other, other.save(tmp_path_factory.mktemp("other"))


class TestModel:
    def test_another_model_is_refused(
        self, new: Open, place: str, shared_images: Catalog, other_model: tuple[Encoder, Path]
    ) -> None:
        new().close()
        other, folder = other_model
        with pytest.raises(GalleryError, match="is not the one that computed the vectors of the gallery"):
            new(model=folder)
        with pytest.raises(GalleryError, match="vectors of another model"):
            index(other, shared_images, place, model=folder)

    def test_the_same_model_in_another_folder(
        self, new: Open, shared_images: Catalog, encoder: Encoder, tmp_path: Path
    ) -> None:
        new().add(shared_images)
        moved = encoder.save(tmp_path / "moved")
        (moved / "encoder.json").unlink()  # as in the folder of a run: the gallery has these settings
        query = shared_images.file(1)
        assert ids(new(model=moved).search(query, 3)) == ids(new().search(query, 3))
        with pytest.raises(ModelError, match=r"embedder\.json not found in"):
            new(model=tmp_path)


class TestIndex:
    def test_creates_a_gallery_and_adds_to_it(
        self, place: str, encoder: Encoder, shared_images: Catalog, tmp_path: Path
    ) -> None:
        run = encoder.save(tmp_path / "run")
        told = Told()
        first = shared_images.subset(range(5))
        with pytest.raises(ConfigError, match="did you mean 'hnsw'"):
            index(encoder, first, place, model=run, kind="hnws")
        gallery, done = index(encoder, first, place, model=run, display=told)
        gallery.close()
        assert (done.added, told.tasks) == (5, [(f"embedding {first.name}", 5, 5), ("building the index", 5, 5)])
        gallery, done = index(encoder, shared_images, place, model=run)
        assert (done.added, done.unchanged, len(gallery)) == (NUMBER - 5, 5, NUMBER)
        gallery.close()
        with pytest.raises(GalleryError, match="choose another location for hnsw"):
            index(encoder, shared_images, place, model=run, kind="hnsw")

    def test_the_minimum_score_is_stored_with_the_images(
        self, place: str, encoder: Encoder, shared_images: Catalog, tmp_path: Path
    ) -> None:
        """A default is stored if the gallery has none, and a given one always."""
        run, first = encoder.save(tmp_path / "run"), shared_images.subset(range(5))
        with pytest.raises(ConfigError, match="`min_score`"):
            index(encoder, first, place, model=run, min_score=7)
        assert not Gallery.exists(place)
        for number, given, default, stored in (
            (3, None, None, None),
            (4, None, 0.25, 0.25),
            (5, None, 0.5, 0.25),
            (5, 0.75, 0.5, 0.75),
        ):
            images = shared_images.subset(range(number))
            gallery, _ = index(encoder, images, place, model=run, min_score=given, default_min_score=default)
            gallery.close()
            gallery = Gallery.open(place)
            assert (len(gallery), gallery.min_score) == (number, stored)
            gallery.close()


class TestBuild:
    def test_a_new_gallery_and_an_existing_one(
        self, place: str, encoder: Encoder, images: Catalog, tmp_path: Path
    ) -> None:
        model = encoder.save(tmp_path / "run")
        with closing(Gallery.build(encoder, images.root, place, model=model)) as gallery:
            assert len(gallery) == NUMBER
            assert gallery.labels() == dict(sorted(CLASSES.items()))
            assert gallery.search(images.file(3), 1)[0].item.path == images.file(3)
        write(images.root / "bolt" / "new.png", picture(40, 40, seed=99))
        with closing(Gallery.build(encoder, images.root, place, model=model, workers=0)) as gallery:
            assert len(gallery) == NUMBER + 1

    def test_from_a_catalog(self, encoder: Encoder, shared_images: Catalog, tmp_path: Path) -> None:
        assert len(Gallery.build(encoder, shared_images.subset(range(3)), tmp_path / "gallery")) == 3

    def test_a_model_that_was_given_in_python(self, images: Catalog, tmp_path: Path) -> None:
        one, other = (Encoder(Embedder(Net()).eval(), TestTransform(32, 32)) for _ in range(2))
        found = Gallery.build(one, images, tmp_path / "gallery").search(images.file(3), 4)
        with pytest.raises(ModelError, match="The model Net was given in Python"):
            Gallery.open(tmp_path / "gallery").search(images.file(3))
        assert Gallery.open(tmp_path / "gallery", one).search(images.file(3), 4) == found
        with pytest.raises(GalleryError, match="is not the one that computed the vectors"):
            Gallery.open(tmp_path / "gallery", other)
