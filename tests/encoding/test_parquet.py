"""Embeddings in a Parquet file: complete, updated, resumed, and never mixed with those of another model."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shortlist.data import Catalog, TestTransform, open_collection
from shortlist.encoding import Encoder, embed_images, parquet
from shortlist.encoding.parquet import embed_to_table
from shortlist.errors import DataError, RunError
from shortlist.locations import size_and_mtime
from tests.data.pictures import picture, write
from tests.displays import Told
from tests.gallery.galleries import CLASSES, DIM, NUMBER, small_embedder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out" / "vectors.parquet"


def names(file: Path) -> list[str]:
    return [Path(each).name for each in pq.read_table(file)["path"].to_pylist()]


def vectors(file: Path) -> np.ndarray:
    return np.array(pq.read_table(file)["vector"].to_pylist(), dtype=np.float32)


@pytest.mark.parametrize("group", [8_192, 5])
def test_columns_and_vectors(
    encoder: Encoder, images: Catalog, file: Path, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_ROWS", group)
    display = Told()
    done = embed_to_table(encoder, images, file, display=display)
    found = pq.read_table(file)
    assert (done.embedded, done.kept, done.dropped, done.unreadable) == (NUMBER, 0, 0, {})
    assert found.column_names == ["path", "label", "vector", "size", "modified"]
    assert found.schema.field("vector").type == pa.list_(pa.float32(), DIM)
    assert found["path"].to_pylist() == [str(images.file(row).absolute()) for row in range(NUMBER)]
    assert found["label"].to_pylist() == [name for name, size in sorted(CLASSES.items()) for _ in range(size)]
    expected = embed_images(encoder.network, images, encoder.transform)
    np.testing.assert_allclose(vectors(file), expected, atol=1e-6)
    assert display.tasks[-1] == (f"embedding {images.name}", NUMBER, NUMBER)
    assert {each.name for each in file.parent.iterdir()} <= {file.name, f".{file.name}.lock"}


def test_only_new_and_changed_images_are_embedded(
    encoder: Encoder, images: Catalog, file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    embed_to_table(encoder, images, file)
    old = dict(zip(pq.read_table(file)["path"].to_pylist(), vectors(file).tolist(), strict=True))
    (folder / "bolt" / "0.jpg").unlink()
    write(folder / "bolt" / "1.jpg", picture(seed=99))
    os.utime(folder / "bolt" / "1.jpg", ns=(1, 1))
    write(folder / "new" / "a.png", picture(seed=100))
    (folder / "new" / "bad.png").write_text("words")
    done = embed_to_table(encoder, open_collection(folder), file)
    assert (done.embedded, done.kept, done.dropped) == (2, NUMBER - 2, 2)
    ((path, reason),) = done.unreadable.items()
    assert (path, "not an image" in reason) == (str(folder / "new" / "bad.png"), True)
    now = dict(zip(pq.read_table(file)["path"].to_pylist(), vectors(file).tolist(), strict=True))
    assert len(now) == NUMBER
    assert str(folder / "bolt" / "0.jpg") not in now
    changed = {path for path in now if now[path] != old.get(path)}
    assert changed == {str(folder / "bolt" / "1.jpg"), str(folder / "new" / "a.png")}


def test_unchanged_images_are_not_embedded_again(
    encoder: Encoder, images: Catalog, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_to_table(encoder, images, file)
    before = file.stat().st_ino, size_and_mtime(file)
    monkeypatch.setattr("shortlist.encoding.shards.encode_to_file", None)  # must not be called
    assert embed_to_table(encoder, images, file).kept == NUMBER
    assert (file.stat().st_ino, size_and_mtime(file)) == before  # not even written
    other = replace(images, class_names=tuple(name.upper() for name in images.class_names))
    assert embed_to_table(encoder, other, file).kept == NUMBER
    assert pq.read_table(file)["label"][0].as_py() == "BOLT"


def test_a_killed_process_is_resumed(
    encoder: Encoder, images: Catalog, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_to_table(encoder, images.subset(range(4)), file)
    child = get_context("fork").Process(target=_killed, args=(encoder, images, file))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(names(file)) == 4  # unchanged
    half = file.with_name(f".{file.name}.{child.pid}")  # what it would leave behind if it were killed a little later
    half.touch()
    monkeypatch.setattr(type(encoder.embedder), "forward", None)  # must not be called
    done = embed_to_table(encoder, images, file)
    assert (done.embedded, done.kept, half.exists()) == (NUMBER - 4, 4, False)
    assert len(names(file)) == NUMBER


def _killed(encoder: Encoder, images: Catalog, file: Path) -> None:
    parquet.pq.ParquetWriter = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    embed_to_table(encoder, images, file)


def test_boxes(encoder: Encoder, images: Catalog, file: Path) -> None:
    boxes = np.full((NUMBER, 4), np.nan)
    boxes[2] = (2, 2, 12, 12)
    parts = replace(images, boxes=boxes)
    embed_to_table(encoder, parts, file)
    np.testing.assert_allclose(vectors(file), embed_images(encoder.network, parts, encoder.transform), atol=1e-6)
    assert pq.read_table(file)["box"].to_pylist() == [None] * 2 + [[2, 2, 12, 12]] + [None] * (NUMBER - 3)
    assert embed_to_table(encoder, parts, file).kept == NUMBER
    whole = embed_to_table(encoder, images, file)
    assert (whole.embedded, whole.kept, whole.dropped) == (1, NUMBER - 1, 1)


class TestErrors:
    def test_another_model(self, encoder: Encoder, images: Catalog, file: Path) -> None:
        embed_to_table(encoder, images, file)
        before = file.read_bytes()
        other = Encoder(small_embedder(), TestTransform(32, 32))
        with pytest.raises(DataError, match="holds vectors of another model"):
            embed_to_table(other, images, file)
        assert file.read_bytes() == before

    @pytest.mark.parametrize("content", [b"words", b""])
    def test_not_a_parquet_file(self, encoder: Encoder, images: Catalog, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "thesis.tex").write_bytes(content)
        with pytest.raises(DataError, match="is not a Parquet file"):
            embed_to_table(encoder, images, tmp_path / "thesis.tex")
        assert (tmp_path / "thesis.tex").read_bytes() == content

    def test_a_parquet_file_of_another_program(self, encoder: Encoder, images: Catalog, file: Path) -> None:
        file.parent.mkdir()
        pq.write_table(pa.table({"path": ["a.png"]}), file)
        with pytest.raises(DataError, match="was not written by shortlist embed"):
            embed_to_table(encoder, images, file)

    def test_vectors_that_a_damaged_footer_hides(
        self, encoder: Encoder, images: Catalog, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """pyarrow then reads the other columns, and no row of all columns."""
        embed_to_table(encoder, images, file)
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_: iter(()))
        with pytest.raises(DataError, match=rf"vectors\.parquet is damaged \({NUMBER} vectors are missing\)"):
            embed_to_table(encoder, images, file)

    def test_no_readable_image(self, encoder: Encoder, tmp_path: Path, file: Path) -> None:
        (tmp_path / "bad.png").write_text("words")
        with pytest.raises(DataError, match="none of its 1 images can be read"):
            embed_to_table(encoder, open_collection(tmp_path / "bad.png"), file)
        assert not file.exists()

    def test_two_processes_at_once(self, encoder: Encoder, images: Catalog, file: Path) -> None:
        file.parent.mkdir()
        with (
            filelock.FileLock(file.with_name(f".{file.name}.lock")),
            pytest.raises(RunError, match="Another process is writing"),
        ):
            embed_to_table(encoder, images, file)
