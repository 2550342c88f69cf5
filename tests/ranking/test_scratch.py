"""Buffers are allocated once."""

from __future__ import annotations

import torch

from shortlist.ranking.scratch import Scratch


def test_a_buffer_is_reused_unless_it_is_too_small() -> None:
    scratch = Scratch(torch.device("cpu"), torch.float64)
    first = scratch("a", 3, 4)
    assert (first.shape, first.dtype) == ((3, 4), torch.float64)
    assert scratch("a", 3, 4).data_ptr() == scratch("a", 2, 2).data_ptr() == first.data_ptr()
    larger = scratch("a", 13)
    assert len(larger) == 13
    assert larger.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_a_large_buffer_is_rounded_up() -> None:
    scratch = Scratch(torch.device("cpu"), torch.uint8)
    for size in (2**20, 2**20 + 1, 2**20 + 2):
        assert len(scratch(f"of {size}", size)) == size
    assert scratch("a", 2**20 + 1).data_ptr() == scratch("a", 2**20 + 1000).data_ptr()
    room = [scratch(name, size).untyped_storage().nbytes() for name, size in (("a", 1), ("b", 1000))]
    assert room == [2**21, 1000]


def test_names_have_buffers_of_their_own() -> None:
    scratch = Scratch(torch.device("cpu"), torch.float32)
    one, other = scratch("a", 5), scratch("b", 5, dtype=torch.bool)
    assert one.data_ptr() != other.data_ptr()
    assert (one.dtype, other.dtype) == (torch.float32, torch.bool)
