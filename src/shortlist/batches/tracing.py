"""Memory and floating-point operations of a computation, traced operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Trace(NamedTuple):
    """Resources that a computation used."""

    peak: int  # largest number of bytes in tensors that it has created, at any time
    kept: int  # number of bytes in tensors that exist at its end, such as the graph of its result
    flops: int  # floating-point operations of matrix products, convolutions and attention


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that tracks the memory of tensors created inside it, on any device, and counts operations.

    It sees the results of operations, including those of a backward pass on a CPU, but not memory that a kernel
    allocates and frees internally. Floating-point operations are counted as by torch's `FlopCounterMode`, which also
    attributes them to modules and is slower than most models.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = self.flops = 0
        self._alive: dict[int, weakref.ref[Any]] = {}  # storages that were created here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if id(storage) not in before:
                self._count(storage)
        self.peak = max(self.peak, self.bytes)
        if count := flop_registry.get(func.overloadpacket):
            self.flops += count(*args, **kwargs, out_val=result)
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


def _storages(values: object) -> Iterator[Any]:
    """Yield the storages of dense tensors; a sparse tensor has none of its own."""
    if isinstance(values, Tensor):
        if values.layout == torch.strided:
            yield values.untyped_storage()
    elif isinstance(values, list | tuple | dict):
        for each in values.values() if isinstance(values, dict) else values:
            yield from _storages(each)


def trace(compute: Callable[[], Any], then: Callable[[Any], object] = lambda result: None) -> Trace:
    """Execute a computation, and return the resources that it used.

    Args:
        compute: The computation.
        then: Called with the result, for example for a backward pass. It contributes to the peak only.
    """
    with Tracer() as tracer:
        result = compute()
        kept, flops = tracer.bytes, tracer.flops
        then(result)
    return Trace(tracer.peak, kept, flops)
