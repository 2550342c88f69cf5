"""The work of each of four processes in the tests of several processes, in groups of 1 to 4.

As a script with a rank and a folder as arguments, this file is one of the processes, and saves its results as RANK.pt.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import normalize

from shortlist import RecallAtKLoss, SiMix, SmoothAPLoss, distributed
from shortlist.batches.large_batch import LargeBatchStep
from shortlist.distributed import ProcessLostError, SeveralProcesses
from shortlist.errors import DataError
from shortlist.pytorch_metric_learning import CrossBatchMemory
from shortlist.ranking import BinnedAPLoss, CalibrationLoss, CombinedLoss, MedianRank
from tests.batches.steps import (
    CLASSES,
    DIMENSIONS,
    MODELS,
    TEMPERATURE,
    Proxies,
    conv_net,
    dropping_conv_net,
    make,
    mlp,
    plain_step,
    some_images,
    take_gradients,
)

SIZES = (1, 2, 3, 4)  # of the groups
recall = partial(RecallAtKLoss, (1, 2, 4), 1.0, TEMPERATURE)
wide_recall = partial(RecallAtKLoss, (1, 4, 16, 32), 2.0, TEMPERATURE)


class Projected(nn.Module):
    """A ranking loss of a projection, which is a parameter of the loss: it needs the gradient of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.loss = nn.Parameter(torch.randn(DIMENSIONS, 4)), SmoothAPLoss(TEMPERATURE)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.loss(normalize(embeddings @ self.weight), labels)


