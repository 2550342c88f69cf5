"""Available memory, the size of graphs, and which graphs are kept."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from shortlist.batches import memory
from shortlist.batches.memory import GraphBudget, GraphSize, available_memory, is_out_of_memory
from shortlist.errors import RunError
from tests.processes import Commands

FLOAT = 4  # bytes

# The size of a graph


def test_tensors_saved_for_backward_are_counted_once() -> None:
    weight, images = torch.ones(100, requires_grad=True), torch.ones(7, 100)
    with GraphSize([weight]) as graph:
        product = images * weight  # needs the images
        result = product.exp()  # needs its result
        half = result[:, :50].sin()  # needs half of the same storage, which is held already
        half.sum()
    assert graph.bytes == 2 * 700 * FLOAT
    with GraphSize([weight, images]) as graph:
        (images * weight).exp()
    assert graph.bytes == 700 * FLOAT
    with GraphSize([]) as graph:
        (weight * weight).sum()
    assert graph.bytes == 100 * FLOAT


def test_other_tensors_are_not_counted() -> None:
    layer, images = nn.Linear(10, 20), torch.ones(7, 10)
    with GraphSize([*layer.parameters(), images]) as graph:
        layer(images) + 1
        with torch.no_grad():
            layer(images).exp().sin()
        images.exp().sin()  # nothing here is to be differentiated
    assert graph.bytes == 0
    layer(images).exp()  # after the context
    assert graph.bytes == 0


def test_a_view_of_the_images_is_not_counted() -> None:
    """The first layer saves its input, which is in memory anyway."""
    layer, images = nn.Conv2d(3, 4, 3), torch.ones(64, 3, 9, 9)
    with GraphSize([*layer.parameters(), images[:2]]) as graph:
        layer(images[:2]).sigmoid()
    assert graph.bytes == 2 * 4 * 7 * 7 * FLOAT


def test_counting_changes_no_gradient() -> None:
    layer, images = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 3)), torch.randn(7, 10)
    layer(images).square().sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    with GraphSize([]) as graph:
        result = layer(images).square().sum()
    result.backward()
    assert graph.bytes > 0
    assert all(torch.equal(one.grad, other) for one, other in zip(layer.parameters(), expected, strict=True))


def test_overwritten_values_are_detected() -> None:
    weight = torch.ones(3, requires_grad=True)
    with GraphSize([]):
        kept = weight.exp()
        result = kept.sum()
    kept.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"\[3\], has been modified by an inplace operation"):
        result.backward()


# Which graphs are kept


def run_chunks(room: float, sizes: list[int]) -> list[bool]:
    """Whether graphs of chunks of these sizes, with 8 bytes per image, are kept."""
    weight, calls = torch.ones(2, requires_grad=True), []
    budget = GraphBudget(lambda kept: room, [weight])

    def forward(images: Tensor) -> Tensor:
        calls.append(len(images))
        return (images * weight).exp()

    chunks = [torch.ones(size, 2) for size in sizes]
    results = [budget.run(partial(forward, images), held=[images]) for images in chunks]
    assert calls == sizes  # each is run once, kept or not
    return [result.requires_grad for result in results]


@pytest.mark.parametrize(
    ("room", "kept"), [(0, 0), (1, 0), (79, 0), (80, 1), (239, 2), (240, 3), (399, 4), (400, 5), (math.inf, 5)]
)
def test_budget_keeps_what_fits(room: float, kept: int) -> None:
    assert run_chunks(room, [10] * 5) == [True] * kept + [False] * (5 - kept)


def test_budget_with_chunks_of_several_sizes() -> None:
    assert run_chunks(200, [10, 5, 10]) == [True, True, True]
    assert run_chunks(199, [10, 5, 10]) == [True, True, False]
    assert run_chunks(200, [10, 20, 10]) == [True, False, False]  # with less room than the largest took, none is tried


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
def test_budget_does_not_depend_on_the_caller(outer: type) -> None:
    with outer():
        assert run_chunks(80, [10, 10]) == [True, False]
        assert run_chunks(0, [10]) == [False]
        assert run_chunks(math.inf, [10]) == [True]


# Memory that is left


def write_container(folder: Path, limit: str, used: int = 600, reclaimable: int = 100) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 300\ninactive_anon 7\ninactive_file {reclaimable}\nactive_file 9\n")
    return folder


def test_left_in_container(tmp_path: Path) -> None:
    assert memory._left_in_container(write_container(tmp_path, "1000")) == 1000 - 600 + 100
    assert memory._left_in_container(write_container(tmp_path, "max")) == sys.maxsize
    assert memory._left_in_container(write_container(tmp_path, "400")) == 0  # not negative


@pytest.mark.parametrize("damage", ["memory.max", "memory.current", "memory.stat"])
def test_an_unreadable_limit_is_ignored(tmp_path: Path, damage: str) -> None:
    write_container(tmp_path, "1000")
    (tmp_path / damage).write_text("?\n")
    assert memory._left_in_container(tmp_path) == sys.maxsize
    (tmp_path / damage).unlink()
    assert memory._left_in_container(tmp_path) == sys.maxsize


def test_available_memory_is_the_smaller_of_system_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert 0 < available_memory(cpu) <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "free_in_heap", lambda: 10)
    monkeypatch.setattr(memory, "_left_in_container", lambda: 1000)
    assert available_memory(cpu) == 1010
    monkeypatch.setattr(memory, "_left_in_container", lambda: sys.maxsize)
    assert 1010 < available_memory(cpu) < 2**60


CHILD = """
import torch
from shortlist.batches import memory
def growth():
    before = memory.free_in_heap()
    many = [torch.ones(31 * 2**18) for _ in range(8)]  # 31 MB each, just below the limit of older glibc
    held = memory.free_in_heap() - before
    del many
    return held, memory.free_in_heap() - before
print(*growth())
memory.reuse_freed_memory()
print(*growth())
many = [torch.ones(31 * 2**18) for _ in range(20)]
last = torch.ones(2**18)  # keeps malloc from shrinking the heap
del many
free = memory.free_in_heap()
memory.return_freed_memory(torch.device("cpu"))
print(free, memory.free_in_heap())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_memory_that_is_freed_and_kept_counts_as_available(commands: Commands) -> None:
    """Otherwise, graphs that fit in one step would have less memory in every later step."""
    lines = commands.python(CHILD).splitlines()
    (held, freed), (held_to_reuse, freed_to_reuse), (before, after) = (map(int, line.split()) for line in lines)
    assert max(held, held_to_reuse, freed) < 2**25  # returned to the system, which counts it itself
    assert freed_to_reuse > 8 * 31 * 2**20 - 2**25
    assert before - after > 2**28  # returned: the system counts it, so it must not be counted twice


# Failed allocations


def test_a_real_failure_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        *(torch.OutOfMemoryError(), MemoryError(), RuntimeError("std::bad_alloc")),
        *(RuntimeError("a\nDefaultCPUAllocator: no"), RuntimeError("could not create a primitive")),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("shapes"), ValueError("DefaultCPUAllocator"), KeyboardInterrupt(), OSError("memory")),
        RunError("Out of memory with chunks of one image. (DefaultCPUAllocator: no)"),
    ],
)
def test_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)
