"""Available memory, and the memory that autograd graphs take."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from shortlist.errors import ShortlistError

OUT_OF_MEMORY = (  # parts of the messages of torch, the C++ library, cuBLAS, MPS and (unspecifically) oneDNN
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "could not create a primitive",
)


def available_memory(device: torch.device) -> int:
    """Return the number of bytes that can still be allocated on a device; 0 for a CPU if psutil is not installed."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        import psutil
    except ModuleNotFoundError:
        return 0
    return min(int(psutil.virtual_memory().available), _left_in_container()) + free_in_heap()


def _left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of bytes left under a container's memory limit (cgroup 2), which psutil does not consider."""
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


def free_in_heap() -> int:
    """Return the number of bytes that the process has freed but not returned to the system (`reuse_freed_memory`)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    fields = mallinfo().fields
    mapped, used, free = fields[4], fields[7], fields[8]  # hblkhd, uordblks, fordblks
    # psutil reads the same file, but first looks up the start time of the process, which takes longer than all else.
    pages = Path("/proc/self/statm").read_text().split()
    resident, shared = (int(number) * mmap.PAGESIZE for number in pages[1:3])
    # malloc also counts memory that `return_freed_memory` has returned, which is not resident. The bound is too high
    # by the memory that Python itself has allocated, about 200 MB.
    return int(max(0, min(free, resident - shared - used - mapped)))


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [("fields", ctypes.c_size_t * 10)]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed memory allocation, on any device."""
    if isinstance(error, ShortlistError):  # may quote the message of the original error
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)
    )


class GraphSize(AbstractContextManager["GraphSize"]):
    """Context manager that measures the memory that autograd saves for the backward pass.

    Args:
        held: Tensors that are in memory anyway and are not counted, such as parameters, buffers and images.
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
        """Number of bytes saved so far."""
        return sum(self._storages.values())

    def __enter__(self) -> GraphSize:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor after checking that it was not modified, which autograd does not check with hooks."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation, {list(tensor.shape)}, has been modified by an "
            "inplace operation of the model"
        )
    return tensor


class GraphBudget:
    """Budget of memory for autograd graphs, which may change while graphs are kept.

    Args:
        limit: Maps the number of bytes that graphs take now to the number that they may take: inf to keep all graphs,
            0 to keep none.
        held: Tensors that are in memory anyway and do not count towards the budget.
    """

    def __init__(self, limit: Callable[[int], float], held: Iterable[Tensor]) -> None:
        self._limit, self._held = limit, list(held)
        self._largest = 1
        self.kept = 0  # number of bytes that graphs take now

    def run(self, forward: Callable[[], Tensor], held: Iterable[Tensor] = ()) -> Tensor:
        """Return the result of `forward`, with its graph if that fits into the budget.

        Args:
            forward: Forward pass. It is called once.
            held: Further tensors that do not count towards the budget.
        """
        room = self._limit(self.kept) - self.kept
        if room < self._largest:
            with torch.no_grad():
                return forward()
        if math.isinf(room):
            with torch.enable_grad():
                return forward()
        with torch.enable_grad(), GraphSize([*self._held, *held]) as graph:
            result = forward()
        self._largest = max(self._largest, graph.bytes)
        if graph.bytes > room:
            return result.detach()
        self.kept += graph.bytes
        return result

    @property
    def exceeded(self) -> bool:
        """Whether graphs take more memory than the current limit."""
        return self.kept > self._limit(self.kept)


def return_freed_memory(device: torch.device) -> None:
    """Return memory that the process has freed but not returned to the system, so that other processes can use it.

    The next allocations need new pages, which takes time, so do not call this in every step.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def reuse_freed_memory() -> None:
    """Configure the allocator to keep freed memory in the process, which speeds up training on a CPU.

    By default, glibc returns freed blocks of several MB to the system, which has to map and clear new pages for the
    next allocation. On a CPU this takes as long as the arithmetic on them. The setting affects the whole process, so
    call this function from an application, such as the command line, and not from a library. Without glibc, it does
    nothing.
    """
    mmap_threshold, trim_threshold, never = -3, -1, 2**31 - 1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    largest_in_older_glibc = 2**25
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(mmap_threshold, never) or mallopt(mmap_threshold, largest_in_older_glibc)
            mallopt(trim_threshold, never)
