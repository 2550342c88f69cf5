"""A gallery's folder: kills at any point, a single writer, readers during changes, and approximate indexes."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import pkgutil
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np
import pytest

from shortlist.data import Catalog, open_collection
from shortlist.encoding import Encoder
from shortlist.errors import ConfigError, DataError
from shortlist.extras import MissingExtraError
from shortlist.gallery import Gallery, GalleryError, folder_store, generation, segment
from shortlist.gallery.checking import GalleryCheck
from shortlist.gallery.folder_store import FolderStore
from shortlist.gallery.manifest import Manifest, read_manifest, write_manifest
from shortlist.gallery.store import Row
from shortlist.search import faiss_index, nearest
from tests.data.pictures import picture, write
from tests.gallery.galleries import CLASSES, DIM, NUMBER, small_embedder
from tests.processes import Commands


@pytest.fixture
def gallery(filled_folder: Gallery, encoder: Encoder, tmp_path: Path) -> Gallery:
    """A gallery with all images that the test may change."""
    return copied(filled_folder, tmp_path, encoder)


def copied(gallery: Gallery, tmp_path: Path, encoder: Encoder) -> Gallery:
    shutil.copytree(gallery.store.folder, tmp_path / "gallery")
    return Gallery.open(tmp_path / "gallery", encoder)


def filled(folder: Path, encoder: Encoder, kind: str, number: int) -> tuple[Gallery, np.ndarray]:
    """A gallery of vectors, without images."""
    gallery = Gallery.create(folder, encoder, kind=kind)
    vectors = more(number)
    with gallery.store.changing():
        gallery.store.change(rows(0, number), vectors)
    return gallery, vectors


def more(number: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(number, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rows(first: int, last: int) -> list[Row]:
    return [Row(f"/{each}.png", None, 1, 1) for each in range(first, last)]


def names(folder: Path) -> set[str]:
    """The names of the files that a gallery should have, without temporary ones."""
    return {*read_manifest(folder).digests(), "gallery.json", "model", ".lock"}


class TestKilled:
    # Where a process is killed, and whether before or after this function; these are all states of the folder.
    EMBEDDING = (
        ("shortlist.encoding.vector_file.VectorFile.finish", False),
        ("shortlist.gallery.folder_store.write_segment", False),
    )
    INDEXING = (("shortlist.search.faiss_index.write", False), ("shortlist.search.faiss_index.write", True))
    WRITING = (
        ("pyarrow.parquet.write_table", False),
        ("pyarrow.parquet.write_table", True),
        ("shortlist.gallery.folder_store.write_manifest", False),
        ("shortlist.gallery.manifest.write_json", True),
        ("shortlist.gallery.manifest.delete_unused", True),
    )

    @pytest.mark.parametrize(
        ("how", "point", "after"),
        [
            *(("appended", *each) for each in (*EMBEDDING, *WRITING)),
            *(("merged", *each) for each in WRITING),
            *(("compacted", *each) for each in WRITING),
        ],
    )
    def test_the_gallery_is_unchanged_and_the_next_call_continues(
        self,
        gallery: Gallery,
        encoder: Encoder,
        how: str,
        point: str,
        after: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        gallery.remove([NUMBER - 1])
        if how == "merged":
            monkeypatch.setattr(segment, "MIN_MERGED", 2)
        if how == "compacted":
            monkeypatch.setattr(folder_store, "MAX_REMOVED_SHARE", 0)
        self.kill_and_continue(gallery, encoder, point, after, tmp_path)
        assert len(read_manifest(tmp_path / "gallery").segments) == {"appended": 3, "merged": 2, "compacted": 1}[how]

    @pytest.mark.parametrize("how", ["built", "extended"])
    @pytest.mark.parametrize(("point", "after"), [*INDEXING, WRITING[-2]])
    def test_with_an_index(
        self,
        encoder: Encoder,
        shared_images: Catalog,
        how: str,
        point: str,
        after: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        gallery = Gallery.build(encoder, shared_images, tmp_path / "gallery", kind="hnsw", workers=0)
        gallery.remove([NUMBER - 1])
        monkeypatch.setattr(folder_store, "MIN_UNINDEXED", 0)
        if how == "built":
            monkeypatch.setattr(folder_store, "MAX_REMOVED_SHARE", 0)
        self.kill_and_continue(gallery, encoder, point, after, tmp_path)
        assert read_manifest(tmp_path / "gallery").index.rows == NUMBER + (3 if how == "built" else 4)

    def kill_and_continue(self, gallery: Gallery, encoder: Encoder, point: str, after: bool, tmp_path: Path) -> None:
        """Kill a process that adds 4 images to a gallery of which one is removed, then add them."""
        found = gallery.similar(0, NUMBER)
        for number in range(4):
            write(tmp_path / "new" / f"{number}.png", picture(seed=50 + number))
        assert killed(tmp_path / "gallery", tmp_path / "new", encoder, point, after) == -signal.SIGKILL
        again = Gallery.open(tmp_path / "gallery", encoder)
        done = after and point.endswith(("write_json", "delete_unused"))
        assert len(again) == (NUMBER + 3 if done else NUMBER - 1)
        assert [hit for hit in again.similar(0, NUMBER + 3) if hit.item.id < NUMBER] == found
        again.add(open_collection(tmp_path / "new"))
        for opened in (again, Gallery.open(tmp_path / "gallery")):
            assert len(opened) == NUMBER + 3
            assert [hit for hit in opened.similar(0, NUMBER + 3) if hit.item.id < NUMBER] == found
        with again.store.changing():  # deletes what is left behind
            pass
        assert {each.name for each in (tmp_path / "gallery").iterdir()} == names(tmp_path / "gallery")

    def test_incomplete_files_are_deleted(self, gallery: Gallery, tmp_path: Path) -> None:
        left = [tmp_path / "gallery" / f".{name}.123" for name in ("vectors-1.npy", "items-9.parquet", "index-2.faiss")]
        for file in left:
            file.touch()
        gallery.remove([0])
        assert not [file for file in left if file.exists()]

    def test_during_its_creation(self, encoder: Encoder, shared_images: Catalog, tmp_path: Path) -> None:
        folder = tmp_path / "gallery"
        encoder.save(folder / "model")
        (folder / "vectors-0.npy").touch()
        Gallery.build(encoder, shared_images, folder, workers=0)
        assert len(Gallery.open(folder)) == NUMBER

    def test_embedded_images_are_not_embedded_again(
        self, encoder: Encoder, shared_images: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gallery = Gallery.create(tmp_path / "gallery", encoder)
        killed(tmp_path / "gallery", shared_images.root, encoder, *self.EMBEDDING[1])
        monkeypatch.setattr(type(encoder.embedder), "forward", None)  # may not be called
        assert Gallery.open(tmp_path / "gallery", encoder).add(shared_images).added == NUMBER
        assert len(gallery) == 0  # opened before, it has not changed


def killed(folder: Path, images: Path, encoder: Encoder, point: str, after: bool) -> int | None:
    """Add images to a gallery in a process that is killed before or after a function; return its exit code."""

    def add() -> None:
        owner_name, _, name = point.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        original = getattr(owner, name)

        def kill(*args: object, **options: object) -> None:
            if after:
                original(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, kill)
        Gallery.open(folder, encoder).add(open_collection(images))

    child = multiprocessing.get_context("fork").Process(target=add)
    child.start()
    child.join()
    return child.exitcode


@pytest.fixture
def limited_files() -> Iterator[Callable[[int], None]]:
    """A function that limits the size of files that this process can write, as a full disk does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("size", "number", "part"), [(200, 10, "vectors"), (1_000, 1, "items"), (100_000, 1_100, "index")]
)
def test_a_full_disk(
    encoder: Encoder, tmp_path: Path, size: int, number: int, part: str, limited_files: Callable[[int], None]
) -> None:
    gallery, vectors = filled(tmp_path / "gallery", encoder, "hnsw" if part == "index" else "flat", 5)
    before = gallery.search_vectors(vectors, 5)
    limited_files(size)
    with gallery.store.changing(), pytest.raises(OSError, match=rf"{part}-\d") as raised:
        gallery.store.change(rows(5, 5 + number), more(number, seed=1), removed=[4])
    assert raised.value.errno in (errno.EFBIG, errno.EIO)
    limited_files(-1)
    for opened in (gallery, Gallery.open(tmp_path / "gallery")):
        assert opened.search_vectors(vectors, 5) == before
    with gallery.store.changing():
        assert {each.name for each in (tmp_path / "gallery").iterdir()} == names(tmp_path / "gallery")
        gallery.store.change(rows(5, 5 + number), more(number, seed=1), removed=[4])
    assert len(Gallery.open(tmp_path / "gallery")) == len(before[0]) + number - 1


