"""Time and memory of the ranking losses: forward and backward, on the CPU.

    python benchmarks/loss.py                    everything: about two hours on 2 cores, goes on where it was stopped
    python benchmarks/loss.py --bars             only the cases that the bars at the end are about
    python benchmarks/loss.py --batches 400 4000 --losses recall --stages trained --again

Every contender runs in a process of its own. There it takes turns with the *floor*, the three matrix products of
batch x batch x dimensions that a plain exact gradient needs (E E', G E, G' E), so that the ratio of the two is fair on
a noisy machine. Memory is the peak of the process above what it holds when idle, without the gradient that is asked
for. Each result goes into results/loss.json as it comes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from alone import run_alone
from embeddings import PER_CLASS, STAGES, embeddings
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "loss.json"
LOSSES = ["recall", "recall+simix", "smooth_ap", "smooth_ap+simix"]
K, K_SIMIX = (1, 2, 4, 8, 16), (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
TEMPERATURE = 0.01
MEMORY_LIMIT = 16 * 2**30
REPEATS = 5
RELEASE_SECONDS = {("recall", 2000): 20.7, ("recall+simix", 400): 6.5}  # the authors' code on 2 cores


@dataclass(frozen=True)
class Case:
    loss: str  # one of LOSSES
    batch: int
    stage: str
    contender: str  # one of CONTENDERS

    @property
    def simix(self) -> bool:
        return self.loss.endswith("+simix")


@dataclass(frozen=True)
class Bar:
    work: str
    cases: tuple[Case, ...]
    times_floor: float
    megabytes: float | None = None


def _bars() -> Iterator[Bar]:
    both = ("eager", "compiled")

    def recall(batch: int, stages: Iterable[str], contenders: Iterable[str]) -> tuple[Case, ...]:
        return tuple(Case("recall", batch, stage, contender) for stage in stages for contender in contenders)

    yield Bar("RS@k 4000, trained, compiled", recall(4000, ["trained"], ["compiled"]), 1.25, 150)
    yield Bar("RS@k 4000, trained, eager", recall(4000, ["trained"], ["eager"]), 2)
    yield Bar("RS@k 4000, half-trained and untrained", recall(4000, ["half-trained", "untrained"], both), 2)
    yield Bar("RS@k 16384", recall(16384, STAGES, ["compiled"]), 1.4, 500)
    yield Bar("Smooth-AP 4000", tuple(Case("smooth_ap", 4000, stage, "compiled") for stage in STAGES), 1.4)
    for stage, times, megabytes in (("trained", 5, 400), ("untrained", 8, None), ("half-trained", 15, None)):
        yield Bar(f"RS@k + SiMix 4000, {stage}", (Case("recall+simix", 4000, stage, "compiled"),), times, megabytes)


BARS = list(_bars())


# ---------------------------------------------------------------------------------------------------- the contenders


def floor(vectors: Tensor) -> Callable[[], Any]:
    vectors = vectors.detach()

    def products() -> tuple[Tensor, Tensor]:
        similarities = vectors @ vectors.T
        return similarities @ vectors, similarities.T @ vectors

    return products


def dense(case: Case, vectors: Tensor, labels: Tensor) -> Callable[[], Any]:
    """The paper's equations in plain PyTorch: everything at once, autograd keeps it."""
    k = torch.tensor(K_SIMIX if case.simix else K)

    def loss() -> None:
        items, classes = vectors, labels
        if case.simix:
            pairs = torch.combinations(torch.arange(PER_CLASS)) + PER_CLASS * torch.arange(
                len(labels) // PER_CLASS
            ).view(-1, 1, 1)
            left, right = pairs.view(-1, 2).unbind(1)
            alphas = torch.rand(len(left), 1)
            items = torch.cat((vectors, alphas * vectors[left] + (1 - alphas) * vectors[right]))
            classes = torch.cat((labels, labels[left]))
        itself = torch.eye(len(items), dtype=torch.bool)
        positive = (classes[:, None] == classes) & ~itself
        count = int(positive[0].sum())
        similarities = (items @ items.T).masked_fill(itself, -torch.inf)
        at = similarities[positive].view(len(items), count)
        ahead = torch.sigmoid((similarities[:, None, :] - at[:, :, None]) / TEMPERATURE)
        rank = 0.5 + ahead.sum(2)
        if case.loss.startswith("recall"):
            inside = torch.sigmoid(k - rank[:, :, None]).sum(1).minimum(k)
            value = 1 - (inside / k.clamp(max=count)).mean()
        else:
            own = positive.nonzero()[:, 1].view(len(items), count)
            among = 0.5 + ahead.gather(2, own[:, None, :].expand(-1, count, -1)).sum(2)
            value = 1 - (among / rank).mean()
        value.backward()

    return loss


def pml(case: Case, vectors: Tensor, labels: Tensor) -> Callable[[], Any]:
    from pytorch_metric_learning.losses import SmoothAPLoss

    loss = SmoothAPLoss(TEMPERATURE)
    return lambda: loss(vectors, labels).backward()