class Decayed(nn.Module):
    """A loss that depends on a parameter of the model as well."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.weight = recall(), torch.empty(0)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.loss(embeddings, labels) + 0.1 * self.weight.square().sum()


@dataclass(frozen=True)
class Case:
    loss: Callable[[], nn.Module]
    chunk_size: int
    model: str = "conv with dropout and stochastic depth"
    number: int = 20  # of images
    per_class: int = 4
    steps: int = 1
    keep: bool = False
    images: str = "tensor"  # "list" of several sizes, or "parts"
    sizes: Sequence[int] = (3,)  # of the groups


CASES = {
    "recall": Case(recall, 6, sizes=SIZES),
    "recall, all graphs kept": Case(recall, 6, keep=True),
    "recall, one chunk": Case(recall, 20, sizes=SIZES),
    "recall, chunks of one image": Case(recall, 1, number=7),
    "recall, fewer queries than processes": Case(recall, 1, number=3, per_class=2, sizes=(4,)),
    "recall, sizes that do not divide": Case(recall, 4, number=19, steps=2, sizes=SIZES),
    "recall, parts that are loaded": Case(recall, 3, images="parts"),
    "recall, images of several sizes": Case(recall, 3, "conv", images="list"),
    "smooth ap": Case(partial(SmoothAPLoss, TEMPERATURE), 7, "transformer", sizes=SIZES),
    "median rank": Case(partial(RecallAtKLoss, (1, 2), MedianRank(), TEMPERATURE), 3),
    "simix": Case(partial(wide_recall, simix=SiMix()), 6, number=19, sizes=SIZES),
    "binned ap": Case(BinnedAPLoss, 6),
    "proxies": Case(Proxies, 6),
    "proxy anchor": Case(partial(losses.ProxyAnchorLoss, CLASSES, DIMENSIONS), 7, steps=2, sizes=SIZES),
    "soft triple": Case(partial(losses.SoftTripleLoss, CLASSES, DIMENSIONS), 20),
    "sum": Case(lambda: CombinedLoss(recall(), (Proxies(), 0.5), (CalibrationLoss(), 0.2)), 6),
    "projected": Case(Projected, 6),
    "decayed": Case(Decayed, 6),
    "memory": Case(lambda: CrossBatchMemory(wide_recall(), DIMENSIONS, 45), 6, steps=3, sizes=SIZES),
    "memory of another loss": Case(lambda: CrossBatchMemory(losses.ContrastiveLoss(), DIMENSIONS, 45), 6, steps=3),
}
RANDOM = [name for name, case in CASES.items() if "dropout" in case.model or case.model == "transformer"]


def build(case: Case, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    model, loss = make(MODELS[case.model], seed=seed), make(case.loss, seed=seed + 5)
    if isinstance(loss, Decayed):
        loss.weight = next(model.parameters())
    return model, loss


def batches(case: Case) -> Iterator[tuple[Tensor | list[Tensor], Tensor]]:
    for step in range(case.steps):
        images, labels = (
            some_images(case.number, seed=step),
            (torch.arange(case.number) // case.per_class + step) % CLASSES,
        )
        if case.images == "list":
            yield [image[:, : 8 - number % 2] for number, image in enumerate(images)], labels
        else:
            yield images, labels


def expected(case: Case) -> list[dict[str, Any]]:
    """The results of a plain loop in one process."""
    found = []
    model, loss = build(case)
    torch.manual_seed(3)
    for images, labels in batches(case):
        chunks = images.split(case.chunk_size) if isinstance(images, Tensor) else [each[None] for each in images]
        value, embeddings = plain_step(model, loss, chunks, labels)
        found.append({"loss": value, "embeddings": embeddings, "gradients": take_gradients(model, loss)})
    return found


def shared(case: Case, processes: SeveralProcesses) -> list[dict[str, Any]]:
    """The same results from a group of processes that start with different weights and random numbers."""
    found = []
    model, loss = build(case, seed=10 * processes.rank)
    step = LargeBatchStep(model, loss, case.chunk_size, keep_graphs=case.keep, processes=processes)
    torch.manual_seed(3 + processes.rank)
    for images, labels in batches(case):
        with collectives() as sent:
            out = step(iter(step.parts(images)) if case.images == "parts" else images, labels)
        result = {"loss": out.loss, "embeddings": out.embeddings, "gradients": take_gradients(model, loss)}
        state = [each.clone() for each in loss.state_dict().values() if isinstance(each, Tensor)]
        found.append({**result, "state": state, "counts": (out.chunks, out.kept), "sent": sent})
    return found


@contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """The names and sizes of all exchanges of tensors."""
    sent, real = list[tuple[str, int]](), {}
    arguments = {"all_reduce": 0, "all_gather_into_tensor": 0, "all_to_all_single": 1}

    def noting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            sent.append((name, args[arguments[name]].numel()))
            return real[name](*args, **options)

        return call

    for name in arguments:
        real[name] = getattr(dist, name)
        setattr(dist, name, noting(name))
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


# Failures of one process, here of process 1


class Fails(nn.Module):
    """Fails in one process, for more images than `most` or in its n-th call."""

    def __init__(self, error: BaseException | None, most: int = 99, call: int = 0) -> None:
        super().__init__()
        self.error, self.most, self.call, self.calls = error, most, call, 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if self.error is not None and (len(images) > self.most or self.calls == self.call):
            raise self.error
        return images * 2 if self.error is None and self.calls == self.call else images


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot be sent")

    def __reduce__(self) -> Any:
        raise TypeError


def failing_images(step: LargeBatchStep, error: Exception | None) -> Iterator[Tensor]:
    for part in step.parts(some_images()):
        yield part
        if error is not None:
            raise error


def failures(processes: SeveralProcesses) -> dict[str, tuple[str, str]]:
    """The class and message of the error that each failure of process 1 raises in this process."""
    here, labels = processes.rank == 1, torch.arange(20) // 4
    found: dict[str, tuple[str, str]] = {}
    model = make(conv_net)
    gradient = model[0].weight.grad = torch.ones_like(model[0].weight)

    def fails(name: str, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            found[name] = type(error).__name__, str(error)
        assert model[0].weight.grad is gradient  # as before
        assert (gradient == 1).all()

    def step_of(module: nn.Module, loss: Callable[..., Tensor] = recall()) -> LargeBatchStep:  # noqa: B008
        return LargeBatchStep(nn.Sequential(module, model), loss, 4, keep_graphs=False, processes=processes)

    def bad_loss(vectors: Tensor, labels: Tensor) -> Tensor:
        if here:
            raise ZeroDivisionError("in the loss")
        return recall()(vectors, labels)

    other_proxies = make(Proxies, seed=processes.rank)

    def other_loss(vectors: Tensor, labels: Tensor) -> Tensor:  # is no module, so that no weights are copied
        return other_proxies(vectors, labels)

    def infinite_loss(vectors: Tensor, labels: Tensor) -> Tensor:
        return vectors.sum() * (math.nan if here else 1)

    def bad_head(ranks: Any) -> Tensor:
        raise ZeroDivisionError("in the head")

    head_loss = recall()
    if here:
        head_loss.head_for = lambda batch: type(
            "Head", (), {"__call__": lambda *_: bad_head(_), "reach": lambda *_: 9}
        )()

    plain = step_of(nn.Identity())
    fails("image", lambda: plain(failing_images(plain, DataError("broken.jpg") if here else None), labels))
    fails("model", lambda: step_of(Fails(OSError("disk") if here else None, most=3))(some_images(), labels))
    fails("second pass", lambda: step_of(Fails(None, call=3 if here else 0))(some_images(), labels))
    fails("loss", lambda: step_of(nn.Identity(), bad_loss)(some_images(), labels))
    fails("head", lambda: step_of(nn.Identity(), head_loss)(some_images(), labels))
    fails("statistics", lambda: step_of(nn.BatchNorm2d(3).train(here))(some_images(), labels))
    fails("other loss", lambda: step_of(nn.Identity(), other_loss)(some_images(), labels))
    fails("infinite loss", lambda: step_of(nn.Identity(), infinite_loss)(some_images(), labels))
    fails("interrupt", lambda: step_of(Fails(KeyboardInterrupt() if here else None, call=1))(some_images(), labels))
    fails("unpicklable", lambda: step_of(Fails(Unpicklable() if here else None, call=1))(some_images(), labels))
    fails("labels", lambda: plain(some_images(), labels + 1 if here else labels))
    fails("number", lambda: plain(some_images(19 if here else 20), labels))
    fails("parts", lambda: plain(iter(some_images().split(4)), labels))
    fails("main", lambda: processes.on_main(lambda: 1 / 0))
    fails("weights", lambda: processes.verify_same({"a": torch.ones(2), "b": torch.tensor(float(here))}))
    fails("shape", lambda: processes.copy_from_main({"a": torch.ones(2 + here)}))
    return found


def interrupted(processes: SeveralProcesses) -> list[str]:
    """The errors of steps in which process 1 is interrupted in no exchange, in the first one, in the second one, ..."""
    step = LargeBatchStep(make(mlp), recall(), 8, keep_graphs=False, processes=processes)
    step(some_images(), torch.arange(20) // 4)
    exchange, words, last = processes._exchange, 0, 0

    def counting(*args: Any) -> Any:
        nonlocal words
        words += 1
        result = exchange(*args)
        if processes.rank == 1 and words == last:
            signal.raise_signal(signal.SIGINT)
        return result

    def outcome() -> str:
        nonlocal words
        words = 0
        try:
            step(some_images(), torch.arange(20) // 4)
        except BaseException as error:
            return type(error).__name__
        return ""

    processes._exchange = counting  # type: ignore[method-assign]
    found = [outcome()]
    for last in range(1, words + 1):  # noqa: B007 - `counting` reads it
        found.append(outcome())  # noqa: PERF401
    del processes._exchange
    return found


def out_of_memory(processes: SeveralProcesses) -> dict[str, Any]:
    """A step in which process 1 first runs out of memory."""
    model = make(dropping_conv_net)
    holds = Fails(MemoryError("full") if processes.rank == 1 else None, most=3)
    step = LargeBatchStep(nn.Sequential(holds, model), recall(), 8, processes=processes)
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        out = step(some_images(), torch.arange(20) // 4)
    texts = [str(each.message).partition(",")[0] for each in warned]
    facts = {"warned": texts, "chunks": out.chunks, "chunk_size": step.chunk_size}
    return facts | {"loss": out.loss, "gradients": take_gradients(model)}


def exchanges(processes: SeveralProcesses) -> dict[str, Any]:
    """The results of all other exchanges between processes."""
    rank, words = processes.rank, 0
    exchange = processes._exchange

    def counting(*args: Any) -> Any:
        nonlocal words
        words += 1
        return exchange(*args)

    processes._exchange = counting  # type: ignore[method-assign]
    distributed.HEARTBEAT = 0.01
    done: list[int] = []

    def work() -> str:
        done.append(rank)
        while words < 5:
            time.sleep(0.001)
        return "result"

    waited = processes.on_main(work)
    del processes._exchange
    unused, used = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, dtype=torch.float32))
    double = nn.Parameter(torch.ones(2, dtype=torch.float64))
    used.grad = torch.full((3,), float(rank)) if rank else None
    double.grad = torch.full((2,), 1.0, dtype=torch.float64)
    processes.sum_gradients([unused, used, double])
    rows = torch.full((rank, 2), float(rank))  # none of process 0
    sizes = list(range(processes.number))
    state = {
        "half": torch.full((2,), rank, dtype=torch.bfloat16),
        "none": torch.empty(0),
        "flag": torch.tensor(rank == 0),
    }
    return {
        "gathered": processes.gather(rank, -rank),
        "waited": (waited, done, words),
        "rows": processes.gather_rows(rows, sizes),
        "own rows": processes.sum_rows(torch.arange(sum(sizes)).repeat(2, 1).T * 1.0, sizes),
        "gradients": (unused.grad, used.grad, double.grad),
        "broadcast": (processes.broadcast({"rank": rank}), dict(processes.broadcast_tensors(state))),
        "machine": processes.on_this_machine,
    }


@dataclass(frozen=True)
class Job:
    """Work of all processes for the main process. Process `fails` raises an error."""

    weight: Any
    fails: int = -1

    def __call__(self, processes: distributed.Processes) -> int:
        if processes.rank == self.fails:
            raise DataError(f"process {self.fails}")
        sizes = [1] * processes.number
        return int(processes.gather_rows(torch.tensor([[processes.rank + 1.0]]) * self.weight, sizes).sum())


def jobs(processes: SeveralProcesses) -> dict[str, Any]:
    """Jobs of the main process: one succeeds, some fail, some are not sent to the others."""
    found: dict[str, Any] = {}

    def run(job: Job) -> int:
        with processes.all_working(job) as workers:
            return job(workers)

    def work() -> str:
        found["sum"] = run(Job(torch.tensor(2.0)))
        for rank in range(2):
            try:
                run(Job(1, fails=rank))
            except DataError as error:
                found[f"failure {rank}"] = str(error)
        found["again"] = run(Job(1))
        found["not pickled"] = run(Job(type("Local", (), {"__rmul__": lambda self, other: other})()))
        found["nested"] = processes.on_main(lambda: run(Job(1)))
        return "done"

    found["result"] = processes.on_main(work)
    found["alone"] = run(Job(1))  # nobody waits
    try:
        processes.on_main(lambda: run(Job(1, fails=1)))
    except DataError as error:
        found["raised"] = str(error)
    return found


def lost(rank: int) -> str:
    """The error if the last process ends without a message."""
    if rank == 3:
        os._exit(0)
    try:
        for _ in range(1000):
            distributed.current_processes().gather(rank)
    except ProcessLostError as error:
        return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting, a_minute = f"file://{folder}/meeting", timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=4, timeout=a_minute)
    groups = {size: dist.new_group(range(size), timeout=a_minute) for size in SIZES}
    members = {size: SeveralProcesses(group) for size, group in groups.items() if rank < size}
    found: dict[str, Any] = {
        "steps": {
            (name, size): shared(case, members[size])
            for name, case in CASES.items()
            for size in case.sizes
            if size in members
        }
    }
    if 3 in members:
        found["failures"] = failures(members[3])
        found["interrupted"] = interrupted(members[3])
        found["out of memory"] = out_of_memory(members[3])
        found["exchanges"] = exchanges(members[3])
        found["jobs"] = jobs(members[3])
    default = LargeBatchStep(make(mlp), recall(), 4)
    torch.manual_seed(3)
    found["default group"] = default(some_images(), torch.arange(20) // 4).loss, default.processes.number
    torch.save(found, folder / f"{rank}.pt")
    found["lost"] = lost(rank)
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
