"""Memory and floating-point work of a computation, traced operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Trace(NamedTuple):
    """What a computation took."""

    peak: int  # largest number of bytes in tensors that it has created, at any time
    kept: int  # number of bytes in tensors that exist at its end, such as the graph of its result
    flops: int  # floating-point operations of matrix products, convolutions and attention


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that follows the bytes in tensors that are created inside it, on any device.

    It sees the results of operations, also in a backward pass on a CPU, but not memory that a kernel allocates and
    frees internally.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}  # storages that were created here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in before:
                self._count(storage)
        self.peak = max(self.peak, self.bytes)
        return result

    def _count(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return
        self.bytes += size

        def freed(_: object) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, freed)


def _storages(values: object) -> list[Any]:
    """Return the storages of dense tensors; a sparse tensor has none of its own."""
    dense = (each for each in tree_leaves(values) if isinstance(each, Tensor) and each.layout == torch.strided)
    return [each.untyped_storage() for each in dense]


def trace(compute: Callable[[], Any], then: Callable[[Any], object] = lambda result: None) -> Trace:
    """Execute a computation, and return what it took.

    Args:
        compute: The computation.
        then: Called with what it returned, such as a backward pass. It contributes to the peak only.
    """
    counter = FlopCounterMode(display=False)
    with LiveMemory() as memory:
        with counter:
            result = compute()
        kept = memory.bytes
        then(result)
    return Trace(memory.peak, kept, counter.get_total_flops())