def ours(case: Case, vectors: Tensor, labels: Tensor) -> Callable[[], Any]:
    from shortlist import RecallAtKLoss, SiMix, SmoothAPLoss
    from shortlist.ranking import Engine, RankingLoss

    simix = SiMix() if case.simix else None
    engine = Engine(compile=case.contender == "compiled")
    loss: RankingLoss
    if case.loss.startswith("recall"):
        loss = RecallAtKLoss(K_SIMIX if case.simix else K, simix=simix, engine=engine)
    else:
        loss = SmoothAPLoss(simix=simix, engine=engine)
    return lambda: loss(vectors, labels).backward()


CONTENDERS = {"dense": dense, "pml": pml, "eager": ours, "compiled": ours}


# ---------------------------------------------------------------------------------------------- in a process of its own


def measure(case: Case) -> dict[str, Any]:
    """Median seconds, floor seconds and megabytes of a case; call it in a fresh process."""
    make = CONTENDERS[case.contender]
    small = embeddings(32, "untrained")
    for _ in range(2):  # libraries load, kernels compile, thread pools start: part of the idle process
        make(case, small[0].requires_grad_(), small[1])()
    vectors, labels = embeddings(case.batch, case.stage)
    vectors.requires_grad_()
    run = make(case, vectors, labels)
    limit = _status("VmSize") + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        run()  # what is compiled for this size is part of the idle process, too
        vectors.grad = None
        megabytes = _peak_megabytes(run) - vectors.nbytes / 2**20
        reference = floor(vectors)
        reference()
        pairs = [(_seconds(run, vectors), _seconds(reference, vectors)) for _ in range(REPEATS)]
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        return {"out_of_memory": True}
    times, floors = zip(*pairs, strict=True)
    return {
        "seconds": statistics.median(times),
        "floor_seconds": statistics.median(floors),
        "times_floor": statistics.median(times) / statistics.median(floors),
        "megabytes": megabytes,
    }


def _seconds(run: Callable[[], Any], vectors: Tensor) -> float:
    vectors.grad = None
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _peak_megabytes(run: Callable[[], Any]) -> float:
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back would hide what the run takes
    idle = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    run()
    return (_status("VmHWM") - idle) / 2**20


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# ------------------------------------------------------------------------------------------------------- all of them


def cases(batches: list[int], losses: list[str], stages: list[str], contenders: list[str]) -> Iterator[Case]:
    for batch in batches:
        for loss in losses:
            for contender in contenders:
                if contender != "pml" or loss == "smooth_ap":
                    for stage in stages if CONTENDERS[contender] is ours else ["trained"]:  # others do not depend on it
                        yield Case(loss, batch, stage, contender)


def show(case: Case, result: dict[str, Any]) -> None:
    left = f"{case.loss:17} {case.batch:6} {case.stage:13} {case.contender:9}"
    if "out_of_memory" in result:
        print(f"{left}   out of memory", flush=True)
    else:
        right = f"{result['seconds'] * 1e3:9.1f} ms {result['times_floor']:7.2f} x floor {result['megabytes']:8.0f} MB"
        release = RELEASE_SECONDS.get((case.loss, case.batch)) if CONTENDERS[case.contender] is ours else None
        note = f"   {release / result['seconds']:.0f} x as fast as the authors' release" if release else ""
        print(f"{left} {right}{note}", flush=True)


def show_bars(results: dict[Case, dict[str, Any]]) -> None:
    for bar in BARS:
        measured = [results[case] for case in bar.cases if case in results]
        if measured:
            times = max(result.get("times_floor", math.inf) for result in measured)
            megabytes = max(result.get("megabytes", math.inf) for result in measured)
            kept = times <= bar.times_floor and (bar.megabytes is None or megabytes <= bar.megabytes)
            limit = f"{bar.times_floor} x" + (f", {bar.megabytes} MB" if bar.megabytes else "")
            verdict = "kept" if kept else "MISSED"
            print(f"{bar.work:40} {times:6.2f} x floor {megabytes:6.0f} MB   bar {limit:14} {verdict}")


def load() -> dict[Case, dict[str, Any]]:
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return {Case(**row.pop("case")): row for row in rows}


def save(results: dict[Case, dict[str, Any]]) -> None:
    rows = [{"case": asdict(case)} | result for case, result in results.items()]
    RESULTS.parent.mkdir(exist_ok=True)
    unfinished = RESULTS.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"repeats": REPEATS, "rows": rows}, indent=1) + "\n")
    unfinished.replace(RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[400, 1000, 2000, 4000, 8192, 16384])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--bars", action="store_true", help="only the cases of the bars")
    parser.add_argument("--again", action="store_true", help="measure again what results/loss.json has already")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(Case(**json.loads(arguments.case)))))
        return
    of_bars = [case for bar in BARS for case in bar.cases]
    chosen = cases(arguments.batches, arguments.losses, arguments.stages, arguments.contenders)
    wanted = of_bars if arguments.bars else list(chosen)
    results = load()
    for case in wanted:
        if arguments.again or case not in results:
            results[case] = run_alone(__file__, asdict(case))
            save(results)
        show(case, results[case])
    show_bars(results)


if __name__ == "__main__":
    main()
