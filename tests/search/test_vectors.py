"""Vectors in tensors, arrays and files, read block by block."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from shortlist.errors import DataError
from shortlist.search import open_vectors
from shortlist.search import vectors as module
from shortlist.search.vectors import StackedVectors, VectorReader, Vectors

LIKE = torch.empty(0)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[list[Vectors], torch.Tensor]:
    """A tensor, an array, an empty array and a file, and their concatenation."""
    whole = torch.arange(44, dtype=torch.float32).view(22, 2)
    whole[:12] += 1e-5  # lost in half precision
    np.save(tmp_path / "file.npy", whole[12:].numpy().astype(np.float16))
    file = open_vectors(tmp_path / "file.npy")
    return [whole[:5].double(), whole[5:12].numpy(), np.zeros((0, 2)), file], whole


@pytest.mark.parametrize("rows", [1, 3, 5, 100])
def test_blocks(parts: tuple[list[Vectors], torch.Tensor], rows: int) -> None:
    given, whole = parts
    found = list(VectorReader(given, LIKE).blocks(rows))
    assert torch.equal(torch.cat([block for _, block in found]), whole)
    assert all(1 <= len(block) <= rows and block.dtype == torch.float32 for _, block in found)
    assert all(torch.equal(block, whole[first : first + len(block)]) for first, block in found)


@pytest.mark.parametrize("first", [0, 3, 5, 13, 22])
def test_blocks_from_a_row_on(parts: tuple[list[Vectors], torch.Tensor], first: int) -> None:
    given, whole = parts
    found = list(VectorReader(given, LIKE).blocks(4, first))
    assert torch.equal(torch.cat([torch.empty(0, 2), *(block for _, block in found)]), whole[first:])
    assert [row for row, _ in found[:1]] == [first] * (first < 22)


def test_take(parts: tuple[list[Vectors], torch.Tensor]) -> None:
    given, whole = parts
    rows = np.array([21, 0, 12, 11, 4, 5, 0])
    assert torch.equal(VectorReader(given, LIKE).take(rows), whole[torch.from_numpy(rows)])
    assert torch.equal(VectorReader(given, LIKE).take(torch.from_numpy(rows)), whole[torch.from_numpy(rows)])
    assert VectorReader(given, LIKE).take(np.empty(0, dtype=np.int64)).shape == (0, 2)
    assert len(VectorReader(given, LIKE)) == 22


def test_vectors_are_read_in_place(tmp_path: Path) -> None:
    np.save(tmp_path / "file.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    file = open_vectors(tmp_path / "file.npy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (file, np.array(file)):
            for first, block in VectorReader([source], LIKE).blocks(4):
                assert block.data_ptr() == source[first:].ctypes.data
    for other in (np.asfortranarray(file), file[::2], file[:, ::-1], file[::-1]):
        assert np.array_equal(torch.cat([block for _, block in VectorReader([other], LIKE).blocks(4)]), other)


def test_few_vectors_are_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COPIED", 3)
    parts = [np.zeros((7, 2), np.float16), np.zeros((7, 2), np.float32)]
    assert [len(block) for _, block in VectorReader(parts, LIKE).blocks(5)] == [3, 3, 1, 5, 2]


def mapped(file: Path) -> int:
    """Return how many kilobytes of a file are in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1])
        for line in lines
        if line.endswith(str(file))
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")
def test_pages_that_were_read_are_released(tmp_path: Path) -> None:
    file = tmp_path / "large.npy"
    np.save(file, np.ones((16_384, 256), dtype=np.float16))  # 8 MB
    vectors = open_vectors(file)
    for first, _ in VectorReader([vectors], LIKE, release=True).blocks(512):
        if first % 4096 == 0:
            assert mapped(file) < 4000
    assert vectors.sum(dtype=np.float64) == 16_384 * 256  # reads the whole file without releasing it
    assert mapped(file) > 8000
    VectorReader([vectors], LIKE).take(np.array([0, 9000]))
    assert mapped(file) > 8000
    VectorReader([vectors], LIKE, release=True).take(np.array([0, 9000]))
    assert mapped(file) < 2000
    assert vectors.sum(dtype=np.float64) == 16_384 * 256
    for _ in VectorReader([StackedVectors([vectors[:9000], vectors[9000:]], 256)], LIKE, release=True).blocks(512):
        pass
    assert mapped(file) < 2000


class TestStacked:
    WHOLE = np.arange(22, dtype=np.float32).reshape(11, 2)

    @pytest.fixture
    def stacked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackedVectors:
        monkeypatch.setattr(module, "SMALL_PART", 0)
        np.save(tmp_path / "file.npy", self.WHOLE[5:])
        return StackedVectors([self.WHOLE[:4], self.WHOLE[:0], self.WHOLE[4:5], open_vectors(tmp_path / "file.npy")], 2)

    def test_as_one_array(self, stacked: StackedVectors) -> None:
        assert (len(stacked), stacked.shape, stacked.ndim) == (11, (11, 2), 2)
        for first in range(12):
            for last in range(12):
                assert np.array_equal(stacked[first:last], self.WHOLE[first:last])
        for rows in ([], [10], [9, 0, 4, 4, 3]):
            assert np.array_equal(stacked[np.array(rows, dtype=np.int64)], self.WHOLE[rows])
        assert np.array_equal(stacked[2:9][3:], self.WHOLE[5:9])

    def test_small_parts_are_joined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "SMALL_PART", 4)
        ends = np.cumsum([1, 2, 4, 1, 0, 1, 2])
        stacked = StackedVectors(np.split(self.WHOLE, ends[:-1]), 2)
        assert [len(part) for part in stacked.parts] == [3, 4, 4]
        assert np.array_equal(stacked, self.WHOLE)
        assert [len(part) for part in StackedVectors([self.WHOLE[:2], self.WHOLE[2:6]], 2).parts] == [2, 4]

    def test_nothing_is_copied_unless_necessary(self, stacked: StackedVectors) -> None:
        assert np.shares_memory(np.asarray(stacked[6:9]), stacked.parts[-1])
        assert not np.shares_memory(np.array(stacked[6:9]), stacked.parts[-1])
        assert np.asarray(stacked, dtype=np.float64).dtype == np.float64
        assert np.asarray(StackedVectors([], 2)).shape == (0, 2)

    def test_blocks_and_rows(self, stacked: StackedVectors) -> None:
        found = torch.cat([block for _, block in VectorReader([stacked], LIKE).blocks(3)])
        assert np.array_equal(found, self.WHOLE)
        assert np.array_equal(
            VectorReader([self.WHOLE[:1], stacked], LIKE).take(np.array([11, 0, 3])), self.WHOLE[[10, 0, 2]]
        )


def test_any_damage_to_a_header(tmp_path: Path) -> None:
    file = tmp_path / "vectors.npy"
    np.save(file, np.zeros((6, 8), np.float32))
    content = file.read_bytes()
    for position in range(content.index(b"}")):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with contextlib.suppress(DataError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numpy, about old headers
                assert open_vectors(file).ndim == 2