class Plain:
    """The expected contents of a gallery, in dictionaries."""

    def __init__(self) -> None:
        self.labels: dict[int, str | None] = {}
        self.vectors: dict[int, np.ndarray] = {}
        self.next_id = 0

    def change(self, added: list[Row], vectors: np.ndarray, removed: list[int], labels: dict[int, str | None]) -> None:
        self.labels |= labels
        for each in removed:
            del self.labels[each], self.vectors[each]
        for row, vector in zip(added, vectors, strict=True):
            self.labels[self.next_id], self.vectors[self.next_id] = row.label, vector
            self.next_id += 1

    def check(self, store: FolderStore) -> None:
        ids = sorted(self.labels)
        assert [(item.id, item.path, item.label) for item in store.items(None, 0, 10_000)] == [
            (each, Path(f"/{each}.png"), self.labels[each]) for each in ids
        ]
        assert store.labels() == dict(sorted(Counter(each for each in self.labels.values() if each).items()))
        assert len(store) == store.now.manifest.images == len(ids)
        if not ids:
            return
        stored = np.stack([self.vectors[each] for each in ids])
        assert np.array_equal(store.vectors(ids), stored)
        k = min(len(ids), 5)
        scores, best = nearest(more(3, seed=9), stored, k)
        for hits, right, right_scores in zip(store.search(more(3, seed=9), k, None), best, scores, strict=True):
            assert [hit.item.id for hit in hits] == [ids[each] for each in right]
            assert [hit.score for hit in hits] == pytest.approx(right_scores.tolist(), abs=1e-6)
        for label in ("a", "b"):
            found = store.search(more(1, seed=9), 10_000, label)[0]
            assert {hit.item.id for hit in found} == {each for each in ids if self.labels[each] == label}


