"""Shards: merged, they give the vectors of one process, even after interruptions; incomplete parts are never merged."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shortlist.data import Catalog, TestTransform, open_collection
from shortlist.encoding import Encoder, IncompletePartsError, Parts, Shard, embed_to_file, vector_file
from shortlist.encoding.parquet import embed_to_table
from shortlist.encoding.vector_file import left_out_images
from shortlist.errors import ConfigError, DataError, RunError
from shortlist.files import exclusive_write
from shortlist.search import open_vectors
from tests.data.pictures import picture, write
from tests.gallery.galleries import NUMBER, small_embedder


@pytest.fixture
def encoder(encoder: Encoder) -> Encoder:
    return replace(encoder, batch_size=2)  # 6 batches


@pytest.fixture
def parts(encoder: Encoder, images: Catalog, tmp_path: Path) -> Parts:
    return Parts(tmp_path / "parts", encoder, images)


def whole(encoder: Encoder, images: Catalog, path: Path, on_missing: str = "skip") -> Path:
    """Write the file of a single process."""
    settings = {"dtype": np.float32, "batch_size": encoder.batch_size, "on_missing": on_missing}
    return embed_to_file(encoder.network, images, encoder.transform, path, **settings)


def embed_all(parts: Parts, number: int, *without: int) -> list[Path]:
    return [parts.embed(Shard(index, number)) for index in range(number) if index not in without]


def merge(parts: Parts, path: Path) -> np.ndarray:
    """Merge the parts, as a later process does."""
    fresh = Parts(parts.folder, parts.encoder, parts.catalog)
    return np.array(open_vectors(fresh.copy(path, range(len(parts.catalog)))))


def test_shards_are_whole_batches_and_contain_every_image_once() -> None:
    for images, number, batch in product((0, 1, 7, 8, 9, 64), (1, 2, 3, 9), (1, 3, 8, 100)):
        shards = [Shard(index, number).images(images, batch) for index in range(number)]
        assert [image for shard in shards for image in shard] == list(range(images))
        assert all(shard.start % batch == 0 for shard in shards if shard)
        batches = [-(-len(shard) // batch) for shard in shards]
        assert max(batches) - min(batches) <= 1


@pytest.mark.parametrize("text", ["3/2", "2/2", "0/0", "-1/2", "1", "a/b", "1/2/3", "", "1 / 2"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`shard` is I/N with I from 0 to N - 1, such as 0/4"):
        Shard.parse(text)
    assert str(Shard.parse("1/2")) == "1/2"


@pytest.mark.parametrize("number", [1, 4, 9])  # of 9 shards, 3 have no image
def test_the_vectors_are_those_of_one_process(parts: Parts, number: int, tmp_path: Path) -> None:
    embed_all(parts, number)
    expected = open_vectors(whole(parts.encoder, parts.catalog, tmp_path / "one.npy"))
    assert np.array_equal(merge(parts, tmp_path / "merged.npy"), expected)
    chosen = parts.copy(tmp_path / "chosen.npy", [7, 0, 11])
    assert np.array_equal(open_vectors(chosen), expected[[7, 0, 11]])


def test_unreadable_images(parts: Parts, tmp_path: Path) -> None:
    """They are left out as in one process, even if a shard has no other images."""
    for index in (2, 3, 9):
        parts.catalog.file(index).write_text("words")
    embed_all(parts, 6)
    one = whole(parts.encoder, parts.catalog, tmp_path / "one.npy")
    assert np.array_equal(merge(parts, tmp_path / "merged.npy"), open_vectors(one))
    assert left_out_images(tmp_path / "merged.npy") == left_out_images(one)
    assert len(left_out_images(one)) == 3
    with pytest.raises(DataError, match="none of its 2 images can be read"):
        parts.copy(tmp_path / "none.npy", [2, 3])
    with pytest.raises(DataError, match=r'`on_missing="skip"`'):
        Parts(tmp_path / "other", parts.encoder, parts.catalog).embed(Shard(1, 6), on_missing="error")


def test_a_killed_shard_is_run_again(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other shards are kept, and the killed shard embeds only the images that its manifest does not list."""
    embed_all(parts, 2, 1)
    child = get_context("fork").Process(target=_killed, args=(parts, Shard(1, 2)))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(IncompletePartsError, match=r"is not complete: shard 1/2 is missing or not finished\.") as error:
        merge(parts, tmp_path / "merged.npy")
    assert error.value.shards == (Shard(1, 2),)
    embedded = []
    forward = type(parts.encoder.embedder).forward
    monkeypatch.setattr(
        type(parts.encoder.embedder), "forward", lambda self, x: (embedded.append(len(x)), forward(self, x))[1]
    )
    embed_all(parts, 2)
    assert sum(embedded) == 2  # of 6: two batches were noted
    monkeypatch.undo()
    one = whole(parts.encoder, parts.catalog, tmp_path / "one.npy")
    assert np.array_equal(merge(parts, tmp_path / "merged.npy"), open_vectors(one))


