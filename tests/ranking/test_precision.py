"""Losses and metrics compute products in full precision and restore the settings of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shortlist.ranking.precision import full_precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fast_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def test_inside_and_after() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision(CPU):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert torch.get_float32_matmul_precision() == "medium"


def test_threads_that_overlap() -> None:
    """The first one to leave does not end the precision of the other, which restores the setting of the caller."""
    first, second = full_precision(CPU), full_precision(CPU)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        assert torch.get_float32_matmul_precision() == "highest"
        other.submit(second.__exit__, None, None, None).result()
    assert torch.get_float32_matmul_precision() == "medium"


def test_after_an_error() -> None:
    with pytest.raises(KeyError, match="inside"), full_precision(CPU):
        raise KeyError("inside")
    assert torch.get_float32_matmul_precision() == "medium"
