"""How much memory there is, and how much a graph takes."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from shortlist.errors import ShortlistError

OUT_OF_MEMORY = (  # signs of it in messages of torch, the C++ library, cuBLAS, MPS, and oneDNN, whose is vague
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "could not create a primitive",
)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, as far as known: of a CPU, nothing is known without psutil."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        import psutil
    except ModuleNotFoundError:
        return 0
    return min(int(psutil.virtual_memory().available), _left_in_container()) + _free_in_heap()


def _left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under a container's limit (cgroup 2), which the system's own figure does not know of."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return sys.maxsize
        used = int((folder / "memory.current").read_text())
        reclaimable = next(
            int(line.split()[1])
            for line in (folder / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
        return max(0, int(limit) - used + reclaimable)
    except (OSError, StopIteration, ValueError):
        return sys.maxsize


def _free_in_heap() -> int:
    """Bytes that the process has freed and not handed back to the system: see `reuse_freed_memory`."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    return int(mallinfo().fields[8])  # fordblks


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [("fields", ctypes.c_size_t * 10)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    if isinstance(error, ShortlistError):  # it may quote the error that it explains
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)
    )


class GraphSize(AbstractContextManager["GraphSize"]):
    """Counts the bytes that autograd keeps for the backward pass of what is computed inside.

    Args:
        held: tensors that are in memory anyway and not counted: parameters, buffers, images.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        self._held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, _unchanged)

    def _count(self, tensor: Tensor) -> tuple[Tensor, int]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._held:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach(), tensor._version

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())

    def __enter__(self) -> GraphSize:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """What was saved; autograd does not look itself whether it was written to since, where there are hooks."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation, {list(tensor.shape)}, has been modified by an "
            "inplace operation of the model"
        )
    return tensor


class GraphBudget:
    """Keeps graphs while they fit into so many bytes; infinitely many keep all of them, 0 none."""

    def __init__(self, room: float, held: Iterable[Tensor]) -> None:
        self.room, self._held = room, list(held)
        self._largest = 1

    def run(self, forward: Callable[[], Tensor], held: Iterable[Tensor] = ()) -> Tensor:
        """The result of `forward`, with its graph if that fits beside those kept before, else without.

        What is held anyway takes no room.
        """
        if self.room < self._largest:
            with torch.no_grad():
                return forward()
        if math.isinf(self.room):
            with torch.enable_grad():
                return forward()
        with torch.enable_grad(), GraphSize([*self._held, *held]) as graph:
            result = forward()
        self._largest = max(self._largest, graph.bytes)
        if graph.bytes > self.room:
            return result.detach()
        self.room -= graph.bytes
        return result


def reuse_freed_memory() -> None:
    """Keep freed memory in the process, for a training on the CPU.

    It is set for the whole process, so only its owner, such as the command line, should call this. By default glibc
    hands every freed block of some MB back to the system, which then maps and clears new pages for
    the next one: on a CPU that takes as long as the arithmetic on them. Does nothing where there is no glibc.
    """
    mmap_threshold, trim_threshold, never = -3, -1, 2**31 - 1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    most_of_older_glibc = 2**25
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(mmap_threshold, never) or mallopt(mmap_threshold, most_of_older_glibc)
            mallopt(trim_threshold, never)