def _killed(parts: Parts, shard: Shard) -> None:
    """Record every batch in the manifest, and kill this process after the second."""
    vector_file.NOTE_INTERVAL = 0
    parts.embed(shard, progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done > 3 else None)


def test_a_shard_that_is_running_is_not_started_again(parts: Parts) -> None:
    with exclusive_write(parts.folder / f"{parts.catalog.name}.0-of-2.npy"), pytest.raises(RunError, match="0-of-2"):
        parts.embed(Shard(0, 2))


class TestOtherParts:
    """Parts that do not belong together: the error names the shards to run again."""

    @pytest.fixture(autouse=True)
    def complete(self, parts: Parts) -> None:
        embed_all(parts, 3)

    def fails(self, parts: Parts, tmp_path: Path, match: str, *again: int) -> None:
        with pytest.raises(IncompletePartsError, match=match) as error:
            merge(parts, tmp_path / "merged.npy")
        assert error.value.shards == tuple(Shard(index, 3) for index in again)
        assert not (tmp_path / "merged.npy").exists()

    def test_of_another_model(self, parts: Parts, tmp_path: Path) -> None:
        other = Encoder(small_embedder(), TestTransform(32, 32), batch_size=2)
        Parts(parts.folder, other, parts.catalog).embed(Shard(1, 3))
        self.fails(parts, tmp_path, r"shard 1/3 has vectors of another model\.", 1)
        embed_all(parts, 3)
        merge(parts, tmp_path / "merged.npy")

    def test_of_other_images(self, parts: Parts, tmp_path: Path) -> None:
        write(tmp_path / "images" / "new" / "a.png", picture(seed=100))
        more = Parts(parts.folder, parts.encoder, open_collection(tmp_path / "images"))
        more.embed(Shard(2, 3))
        self.fails(parts, tmp_path, r"shard 2/3 was made from another list of images\.", 2)
        self.fails(more, tmp_path, r"shard 0/3 was .* list of images, shard 1/3 was .* list of images\.", 0, 1)

    def test_of_images_that_have_changed(self, parts: Parts, tmp_path: Path) -> None:
        os.utime(parts.catalog.file(5), ns=(1, 1))
        self.fails(parts, tmp_path, r"shard 1/3 is damaged, or its images have changed since\.", 1)

    def test_that_are_damaged(self, parts: Parts, tmp_path: Path) -> None:
        for name in ("0-of-3.npy", "2-of-3.npy"):
            file = parts.folder / f"{parts.catalog.name}.{name}"
            file.write_bytes(file.read_bytes()[:-4])
        self.fails(parts, tmp_path, r"shard 0/3 is damaged, .* shard 2/3 is damaged, ", 0, 2)

    def test_that_are_there_twice(self, parts: Parts, tmp_path: Path) -> None:
        for ending in ("", ".json"):
            shutil.copy(
                parts.folder / f"{parts.catalog.name}.0-of-3.npy{ending}",
                parts.folder / f"{parts.catalog.name}.0-of-3 (copy).npy{ending}",
            )
        self.fails(parts, tmp_path, r"Shard 0/3 exists twice, as .* and .*: delete one")

    def test_of_another_number_of_shards(self, parts: Parts, tmp_path: Path) -> None:
        parts.embed(Shard(0, 2))
        self.fails(parts, tmp_path, "for 2 and 3 shards: delete those of one number")

    def test_none(self, parts: Parts, tmp_path: Path) -> None:
        parts.remove()
        assert not parts.folder.exists()
        self.fails(parts, tmp_path, "has no complete part of images: run its shards first, with `shard`")


def test_a_table_of_merged_parts(parts: Parts, tmp_path: Path) -> None:
    """It equals the table of one process. Merging again needs no parts, and new images need only their own."""
    one, merged = tmp_path / "one.parquet", tmp_path / "merged.parquet"
    parts.catalog.file(4).write_text("words")
    want = embed_to_table(parts.encoder, parts.catalog, one)
    embed_all(parts, 3)
    assert embed_to_table(parts.encoder, parts.catalog, merged, parts=parts.folder) == want
    assert pq.read_table(merged).equals(pq.read_table(one))
    assert not parts.folder.exists()
    again = embed_to_table(parts.encoder, parts.catalog.subset(range(4)), merged, parts=parts.folder)
    assert (again.embedded, again.kept, again.dropped) == (0, 4, NUMBER - 5)
    with pytest.raises(IncompletePartsError):
        embed_to_table(parts.encoder, parts.catalog, merged, parts=parts.folder)
    embed_all(parts, 2)
    assert embed_to_table(parts.encoder, parts.catalog, merged, parts=parts.folder).embedded == NUMBER - 5
