"""Measure what the processes that share a batch send, and how work and memory are divided among them.

    python benchmarks/distributed.py             all cases: about 10 minutes on 2 cores
    python benchmarks/distributed.py --quick     small batches, to test the script; nothing is written

All processes run on the CPU of one machine, with one thread each, and communicate over gloo.

*Bytes* are counted by the loopback interface, over several steps of a linear model, and compared with the expected
number: each process sends its part of the embeddings to all others, the gradients of the embeddings likewise, and its
part of the gradients of the model twice (a ring all-reduce). The measurement includes packet headers and other traffic
on the interface.

*Work* is the CPU time of the loss in each process, from all embeddings to the gradient, which does not depend on the
number of cores. With as many cores as processes, it is the time of the loss without the exchange of tensors.

*Memory* is the peak in a step of EfficientNet-Lite0, above the memory before the step, of the process with the
highest peak.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import normalize

from shortlist import LargeBatchStep, RecallAtKLoss, SiMix
from shortlist.distributed import current_processes
from shortlist.model import Embedder

RESULTS = Path(__file__).parent / "results" / "distributed.json"
DIMENSIONS = 512


@dataclass(frozen=True)
class Case:
    measure: str  # "bytes", "work" or "memory"
    processes: int
    batch: int
    simix: bool = False


def cases(quick: bool) -> list[Case]:
    sizes = (256, 512) if quick else (1024, 4096)
    memory_sizes = (64, 128) if quick else (256, 1024)
    return [
        *(Case("bytes", processes, batch) for batch in sizes for processes in (2, 4)),
        *(Case("work", processes, sizes[-1], simix) for simix in (False, True) for processes in (1, 2, 4)),
        *(Case("memory", processes, batch) for batch in memory_sizes for processes in (1, 2, 4)),
    ]


# --------------------------------------------------------------------------------------------------- in each process


def counted_bytes(case: Case, parameters: int) -> float:
    """The number of bytes that all processes send in a step, in tensors."""
    embeddings = 4 * case.batch * DIMENSIONS
    return (case.processes - 1) * (2 * embeddings + 2 * 4 * parameters)


def measure_bytes(case: Case) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, DIMENSIONS), _Unit())
    step = LargeBatchStep(model, RecallAtKLoss(), chunk_size=64, keep_graphs=True)
    images, labels = torch.randn(case.batch, 64), torch.arange(case.batch) // 4
    step(images, labels)
    sent, steps = [], 5
    for _ in range(steps):
        dist.barrier()
        before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        dist.barrier()
        step(images, labels)
        dist.barrier()
        sent.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before)
    parameters = sum(each.numel() for each in model.parameters())
    return {"sent": statistics.median(sent), "counted": counted_bytes(case, parameters)}


class _Unit(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return normalize(vectors)


def measure_work(case: Case) -> dict[str, Any]:
    centres = torch.randn(case.batch // 4, DIMENSIONS)
    vectors = normalize(centres.repeat_interleave(4, 0) + 2 * torch.randn(case.batch, DIMENSIONS))
    labels = torch.arange(case.batch) // 4
    k = (1, 2, 4, *range(8, 33, 4)) if case.simix else (1, 2, 4, 8, 16)
    seconds: list[float] = []

    class Timed(RecallAtKLoss):
        def forward(self, *args: Any) -> torch.Tensor:
            started = time.thread_time()
            loss = super().forward(*args)
            seconds.append(time.thread_time() - started)
            return loss

    loss = Timed(k, simix=SiMix() if case.simix else None)
    step = LargeBatchStep(nn.Identity(), loss, chunk_size=64)
    for _ in range(4):
        step(vectors, labels)
    return {"seconds": statistics.median(seconds[1:])}


def measure_memory(case: Case) -> dict[str, Any]:
    model = Embedder("tf_efficientnet_lite0", dim=DIMENSIONS, image_size=112)
    step = LargeBatchStep(model, RecallAtKLoss(), chunk_size=16, keep_graphs=False)
    warm_up = 16 * case.processes  # a chunk for each process
    step(_pixels(step, warm_up), torch.arange(warm_up) // 4)
    model.zero_grad()
    ctypes.CDLL(None).malloc_trim(0)
    idle = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    step(_pixels(step, case.batch), torch.arange(case.batch) // 4)
    return {"megabytes": max(current_processes().gather(_status("VmHWM") - idle))[0] / 2**20}


def _pixels(step: LargeBatchStep, number: int) -> Any:
    return (torch.randint(256, (len(part), 3, 112, 112), dtype=torch.uint8) for part in step.parts(range(number)))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


MEASURES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "bytes": measure_bytes,
    "work": measure_work,
    "memory": measure_memory,
}


def member(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=case.processes)
    torch.manual_seed(0)
    results = MEASURES[case.measure](case)
    if current_processes().is_main:
        (Path(folder) / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------- all cases


def run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(member, (case, folder), nprocs=case.processes, start_method="fork")
        return json.loads((Path(folder) / "result.json").read_text())


def show(case: Case, result: dict[str, Any]) -> None:
    where = f"{case.measure:6} {case.processes} processes, batch {case.batch}{' + SiMix' if case.simix else ''}: "
    if case.measure == "bytes":
        sent, counted = result["sent"] / 2**20, result["counted"] / 2**20
        print(f"{where}{sent:8.2f} MB sent, {counted:8.2f} MB counted, {sent / counted:.3f} x", flush=True)
    elif case.measure == "work":
        print(f"{where}{result['seconds']:8.3f} s of CPU time", flush=True)
    else:
        print(f"{where}{result['megabytes']:8.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    results = []
    for case in cases(quick):
        result = run(case)
        show(case, result)
        results.append({**asdict(case), **result})
    if not quick:
        where = {"torch": torch.__version__, "machine": platform.machine(), "cores": psutil.cpu_count()}
        RESULTS.write_text(json.dumps({**where, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
