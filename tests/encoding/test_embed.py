"""Embeddings in a file: equal to those in memory, resumable, reused, and never incomplete."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shortlist.data import Catalog, TestTransform
from shortlist.encoding import embed, embed_images, embed_to_file, vector_file
from shortlist.errors import DataError, RunError
from shortlist.model import Embedder
from shortlist.search import open_vectors
from tests.data.pictures import picture, write
from tests.evaluation.test_evaluate import catalog

SQUARE = TestTransform(20, 20)
IMAGES = 23


class Corner(nn.Module):
    """Returns the colours of four pixels, counts the images, and interrupts itself after `limit` images."""

    def __init__(self, scales: tuple[float, ...] = (1.0,), limit: int = 10**9) -> None:
        super().__init__()
        self.scale, self.scales = nn.Parameter(torch.full((1,), 1 / 255)), scales
        object.__setattr__(self, "counter", [0, limit])

    def forward(self, images: Tensor) -> Tensor:
        self.counter[0] += len(images)
        if self.counter[0] > self.counter[1]:
            raise KeyboardInterrupt
        return images[:, :, :2, :2].flatten(1).float() * self.scale

    @property
    def seen(self) -> int:
        return self.counter[0]


@pytest.fixture
def images(tmp_path: Path) -> Catalog:
    for index in range(IMAGES):
        write(tmp_path / "images" / f"{index}.png", picture(20, 20, seed=index))
    return catalog([0] * IMAGES, root=tmp_path / "images")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "vectors" / "r1m.npy"


def files(path: Path) -> set[str]:
    return {each.name for each in path.parent.iterdir() if not each.name.endswith(".lock")}


class TestComplete:
    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_equals_the_embeddings_in_memory(self, images: Catalog, file: Path, dtype: type) -> None:
        calls: list[tuple[int, int]] = []
        progress = lambda done, of: calls.append((done, of))  # noqa: E731
        assert embed_to_file(Corner(), images, SQUARE, file, dtype=dtype, batch_size=4, progress=progress) == file
        found = open_vectors(file)
        assert (found.dtype, found.shape) == (dtype, (IMAGES, 12))
        assert np.array_equal(found, embed_images(Corner(), images, SQUARE).numpy().astype(dtype))
        assert calls[-1] == (IMAGES, IMAGES)
        assert len(calls) == 6
        assert files(file) == {"r1m.npy", "r1m.npy.json"}  # no temporary file is left
        assert json.loads((file.parent / "r1m.npy.json").read_text())["left_out"] == {}

    def test_the_default_number_of_workers(self, images: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(embed, "decoding_workers", lambda *numbers: asked.append(numbers) or 0)
        embed_images(Corner(), images, SQUARE, workers=0)
        assert asked == []
        embed_images(Corner(), images, SQUARE, batch_size=4)
        assert asked == [(IMAGES, 1)]

    def test_numpy_reads_it(self, images: Catalog, file: Path) -> None:
        embed_to_file(Corner(), images, SQUARE, file)
        found = np.load(file)  # without a memory map
        assert found.flags.c_contiguous
        assert np.array_equal(found, open_vectors(file))

    def test_the_same_images_are_not_embedded_twice(self, images: Catalog, file: Path) -> None:
        embed_to_file(Corner(), images, SQUARE, file)
        again = Corner()
        embed_to_file(again, images, SQUARE, file)
        assert again.seen == 0

    def test_any_difference_embeds_again(self, images: Catalog, file: Path) -> None:
        other_weights = Corner()
        with torch.no_grad():
            other_weights.scale += 1
        cases = [
            (other_weights, images, SQUARE, np.float16),
            (Corner(scales=(1.0, 0.5)), images, SQUARE, np.float16),
            (Corner(), images.subset(range(5)), SQUARE, np.float16),
            (Corner(), images, TestTransform(20, 24), np.float16),
            (Corner(), images, SQUARE, np.float32),
        ]
        for embedder, chosen, transform, dtype in cases:
            embed_to_file(Corner(), images, SQUARE, file)
            embed_to_file(embedder, chosen, transform, file, dtype=dtype)
            assert embedder.seen == len(chosen)

    def test_a_changed_image_is_embedded_again(self, images: Catalog, file: Path) -> None:
        embed_to_file(Corner(), images, SQUARE, file)
        write(images.file(3), picture(20, 20, seed=99))
        embed_to_file(Corner(), images, SQUARE, file)
        assert np.array_equal(open_vectors(file), embed_images(Corner(), images, SQUARE).numpy().astype(np.float16))

    def test_settings_that_are_not_in_tensors_count(self, images: Catalog, file: Path) -> None:
        """The mean of the images, and whether pooled features are normalised."""
        options = {"backbone": "test_resnet", "dim": 4, "layer_norm": False}
        plain = Embedder(**options)
        for changed in ({"mean": (0.1, 0.2, 0.3)}, {"l2_pooled": True}):
            other = Embedder(**options, **changed)
            other.load_state_dict(plain.state_dict())
            embed_to_file(plain, images, SQUARE, file)
            embed_to_file(other, images, SQUARE, file)
            assert np.array_equal(open_vectors(file), embed_images(other, images, SQUARE).numpy().astype(np.float16))
            assert not np.array_equal(
                open_vectors(file), embed_images(plain, images, SQUARE).numpy().astype(np.float16)
            )

    def test_a_truncated_file_is_written_again(self, images: Catalog, file: Path) -> None:
        embed_to_file(Corner(), images, SQUARE, file)
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(DataError, match=r"r1m\.npy is not a complete \.npy file"):
            open_vectors(file)
        embed_to_file(Corner(), images, SQUARE, file)
        assert file.read_bytes() == whole


class TestInterrupted:
    @pytest.mark.parametrize("limit", [3, 4, 9, 22])
    def test_resumes(self, images: Catalog, file: Path, limit: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            embed_to_file(Corner(limit=limit), images, SQUARE, file, batch_size=4)
        assert not file.exists()
        rest = Corner()
        embed_to_file(rest, images, SQUARE, file, batch_size=4)
        assert rest.seen == IMAGES - limit // 4 * 4
        assert np.array_equal(open_vectors(file), embed_images(Corner(), images, SQUARE).numpy().astype(np.float16))

    def test_other_weights_start_from_the_beginning(self, images: Catalog, file: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            embed_to_file(Corner(limit=9), images, SQUARE, file, batch_size=4)
        other = Corner(scales=(2.0,))
        embed_to_file(other, images, SQUARE, file, batch_size=4)
        assert other.seen == IMAGES
        assert len(open_vectors(file)) == IMAGES

    def test_an_older_file_is_kept_until_the_new_one_is_complete(self, images: Catalog, file: Path) -> None:
        embed_to_file(Corner(), images.subset(range(5)), SQUARE, file)
        with pytest.raises(KeyboardInterrupt):
            embed_to_file(Corner(limit=9), images, SQUARE, file, batch_size=4)
        assert len(open_vectors(file)) == 5

    def test_killed(self, images: Catalog, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is no clean-up. Vectors that were written after the last manifest are written again."""
        real = vector_file.VectorFile.append

        def append(self: vector_file.VectorFile, vectors: np.ndarray, seen: int) -> None:
            monkeypatch.setattr(vector_file, "NOTE_INTERVAL", 0 if seen <= 8 else 1000)
            real(self, vectors, seen)

        with monkeypatch.context() as patch:
            patch.setattr(vector_file.VectorFile, "append", append)
            patch.setattr(vector_file.VectorFile, "__exit__", lambda self, *_: self._stream.close())
            with pytest.raises(KeyboardInterrupt):
                embed_to_file(Corner(limit=17), images, SQUARE, file, batch_size=4)
        part = file.parent / ".r1m.npy.part"
        assert part.stat().st_size == vector_file.HEADER_BYTES + 16 * 12 * 2
        rest = Corner()
        embed_to_file(rest, images, SQUARE, file, batch_size=4)
        assert rest.seen == IMAGES - 8
        assert np.array_equal(open_vectors(file), embed_images(Corner(), images, SQUARE).numpy().astype(np.float16))

    @pytest.mark.parametrize("last", [2, 3, 4])  # the first two calls are at the beginning
    def test_killed_while_files_are_renamed(
        self, images: Catalog, file: Path, monkeypatch: pytest.MonkeyPatch, last: int
    ) -> None:
        """No image is embedded twice, and no manifest describes another file."""
        embed_to_file(Corner(scales=(3.0,)), images, SQUARE, file)  # an older file of the same size
        calls: list[str] = []

        def interrupt(name: str) -> None:
            real = getattr(Path, name)

            def act(self: Path, *arguments: object, **options: object) -> object:
                if self.parent == file.parent and not self.suffix[1:].isdecimal():
                    calls.append(name)
                    if len(calls) == last + 1:
                        raise KeyboardInterrupt
                return real(self, *arguments, **options)

            patch.setattr(Path, name, act)

        dark = Corner()
        with torch.no_grad():
            dark.scale /= 2
        with monkeypatch.context() as patch:
            patch.setattr(vector_file.VectorFile, "__exit__", lambda self, *_: self._stream.close())
            for name in ("replace", "unlink"):
                interrupt(name)
            with pytest.raises(KeyboardInterrupt):
                embed_to_file(dark, images, SQUARE, file)
        rest = Corner()
        rest.load_state_dict(dark.state_dict())
        embed_to_file(rest, images, SQUARE, file)
        assert rest.seen == 0
        assert np.array_equal(open_vectors(file), embed_images(dark, images, SQUARE).numpy().astype(np.float16))
        assert files(file) >= {"r1m.npy", "r1m.npy.json"}

    def test_a_note_that_could_not_be_deleted(
        self, images: Catalog, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Path.unlink

        def unlink(self: Path, missing_ok: bool = False) -> None:
            if self.name.endswith(".part.json") and self.exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
            real(self, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            with pytest.raises(OSError, match="Input/output error"):
                embed_to_file(Corner(), images, SQUARE, file)
        rest = Corner()
        embed_to_file(rest, images, SQUARE, file)
        assert rest.seen == 0
        assert not list(file.parent.glob("*.part*"))

    @pytest.mark.parametrize("name", [".r1m.npy.part", ".r1m.npy.part.json"])
    @pytest.mark.parametrize("how", ["flipped", "truncated", "unreadable"])
    def test_damaged_work_is_done_again(self, images: Catalog, file: Path, name: str, how: str) -> None:
        with pytest.raises(KeyboardInterrupt):
            embed_to_file(Corner(limit=17), images, SQUARE, file, batch_size=4)
        part = file.parent / name
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content if how == "flipped" else content[:-1])
        if how == "unreadable":
            part.unlink()
            part.symlink_to("/proc/self/mem")  # reading its first byte is an I/O error
        rest = Corner()
        embed_to_file(rest, images, SQUARE, file, batch_size=4)
        assert rest.seen == IMAGES
        assert np.array_equal(open_vectors(file), embed_images(Corner(), images, SQUARE).numpy().astype(np.float16))
        assert not list(file.parent.glob(".*.part*"))

    def test_two_processes_at_once(self, images: Catalog, file: Path) -> None:
        file.parent.mkdir()
        with (
            filelock.FileLock(file.parent / ".r1m.npy.lock"),
            pytest.raises(RunError, match=r"Another process is writing .*r1m\.npy"),
        ):
            embed_to_file(Corner(), images, SQUARE, file)
        embed_to_file(Corner(), images, SQUARE, file)


class TestUnreadable:
    def truncate(self, images: Catalog, *numbers: int) -> None:
        for number in numbers:
            file = images.file(number)
            file.write_bytes(file.read_bytes()[:100])

    @pytest.mark.parametrize(
        ("workers", "bad"), [(0, [0, 4, 5, 6, 7, 22]), (1, [9])], ids=["in this process", "in a worker"]
    )
    def test_left_out_and_listed(self, images: Catalog, file: Path, workers: int, bad: list[int]) -> None:
        """The first image, a whole batch, and the last image; and with a worker, which is then restarted."""
        self.truncate(images, *bad)
        embed_to_file(Corner(), images, SQUARE, file, batch_size=4, on_missing="skip", workers=workers)
        good = images.subset([index for index in range(IMAGES) if index not in bad])
        assert np.array_equal(open_vectors(file), embed_images(Corner(), good, SQUARE).numpy().astype(np.float16))
        note = json.loads((file.parent / "r1m.npy.json").read_text())
        assert list(note["left_out"]) == [str(images.file(index)) for index in bad]
        assert all("truncated" in reason for reason in note["left_out"].values())
        again = Corner()
        embed_to_file(again, images, SQUARE, file, on_missing="skip")
        assert again.seen == 0

    def test_an_image_that_is_listed_twice(self, images: Catalog, file: Path) -> None:
        self.truncate(images, 9)
        twice = images.subset([*range(IMAGES), 9, 8])
        embed_to_file(Corner(), twice, SQUARE, file, batch_size=4, on_missing="skip")
        assert len(open_vectors(file)) == IMAGES  # image 8 is listed twice
        assert json.loads((file.parent / "r1m.npy.json").read_text())["left_out"].keys() == {str(images.file(9))}

    def test_listed_once_after_an_interruption(self, images: Catalog, file: Path) -> None:
        self.truncate(images, 9)
        with pytest.raises(KeyboardInterrupt):
            embed_to_file(Corner(limit=9), images, SQUARE, file, batch_size=4, on_missing="skip")
        embed_to_file(Corner(), images, SQUARE, file, batch_size=4, on_missing="skip")
        assert len(open_vectors(file)) == IMAGES - 1
        assert len(json.loads((file.parent / "r1m.npy.json").read_text())["left_out"]) == 1

    def test_an_error_by_default(self, images: Catalog, file: Path) -> None:
        self.truncate(images, 9)
        with pytest.raises(DataError, match=r"9\.png.*`on_missing=\"skip\"`"):
            embed_to_file(Corner(), images, SQUARE, file, batch_size=4)
        assert not file.exists()

    def test_none_can_be_read(self, images: Catalog, file: Path) -> None:
        self.truncate(images, *range(IMAGES))
        with pytest.raises(DataError, match="none of its 23 images can be read"):
            embed_to_file(Corner(), images, SQUARE, file, batch_size=4, on_missing="skip")

    def test_values_that_overflow_half_precision(self, images: Catalog, file: Path) -> None:
        large = Corner()
        with torch.no_grad():
            large.scale.fill_(1e6)
        with pytest.raises(RunError, match="not finite, or too large for float16"):
            embed_to_file(large, images, SQUARE, file)
        embed_to_file(large, images, SQUARE, file, dtype=np.float32)


class TestOpenVectors:
    def test_files_without_vectors(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"The file .*none\.npy does not exist"):
            open_vectors(tmp_path / "none.npy")
        (tmp_path / "text.npy").write_text("text")
        with pytest.raises(DataError, match=r"text\.npy is not a complete \.npy file"):
            open_vectors(tmp_path / "text.npy")
        for name, content in {"vector": np.zeros(3), "integers": np.zeros((3, 3), dtype=int)}.items():
            np.save(tmp_path / f"{name}.npy", content)
            with pytest.raises(DataError, match=f"{name}.npy does not contain vectors"):
                open_vectors(tmp_path / f"{name}.npy")

    def test_pickles_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "objects.npy", np.array([[object()]]), allow_pickle=True)
        with pytest.raises(DataError, match="not a complete"):
            open_vectors(tmp_path / "objects.npy")

    @pytest.mark.parametrize("rows", [0, 7, 10**6, 10**12])
    def test_the_header_has_a_constant_length(self, rows: int) -> None:
        header = vector_file._header((rows, 2048), np.dtype(np.float16))
        assert len(header) == vector_file.HEADER_BYTES
        assert header.endswith(b"\n")
