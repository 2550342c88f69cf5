"""Communication between processes that train a model or embed images together.

`Processes` implements a single process and defines the interface for several, so that callers are the same for any
number of processes.

Processes never wait for one that has failed. Each exchange of tensors is preceded by an exchange of *status words*,
which all have the same format: a process that fails sends its status word immediately, whatever the others are about
to exchange, and all processes raise its error. Status words are sent over gloo, which detects immediately that a
process has ended, and tensors over the backend of their device. Ctrl-C is deferred to the end of an exchange, so that
the other processes are not left waiting.
"""

from __future__ import annotations

import io
import pickle
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from shortlist.digests import tensors_digest
from shortlist.errors import ModelError, RunError, in_all_processes
from shortlist.ranking.sharing import Sharing
from shortlist.seeds import derived_seed

NUMBERS = 4  # integers in a status word, besides the status
HEARTBEAT = 10.0  # seconds between the status words of a main process that the others wait for
Result = TypeVar("Result")


class ProcessLostError(RunError):
    """A process that this one works with has ended or cannot be reached."""


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer signals, such as SIGINT from Ctrl-C, to the end of the block. Also works as a decorator."""
    arrived: list[tuple[int, Any]] = []
    in_main = threading.current_thread() is threading.main_thread()  # Python handles signals only there
    handlers: dict[int, Any] = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM) if in_main}
    try:
        with ExitStack() as stack:
            for each, handler in handlers.items():
                if callable(handler):
                    stack.callback(signal.signal, each, handler)
                    signal.signal(each, lambda *args: arrived.append(args))
            yield
    finally:
        for number, frame in arrived:
            handlers[number](number, frame)


class Processes:
    """A single process, and the interface for several processes that train a model together."""

    rank = 0
    number = 1
    on_this_machine = 1  # number of processes that share the CPU and its memory

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints messages."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error that one process raises inside the `with` block in all processes.

        The others raise it when they next exchange something, at the latest at the end of the block.
        """
        yield

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """Return the numbers (up to `NUMBERS` integers of 64 bits) of each process."""
        return [numbers]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Call a function in the main process, for as long as it takes, and return its result in all processes.

        The function may call `on_main` again, and let the other processes take part with `all_working`.
        """
        return work()

    @contextmanager
    def all_working(self, job: Callable[[Processes], object]) -> Iterator[Processes]:
        """Let the other processes call `job` during the `with` block, inside a function that `on_main` calls.

        An error in one process is raised in the main process. A job with a model is sent with its weights.

        Args:
            job: Function of the processes. It is pickled.

        Yields:
            The processes that work on the job: only this one if the others are not waiting for it, or if the job
            cannot be pickled.
        """
        yield self

    def broadcast(self, value: Result) -> Result:
        """Return the value of the main process. It is pickled."""
        return value

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of the main process by name; the other processes receive copies on the CPU."""
        return tensors

    def copy_from_main(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the values of tensors by those of the main process, and verify that they are the same."""

    def verify_same(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise a RunError if a tensor does not have the same bits in all processes."""

    def gather_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the rows of all processes.

        Args:
            rows: Rows of this process, of shape (sizes[rank], d).
            sizes: Number of rows of each process.
        """
        return rows

    def sum_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Replace the gradient of each tensor by its sum over all processes; None counts as 0, unless all are None."""

    def share_queries(self, batch: Tensor, sizes: Sequence[int]) -> Sharing:
        """Return the division of a batch's queries among the processes.

        Args:
            batch: Embeddings of the whole batch.
            sizes: Number of consecutive rows of it that each process backpropagates.
        """
        return Sharing()


class SeveralProcesses(Processes):
    """One of several processes of `torch.distributed`.

    Args:
        group: Their process group. Default: all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group or dist.group.WORLD
        self.rank, self.number = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._ranks = dist.get_process_group_ranks(self._group)
        self._raised_by_all: int | None = None  # id of the last error; a reference would keep its tensors in memory
        self._leads, self._exchanging = False, threading.Lock()  # used by the main process in `on_main`
        self._words: Any = self._group
        if "cpu:gloo" not in str(dist.get_backend_config(self._group)):
            self._words = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)
        machine = derived_seed("machine", socket.gethostname())
        self.on_this_machine = self.gather(machine).count((machine,))

    @contextmanager
    def together(self) -> Iterator[None]:
        error: BaseException | None = None
        self._raised_by_all = None
        try:
            yield
        except BaseException as raised:
            if isinstance(raised, ProcessLostError) or id(raised) == self._raised_by_all:
                raise
            error = raised
        try:
            self._agree(error)
        finally:
            del error  # its traceback refers to this frame, and to tensors that should be freed

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        return [tuple(word[1 : 1 + len(numbers)]) for word in self._agree(None, numbers)]

    def _agree(self, error: BaseException | None, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Exchange status words until no process is working, and raise the most severe error of all processes."""
        waiting = True
        received: Any = None
        while waiting:
            with _uninterrupted():
                words = self._exchange(_status_of(error), numbers)
                statuses = [word[0] for word in words]
                waiting = statuses[0] in (_Status.WORKING, _Status.CALLING)
                source = 0 if waiting else statuses.index(max(statuses))
                if statuses[source] not in (_Status.READY, _Status.WORKING):
                    received = self._broadcast_object(_portable(error) if self.rank == source else None, source)
            if statuses[0] == _Status.CALLING:
                self._answer(received)
        if max(statuses) == _Status.READY:
            return words
        raised: BaseException = received if error is None or self.rank != source else error
        self._raised_by_all = id(raised)
        try:
            raise in_all_processes(raised)
        finally:
            del error, received, raised

    def _exchange(self, status: int, numbers: Sequence[int] = ()) -> list[list[int]]:
        word = torch.tensor([status, *numbers, *[0] * (NUMBERS - len(numbers))])
        words = [torch.empty_like(word) for _ in range(self.number)]
        with _lost_process_reported():
            dist.all_gather(words, word, group=self._words)
        return [each.tolist() for each in words]

    def on_main(self, work: Callable[[], Result]) -> Result:
        if self._leads:
            return work()
        result: Any = None
        with self.together():
            if self.is_main:
                with self._heartbeat():
                    result = work()
        received: Result = self.broadcast(result)
        return received

    @contextmanager
    def all_working(self, job: Callable[[Processes], object]) -> Iterator[Processes]:
        packed = _pack(job) if self._leads else None
        if packed is None:
            yield ALONE
            return
        try:
            with self._exchanging, self.together():
                with _uninterrupted():
                    self._exchange(_Status.CALLING)
                    self._broadcast_object(packed, 0)
                yield self
        finally:
            self._raised_by_all = None  # the others wait again: an error that ends `on_main` is new to them

    def _answer(self, packed: bytes) -> None:
        """Run a job that the main process has sent. Errors are raised and handled in the main process."""
        try:
            with self.together():
                _unpack(packed)(self)
        except ProcessLostError:
            raise
        except BaseException:
            self._raised_by_all = None

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Tell the other processes regularly that this one is working, so that their exchange does not time out."""
        done = threading.Event()

        def beat() -> None:
            with suppress(ProcessLostError):  # the next exchange raises it again
                while not done.wait(HEARTBEAT):
                    with self._exchanging:
                        self._exchange(_Status.WORKING)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        self._leads = True
        try:
            yield
        finally:
            with _uninterrupted():
                self._leads = False
                done.set()
                thread.join()

    @contextmanager
    def _tensors_exchanged(self) -> Iterator[None]:
        """Exchange tensors in the `with` block, once all processes are ready."""
        with _uninterrupted():
            self._agree(None)
            with _lost_process_reported():
                yield

    @_uninterrupted()
    def broadcast(self, value: Result) -> Result:
        pickled = b""
        with self.together():
            if self.is_main:
                pickled = pickle.dumps(value)
        received: Result = pickle.loads(self._broadcast_object(pickled, 0))
        return value if self.is_main else received

    def _broadcast_object(self, value: Any, source: int) -> Any:
        box = [value]
        with _lost_process_reported():
            dist.broadcast_object_list(box, self._ranks[source], self._words, device=torch.device("cpu"))
        return box[0]

    @_uninterrupted()
    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        own = {name: each.detach().cpu().contiguous() for name, each in tensors.items()} if self.is_main else {}
        layout = self.broadcast({name: (each.shape, each.dtype) for name, each in own.items()})
        result = own or {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
        for tensor in result.values():
            if tensor.numel():
                with _lost_process_reported():
                    dist.broadcast(tensor.view(-1).view(torch.uint8), self._ranks[0], self._words)
        return tensors if self.is_main else result

    def copy_from_main(self, tensors: Mapping[str, Tensor]) -> None:
        received = self.broadcast_tensors(tensors)
        with self.together(), torch.no_grad():
            for name, tensor in tensors.items():
                if name not in received or received[name].shape != tensor.shape:
                    raise ModelError(f"{name} is missing or has a different shape in process 0: use the same model.")
                if not self.is_main:
                    tensor.copy_(received[name])
        self.verify_same(tensors)

    def verify_same(self, tensors: Mapping[str, Tensor]) -> None:
        digests = {name: tensors_digest({name: each}) for name, each in tensors.items()}
        expected = self.broadcast(digests)
        with self.together():
            names = [name for name in expected.keys() | digests.keys() if expected.get(name) != digests.get(name)]
            if names:
                raise RunError(
                    f"The weights or state of process {self.rank} differ from those of process 0 in {len(names)} "
                    f"tensors, such as {min(names)}. Model and loss must give the same result in all processes: they "
                    "must not depend on the process, on the time, or on random numbers other than those of torch."
                )

    def gather_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        most = max(sizes)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = rows.new_empty(self.number, *padded.shape)
        group = self._group if rows.is_cuda else self._words
        with self._tensors_exchanged():
            if most:
                dist.all_gather_into_tensor(gathered.flatten(0, 1), padded, group=group)
        return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])

    def sum_rows(self, matrix: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum a matrix over all processes, and return the rows of this process (a reduce-scatter).

        Older versions of torch do not support reduce-scatter with gloo. An all-to-all transfers the same number of
        bytes, and sums in a fixed order.

        Args:
            matrix: Matrix of shape (sum(sizes), d).
            sizes: Number of rows of each process.
        """
        own = sizes[self.rank]
        matrix, received = matrix.contiguous(), matrix.new_empty(self.number * own, *matrix.shape[1:])
        with self._tensors_exchanged():
            dist.all_to_all_single(received, matrix, [own] * self.number, [*sizes], group=self._group)
        return received.view(self.number, own, *matrix.shape[1:]).sum(0)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place, and return it."""
        with self._tensors_exchanged():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def sum_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Sum all gradients by a single all-reduce (one per dtype and device)."""
        by_kind = sorted(tensors, key=_kind)
        for _, group in groupby(by_kind, key=_kind):
            same = list(group)
            exists = same[0].new_tensor([float(each.grad is not None) for each in same])
            gradients = [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in same]
            total = self.sum(torch.cat([exists, *gradients]))
            del gradients
            exists, *gradients = torch.split(total, [len(same), *(each.numel() for each in same)])
            for each, exist, gradient in zip(same, exists.tolist(), gradients, strict=True):
                if exist:
                    each.grad = torch.empty_like(each) if each.grad is None else each.grad
                    each.grad.copy_(gradient.view(each.shape))

    def share_queries(self, batch: Tensor, sizes: Sequence[int]) -> Sharing:
        return _SharedQueries(self, batch, sizes)


class _SharedQueries(Sharing):
    """Queries assigned to the processes round-robin, so that all have queries with few and with many positives."""

    def __init__(self, processes: SeveralProcesses, batch: Tensor, sizes: Sequence[int]) -> None:
        self._processes, self._batch, self._sizes = processes, batch, sizes
        self.queries = slice(processes.rank, None, processes.number)

    def sum(self, compute: Callable[[], Tensor]) -> Tensor:
        return self._processes.sum(compute())

    def sum_gradient(self, gradient: Tensor, embeddings: Tensor) -> Tensor:
        if embeddings is not self._batch:  # computed from the batch, so all rows may be needed
            return self._processes.sum(gradient)
        start = sum(self._sizes[: self._processes.rank])
        result = torch.zeros_like(gradient)
        result[start : start + self._sizes[self._processes.rank]] = self._processes.sum_rows(gradient, self._sizes)
        return result

    def concatenate(self, values: Tensor) -> Tensor:
        sizes = [size for (size,) in self._processes.gather(len(values))]
        return self._processes.gather_rows(values, sizes)


ALONE = Processes()


def current_processes() -> Processes:
    """Return the processes of the default process group; this process alone if there is none."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return _all_processes(dist.group.WORLD)


@lru_cache(maxsize=1)  # constructing it is an exchange
def _all_processes(group: dist.ProcessGroup) -> SeveralProcesses:
    return SeveralProcesses(group)


class _Status(IntEnum):
    """State of a process. If several processes fail, all raise the error with the largest number."""

    READY = 0
    WORKING = 1  # only the main process, in `on_main`
    CALLING = 2  # only the main process, when it sends a job to the others
    OUT_OF_MEMORY = 3
    FAILED = 4
    INTERRUPTED = 5


def _status_of(error: BaseException | None) -> _Status:
    if error is None:
        return _Status.READY
    if isinstance(error, KeyboardInterrupt):
        return _Status.INTERRUPTED
    return _Status.OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError | MemoryError) else _Status.FAILED


def _portable(error: BaseException | None) -> BaseException | None:
    """Return a copy of an error that can be pickled, with the same message, and its traceback as a note."""
    if error is None:
        return None
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        kind = MemoryError if _status_of(error) == _Status.OUT_OF_MEMORY else RunError
        copy = kind(f"{type(error).__name__}: {error}")
    copy.add_note("".join(["In another process:\n", *traceback.format_exception(error)]))
    return copy


def _pack(job: Callable[[Processes], object]) -> bytes | None:
    """Return a job as bytes; None, with a warning, if it cannot be pickled."""
    stream = io.BytesIO()
    try:
        torch.save(job, stream, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        warnings.warn(
            f"The other processes cannot help, because the model or the images cannot be pickled: {error}", stacklevel=2
        )
        return None
    return stream.getvalue()


def _unpack(packed: bytes) -> Callable[[Processes], object]:
    """Return a job whose tensors are on the device of this process."""

    def to_own_device(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.cuda()

    job: Callable[[Processes], object] = torch.load(io.BytesIO(packed), to_own_device, weights_only=False)
    return job


@contextmanager
def _lost_process_reported() -> Iterator[None]:
    """Turn errors of torch.distributed into a ProcessLostError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        problem = str(error).strip().partition("\n")[0]
        raise ProcessLostError(
            "One of the processes has ended or can no longer be reached. Look for an error message of that process; "
            f"if there is none, it was probably killed, often because memory ran out. ({problem})"
        ) from error


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"
