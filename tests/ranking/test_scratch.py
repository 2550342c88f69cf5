"""Buffers are allocated once, and small ones are kept for the next call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shortlist.ranking.recall import recall_at_k_loss
from shortlist.ranking.scratch import _KEPT_BYTES, Scratch, kept_scratch


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


CPU = torch.device("cpu")


def test_small_buffers_are_kept_for_the_next_call() -> None:
    with kept_scratch(CPU, torch.float32) as first, kept_scratch(CPU, torch.float32) as nested:
        assert nested is not first
        first("a", 10)
    with kept_scratch(CPU, torch.float32) as second, kept_scratch(CPU, torch.float64) as other:
        assert second is first
        assert other is not first
        second("a", _KEPT_BYTES // 4 + 1)  # float32
    with kept_scratch(CPU, torch.float32) as third:
        assert third is not first


def test_every_thread_has_its_own() -> None:
    def borrowed() -> Scratch:
        with kept_scratch(CPU, torch.float32) as scratch:
            return scratch

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(borrowed).result()
        assert borrowed() is not other
        assert pool.submit(borrowed).result() is other


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_buffers_of_a_mode_are_not_used_outside_of_it(mode: type[torch.inference_mode]) -> None:
    embeddings, labels = torch.nn.functional.normalize(torch.randn(8, 4)), torch.arange(8) // 2
    with mode(), kept_scratch(CPU, torch.float32) as inside:
        inside("similarities", 8, 8)
    assert recall_at_k_loss(embeddings.requires_grad_(), labels) > 0
    with kept_scratch(CPU, torch.float32) as outside:
        assert outside is not inside