class TestSegments:
    @pytest.mark.parametrize(("kind", "seed"), [("flat", 0), ("hnsw", 1)])
    def test_random_changes(
        self, encoder: Encoder, tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The writer, a reader that refreshes and a reader that opens each state all agree with `Plain`."""
        monkeypatch.setattr(segment, "MIN_MERGED", 3)
        monkeypatch.setattr(folder_store, "MIN_UNINDEXED", 10)
        monkeypatch.setattr(faiss_index, "MIN_EFFORT", 1_000)  # practically exact
        random = np.random.default_rng(seed)
        writer, plain = FolderStore.create(tmp_path / "gallery", encoder, kind), Plain()
        follower = FolderStore(tmp_path / "gallery")
        kept: list[int] = []
        for step in range(40):
            number = int(random.choice([0, 1, 2, 15]))
            present = random.permutation(sorted(plain.labels)).tolist()
            removed = present[: int(random.choice([0, 0, 1, 3, len(present) // 3]))]
            relabelled = {each: random.choice(["a", "b"]).item() for each in present[-2:] if each not in removed}
            added = [row._replace(label="a") for row in rows(plain.next_id, plain.next_id + number)]
            change = (added, more(number, seed=100 + step), removed, relabelled if step % 3 == 0 else {})
            first = writer.now.segments[0].vectors if writer.now.segments else None
            with writer.changing():
                writer.change(*change[:2], removed=change[2], labels=change[3])
            plain.change(*change)
            if step % 4 == 0:
                follower.refresh()
                plain.check(follower)
            for store in (writer, FolderStore(tmp_path / "gallery")):
                plain.check(store)
                assert store.now.table.equals(writer.now.table)
            kept.append(first is not None and bool(writer.now.segments) and writer.now.segments[0].vectors is first)
            assert {each.name for each in (tmp_path / "gallery").iterdir()} == names(tmp_path / "gallery")
        assert 10 < sum(kept) < 40  # often, the first segment is not rewritten

    def test_a_change_writes_in_proportion_to_its_size(self, encoder: Encoder, tmp_path: Path) -> None:
        gallery, _ = filled(tmp_path / "gallery", encoder, "flat", 5_000)
        files = {each.name: each.stat() for each in (tmp_path / "gallery").glob("*-*")}
        for number in range(3):
            with gallery.store.changing():
                gallery.store.change(rows(5_000, 5_001), more(1, seed=1), removed=[number])
        sizes = {each.name: each.stat().st_size for each in (tmp_path / "gallery").glob("*-*")}
        assert {name: (tmp_path / "gallery" / name).stat() for name in files} == files
        (vectors,) = (sizes[name] for name in files if name.startswith("vectors-"))
        assert sum(sizes[name] for name in sizes if name not in files) < 15_000 < vectors / 10

    def test_an_index_is_extended_when_many_vectors_are_not_in_it(self, encoder: Encoder, tmp_path: Path) -> None:
        gallery, _ = filled(tmp_path / "gallery", encoder, "hnsw", 600)
        indexes = []
        for number in range(3):
            first = 600 + 500 * number
            with gallery.store.changing():
                gallery.store.change(rows(first, first + 500), more(500, seed=number))
            indexes.append(gallery.store.now.manifest.index)
        assert [each.rows for each in indexes] == [600, 600, 2_100]
        assert indexes[0].number == indexes[1].number != indexes[2].number
        assert gallery.facts()["recall"]["queries"] == 1_000

    def test_few_segments_and_little_rewriting(self) -> None:
        sizes: list[int] = []
        written = 0
        for added in [100_000, *[1] * 10_000, 50_000, *[3] * 1_000]:
            sizes.append(added)
            first = segment.first_to_merge(sizes)
            sizes[first:] = [sum(sizes[first:])]
            written += sizes[-1]
            assert len(sizes) < segment.MIN_MERGED + np.log2(sum(sizes))
        assert sum(sizes) == 163_000
        assert sizes[0] == 100_000  # the many small ones were never merged into it
        assert written < 163_000 + 13_000 * 10 + 100_000

    def test_another_gallery_in_the_same_folder(self, encoder: Encoder, tmp_path: Path) -> None:
        opened, _ = filled(tmp_path / "gallery", encoder, "flat", 10)
        shutil.rmtree(tmp_path / "gallery")
        gallery = Gallery.create(tmp_path / "gallery", encoder)
        with gallery.store.changing():
            gallery.store.change(rows(0, 10), more(10, seed=1))
        opened.refresh()
        assert np.array_equal(opened.store.vectors(range(10)), more(10, seed=1))


class TestConcurrency:
    def test_a_second_writer_is_refused(self, gallery: Gallery, shared_images: Catalog) -> None:
        lock = filelock.FileLock(gallery.store.folder / ".lock")
        with lock, pytest.raises(GalleryError, match="Another process is changing the gallery"):
            gallery.add(shared_images)

    def test_readers_keep_the_state_that_they_opened(
        self, gallery: Gallery, shared_images: Catalog, tmp_path: Path
    ) -> None:
        reader = Gallery.open(tmp_path / "gallery")
        before = reader.similar(3, NUMBER)
        gallery.remove([shared_images.root / "bolt"])
        assert reader.similar(3, NUMBER) == before
        assert len(reader) == NUMBER

    def test_files_that_are_replaced_while_a_reader_opens_them(
        self, gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replaced, original = [], generation.read_segment

        def read_after_a_change(*args: object) -> object:
            if not replaced:
                replaced.append(gallery.remove(list(range(5))))  # rewrites everything
            return original(*args)

        monkeypatch.setattr(generation, "read_segment", read_after_a_change)
        assert [item.id for item in Gallery.open(tmp_path / "gallery").items()] == list(range(5, NUMBER))

    @pytest.mark.parametrize("kind", ["flat", "hnsw"])
    def test_threads_search_during_changes(
        self, encoder: Encoder, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(segment, "MIN_MERGED", 3)
        monkeypatch.setattr(folder_store, "MIN_UNINDEXED", 10)
        gallery, vectors = filled(tmp_path / "gallery", encoder, kind, 300)
        done = threading.Event()

        def search() -> int:
            searches = 0
            while not done.is_set() or not searches:
                for hits in gallery.search_vectors(vectors[:3], 20):
                    assert len({hit.item.id for hit in hits}) == 20
                searches += 1
            return searches

        with ThreadPoolExecutor(2) as pool:
            searching = [pool.submit(search) for _ in range(2)]
            for number in range(10):
                with gallery.store.changing():
                    first = gallery.store.now.manifest.next_id
                    gallery.store.change(
                        rows(first, first + 7), more(7, seed=number), removed=range(first - 9, first - 5)
                    )
            done.set()
            assert all(each.result() for each in searching)

    def test_a_writer_sees_what_others_wrote(self, gallery: Gallery, tmp_path: Path) -> None:
        other = Gallery.open(tmp_path / "gallery")
        gallery.remove([0])
        other.remove([1])
        assert [item.id for item in other.items()] == list(range(2, NUMBER))


def small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_index, "MIN_IVFPQ_VECTORS", 256)
    monkeypatch.setattr(faiss_index, "BYTES_PER_VECTOR", 2)  # the time to train IVF-PQ is proportional to this


@pytest.fixture(scope="module")
def of_kind(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Gallery]:
    """A function that returns a gallery of `more(600)` with a kind of index, for tests that do not change it."""

    @functools.cache
    def gallery(kind: str) -> Gallery:
        with pytest.MonkeyPatch.context() as patch:
            small_indexes(patch)
            return filled(tmp_path_factory.mktemp(kind) / "gallery", encoder, kind, 600)[0]

    return gallery


class TestKinds:
    @pytest.fixture(autouse=True)
    def few_vectors_are_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small_indexes(monkeypatch)

    @pytest.mark.parametrize("kind", ["hnsw", "ivfpq"])
    def test_the_recall_of_an_approximate_index(self, of_kind: Callable[[str], Gallery], kind: str) -> None:
        gallery, vectors = of_kind(kind), more(600)
        facts = gallery.facts()
        assert facts["kind"] == kind
        exact = nearest(vectors, vectors, 11)[1].tolist()
        found = [[hit.item.id for hit in hits] for hits in gallery.search_vectors(vectors, 11)]
        pairs = enumerate(zip(found, exact, strict=True))
        recall = np.mean([len((set(one) & set(other)) - {query}) / 10 for query, (one, other) in pairs])
        assert facts["recall"] == {"recall": pytest.approx(recall), "at": 10, "queries": 600}
        assert recall > 0.9
        assert json.loads((gallery.store.folder / "gallery.json").read_text())["recall"] == facts["recall"]

    @pytest.mark.parametrize("kind", ["flat", "hnsw", "ivfpq"])
    def test_scores_are_those_of_the_vectors(self, of_kind: Callable[[str], Gallery], kind: str) -> None:
        vectors, queries = more(600), more(20, seed=1)
        for k in (1, 10, 600):
            for query, hits in zip(queries, of_kind(kind).search_vectors(queries, k), strict=True):
                found = [hit.item.id for hit in hits]
                assert len(set(found)) == len(found) == k
                assert [hit.score for hit in hits] == pytest.approx((vectors[found] @ query).tolist(), abs=1e-6)

    def test_reranking_increases_the_recall(
        self, of_kind: Callable[[str], Gallery], encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recall = of_kind("ivfpq").facts()["recall"]["recall"]  # the shared gallery is built without the changes below
        monkeypatch.setattr(faiss_index, "RERANK_FACTOR", 1)
        monkeypatch.setattr(faiss_index, "MIN_RERANKED", 1)
        without, _ = filled(tmp_path / "gallery", encoder, "ivfpq", 600)
        assert recall > without.facts()["recall"]["recall"]

    @pytest.mark.parametrize("kind", ["flat", "hnsw", "ivfpq"])
    def test_removed_images_are_not_found(
        self, of_kind: Callable[[str], Gallery], encoder: Encoder, tmp_path: Path, kind: str
    ) -> None:
        gallery, vectors = copied(of_kind(kind), tmp_path, encoder), more(600)
        gallery.remove(list(range(60)))
        again = Gallery.open(tmp_path / "gallery")
        for opened in (gallery, again):
            assert len(opened) == 540
            hits = opened.search_vectors(vectors[:60], 20)
            assert all(len(each) == 20 and min(hit.item.id for hit in each) >= 60 for each in hits)
        (vectors_file,) = (tmp_path / "gallery").glob("vectors-*.npy")
        assert len(np.load(vectors_file)) == 600  # a tenth is removed: nothing is rewritten
        gallery.remove(list(range(60, 200)))
        (vectors_file,) = (tmp_path / "gallery").glob("vectors-*.npy")
        assert np.array_equal(np.load(vectors_file), vectors[200:])  # a third: the vectors are dropped
        assert gallery.item(599).path == Path("/599.png")

    @pytest.mark.parametrize("kind", ["hnsw", "ivfpq"])
    def test_added_images_are_found(
        self, of_kind: Callable[[str], Gallery], encoder: Encoder, tmp_path: Path, kind: str
    ) -> None:
        gallery, new = copied(of_kind(kind), tmp_path, encoder), more(50, seed=1)
        with gallery.store.changing():
            gallery.store.change(rows(600, 650), new, removed=[5])
        hits = Gallery.open(tmp_path / "gallery").search_vectors(new, 10)
        assert np.mean([600 + at in [hit.item.id for hit in each] for at, each in enumerate(hits)]) > 0.9

    @pytest.mark.parametrize(
        ("kind", "number", "enough", "most"), [("hnsw", 1500, 0.999, 1024), ("ivfpq", 1250, 0.9, 32)]
    )
    def test_tuning_finds_the_least_sufficient_effort(
        self, monkeypatch: pytest.MonkeyPatch, kind: str, number: int, enough: float, most: int
    ) -> None:
        vectors = more(number)
        index = faiss_index.build(kind, vectors)
        monkeypatch.setattr(faiss_index, "RECALL_QUERIES", 300)  # find the same effort as 1,000

        def recall(least: int, enough: float) -> float:
            monkeypatch.setattr(faiss_index, "MIN_EFFORT", least)
            monkeypatch.setattr(faiss_index, "TARGET_RECALL", enough)
            return faiss_index.tune(index, vectors)["recall"]

        assert recall(2, enough) >= enough
        needed = faiss_index.effort(index)
        assert 2 < needed < most
        assert recall(needed // 2, 0) < enough
        recall(2, 1.1)  # cannot be reached
        assert faiss_index.effort(index) == most

    @pytest.mark.parametrize("images", [0, 1, 2])
    def test_too_few_images_to_measure_recall(self, encoder: Encoder, tmp_path: Path, images: int) -> None:
        gallery, _ = filled(tmp_path / "gallery", encoder, "hnsw", 3)
        gallery.remove(list(range(images, 3)))
        assert (gallery.facts()["recall"] is None) == (images < 2)
        assert len(Gallery.open(tmp_path / "gallery").search_vectors(more(1, seed=1), 5)[0]) == images

    def test_too_few_images_for_ivfpq(self, encoder: Encoder, tmp_path: Path) -> None:
        gallery, vectors = filled(tmp_path / "gallery", encoder, "ivfpq", 100)
        assert gallery.facts()["kind"] == "flat"
        assert [hits[0].item.id for hits in gallery.search_vectors(vectors, 1)] == list(range(100))
        with gallery.store.changing():
            gallery.store.change(rows(100, 400), more(300, seed=1))
        assert gallery.facts()["kind"] == "ivfpq"

    def test_auto_depends_on_the_number_of_images(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [faiss_index.choose_kind("auto", number, 512) for number in (0, 200_000, 200_001, 10**12)] == [
            "flat",
            "flat",
            "hnsw",
            "ivfpq",
        ]

    def test_auto_changes_with_the_number_of_images(
        self, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(faiss_index, "MAX_FLAT_VECTORS", 300)
        gallery, _ = filled(tmp_path / "gallery", encoder, "auto", 300)
        assert gallery.facts()["kind"] == "flat"
        with gallery.store.changing():
            gallery.store.change(rows(300, 310), more(10, seed=1))
        assert gallery.facts()["kind"] == "hnsw"
        gallery.remove(list(range(100)))
        assert gallery.facts() | {"kind": "flat", "recall": None} == gallery.facts()


class TestWithoutFaiss:
    @pytest.fixture(autouse=True)
    def no_faiss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "faiss", None)

    def test_galleries_without_an_index_do_not_need_it(self, encoder: Encoder, tmp_path: Path) -> None:
        gallery, vectors = filled(tmp_path / "gallery", encoder, "auto", 100)
        gallery.remove([0])
        found = Gallery.open(tmp_path / "gallery").search_vectors(vectors, 1)
        assert [hits[0].item.id for hits in found[1:]] == list(range(1, 100))

    def test_indexes_need_it(self, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sentence = r"An approximate index needs the package faiss, .*: pip install 'shortlist\[search\]'"
        for kind in ("hnsw", "ivfpq"):
            with pytest.raises(MissingExtraError, match=sentence):
                Gallery.create(tmp_path / "gallery", encoder, kind=kind)
        assert not (tmp_path / "gallery").exists()
        monkeypatch.setattr(faiss_index, "MAX_FLAT_VECTORS", 10)
        gallery, _ = filled(tmp_path / "gallery", encoder, "auto", 10)
        with pytest.raises(MissingExtraError, match=sentence), gallery.store.changing():
            gallery.store.change(rows(10, 11), more(1, seed=1))
        assert len(Gallery.open(tmp_path / "gallery")) == 10


class TestErrors:
    def test_no_gallery(self, tmp_path: Path) -> None:
        with pytest.raises(GalleryError, match=r"No gallery found in .*: it has no gallery.json"):
            Gallery.open(tmp_path)

    def test_a_folder_with_other_contents(self, encoder: Encoder, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        for place in (tmp_path, tmp_path / "thesis.tex"):
            with pytest.raises(GalleryError, match="exists and is not a gallery"):
                Gallery.create(place, encoder)
        assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]

    def test_an_unknown_kind(self, encoder: Encoder, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="Unknown kind of index 'ivf'; did you mean 'ivfpq'"):
            Gallery.create(tmp_path / "gallery", encoder, kind="ivf")
        assert not (tmp_path / "gallery").exists()

    @pytest.mark.parametrize("part", ["items", "vectors", "index"])
    @pytest.mark.parametrize("how", ["missing", "truncated", "of another gallery"])
    def test_a_damaged_file(self, encoder: Encoder, tmp_path: Path, part: str, how: str) -> None:
        gallery, _ = filled(tmp_path / "gallery", encoder, "hnsw", 20)
        (file,) = (tmp_path / "gallery").glob(f"{part}-*")
        if how == "missing":
            file.unlink()
        elif how == "truncated":
            file.write_bytes(file.read_bytes()[:-40])
        else:
            filled(tmp_path / "other", encoder, "hnsw", 21)
            (other,) = (tmp_path / "other").glob(f"{part}-*")
            file.write_bytes(other.read_bytes())
        with pytest.raises(GalleryError, match=r"is damaged: .*" + re.escape(file.name)):
            Gallery.open(tmp_path / "gallery")
        assert len(gallery.search_vectors(more(1), 20)[0]) == 20  # opened before

    @pytest.mark.parametrize("part", ["vectors", "index"])
    def test_other_contents_of_the_same_size(self, encoder: Encoder, tmp_path: Path, part: str) -> None:
        filled(tmp_path / "gallery", encoder, "hnsw", 20)
        (file,) = (tmp_path / "gallery").glob(f"{part}-*")
        if part == "vectors":
            header, vectors = file.read_bytes()[:128], np.load(file)
            file.write_bytes(header + vectors[::-1].tobytes())
        else:
            gallery = Gallery.create(tmp_path / "other", encoder, kind="hnsw")
            with gallery.store.changing():
                gallery.store.change(rows(0, 20), more(20, seed=1))
            (other,) = (tmp_path / "other").glob(f"{part}-*")
            file.write_bytes(other.read_bytes())
        with pytest.raises(GalleryError, match=rf"is damaged: {file.name} differs from what was written\. Restore"):
            Gallery.open(tmp_path / "gallery")

    def test_an_index_of_another_dimension(self, tmp_path: Path) -> None:
        faiss_index.write(faiss_index.build("hnsw", np.eye(4, dtype=np.float32)), tmp_path / "index.faiss")
        with pytest.raises(DataError, match="is an index of 4 vectors of dimension 4, not of 4 of dimension 8"):
            faiss_index.read(tmp_path / "index.faiss", more(4))

    def test_damage_that_only_a_complete_check_finds(
        self, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "gallery"
        monkeypatch.setattr(segment, "sample_digest", lambda file: "of parts that are not damaged")
        filled(folder, encoder, "hnsw", 20)
        assert Gallery.check(folder) == GalleryCheck(4, ())
        (vectors,), (index,) = folder.glob("vectors-*"), folder.glob("index-*")
        vectors.write_bytes(vectors.read_bytes()[:-1] + b"x")
        Gallery.open(folder)
        index.unlink()
        (folder / "model" / "encoder.json").write_text("{}")
        found = Gallery.check(folder)
        assert not found.ok
        missing, differs, model = found.problems
        assert missing == f"{index.name} is missing"
        assert differs == f"{vectors.name} differs from what was written"
        assert "encoder.json" in model

    def test_a_file_that_cannot_be_read(self, encoder: Encoder, tmp_path: Path) -> None:
        filled(tmp_path / "gallery", encoder, "flat", 3)
        (vectors,) = (tmp_path / "gallery").glob("vectors-*")
        vectors.unlink()
        os.mkfifo(vectors)
        (problem,) = Gallery.check(tmp_path / "gallery").problems
        assert problem == f"{vectors.name} cannot be read: it is not a regular file"

    @pytest.mark.parametrize("note", ["[]", "{", '{"format": 4}', '{"format": "x"}', '{"files": {}}', "[" * 60_000])
    def test_a_damaged_manifest(self, gallery: Gallery, tmp_path: Path, note: str) -> None:
        (tmp_path / "gallery" / "gallery.json").write_text(note)
        with pytest.raises(GalleryError, match="is damaged"):
            Gallery.open(tmp_path / "gallery")

    def test_another_format_version(self, gallery: Gallery, tmp_path: Path) -> None:
        file = tmp_path / "gallery" / "gallery.json"
        for number, message in ((99, "later version"), (1, "only earlier versions of shortlist read")):
            file.write_text(json.dumps({**json.loads(file.read_text()), "format": number}))
            with pytest.raises(GalleryError, match=message):
                Gallery.open(tmp_path / "gallery")

    def test_another_model_in_its_folder(self, gallery: Gallery, shared_images: Catalog, tmp_path: Path) -> None:
        small_embedder().save(tmp_path / "gallery" / folder_store.MODEL)
        with pytest.raises(GalleryError, match="is not the one that computed the vectors"):
            Gallery.open(tmp_path / "gallery").search(shared_images.file(0))


def test_adding_is_one_change(
    encoder: Encoder, images: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New, changed, relabelled and removed images, and the minimum score: a killed process stores all or nothing."""
    gallery = Gallery.build(encoder, images.subset(range(6)), tmp_path / "gallery", workers=0)
    states: list[tuple[int, int, float | None]] = []

    def state(folder: Path, manifest: Manifest) -> None:
        states.append((manifest.generation, manifest.images, manifest.min_score))
        write_manifest(folder, manifest)

    monkeypatch.setattr(folder_store, "write_manifest", state)
    shutil.copy(images.file(7), images.file(1))
    left = images.subset(range(1, 8))
    added = gallery.add(replace(left, labels=(left.labels + 1) % 3), workers=0, prune="", min_score=0.5)
    assert (added.added, added.replaced, added.relabelled, added.removed) == (2, 1, 4, 1)
    assert states == [(2, 7, 0.5)]
    gallery.add(images.subset(range(1, 8)), workers=0, min_score=0.5)
    assert len(states) == 2  # the labels again


def test_a_label_with_many_images_is_searched_in_place(
    filled_folder: Gallery, shared_images: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = filled_folder.encoder.encode(shared_images.file(0))
    found = [filled_folder.search_vectors(query, 3, label=label)[0] for label in CLASSES]
    monkeypatch.setattr(folder_store, "MAX_COPIED_VECTORS", 0)
    for label, hits in zip(CLASSES, found, strict=True):
        again = filled_folder.search_vectors(query, 3, label=label)[0]
        assert [hit.item for hit in again] == [hit.item for hit in hits]
        assert [hit.score for hit in again] == pytest.approx([hit.score for hit in hits])


def test_faiss_modified_by_another_library(commands: Commands) -> None:
    """pytorch-metric-learning imports faiss.contrib.torch_utils, after which `search` takes no parameters."""
    found = commands.python("""
import faiss.contrib.torch_utils
import numpy as np
from shortlist.search import faiss_index
vectors = np.eye(4, dtype=np.float32)
searchable = np.array([True, False, True, True])
print(faiss_index.search(faiss_index.build("hnsw", vectors), vectors, vectors, 1, searchable)[1].ravel().tolist())
""")
    first, second, third, fourth = json.loads(found)
    assert (first, third, fourth) == (0, 2, 3)
    assert second != 1
