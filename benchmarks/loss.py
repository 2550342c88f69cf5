"""Measure time and memory of the ranking losses, forward and backward, on the CPU.

    python benchmarks/loss.py                    table of three stages of training, then the sweep and the targets
    python benchmarks/loss.py --sweep            only the sweep over many kinds of embeddings, and the targets
    python benchmarks/loss.py --sweep --real FOLDER      include the real embeddings that real_embeddings.py saved there

Times are given as multiples of the *floor*, the three matrix products of batch x batch x dimensions that a plain exact
gradient needs (E E', G E, G' E). A loss and the floor are measured alternately in the same process, so that their ratio
is reliable on a noisy machine, and so are dense autograd and our loss. For the table, every implementation runs in a
separate process, and memory is the peak of the process above its idle state, without the resulting gradient. The sweep
measures time only. Each result is written to results/loss.json or results/loss-sweep.json immediately, and an
interrupted run resumes from there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from alone import run_alone
from embeddings import STAGES, Embeddings, r_at_1
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
LOSSES = ["recall", "recall+simix", "smooth_ap", "smooth_ap+simix"]
K, K_SIMIX = (1, 2, 4, 8, 16), (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
TEMPERATURE = 0.01
MEMORY_LIMIT = 16 * 2**30
REPEATS, SWEEP_REPEATS, MIN_SECONDS = 5, 3, 1.0  # short measurements are repeated for at least MIN_SECONDS
# Reported for the authors' released code on 2 cores.
RELEASE_SECONDS = {("recall", 2000): 20.7, ("recall+simix", 400): 6.5}


@dataclass(frozen=True)
class Case:
    loss: str  # one of LOSSES
    batch: int
    contender: str  # one of CONTENDERS
    embeddings: Embeddings

    @property
    def simix(self) -> bool:
        return self.loss.endswith("+simix")

    @staticmethod
    def read(values: dict[str, Any]) -> Case:
        return Case(**{**values, "embeddings": Embeddings(**values["embeddings"])})


Results = dict[Case, dict[str, Any]]


# ---------------------------------------------------------------------------------------------------- implementations


def floor(vectors: Tensor) -> Callable[[], Any]:
    vectors = vectors.detach()

    def products() -> tuple[Tensor, Tensor]:
        similarities = vectors @ vectors.T
        return similarities @ vectors, similarities.T @ vectors

    return products


def dense(case: Case, vectors: Tensor, labels: Tensor) -> Callable[[], Any]:
    """The paper's equations in plain PyTorch, for the whole batch at once, differentiated by autograd."""
    k = torch.tensor(K_SIMIX if case.simix else K)
    per_class = case.embeddings.per_class

    def loss() -> None:
        items, classes = vectors, labels
        if case.simix:
            pairs = torch.combinations(torch.arange(per_class)) + per_class * torch.arange(
                len(labels) // per_class
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


# ------------------------------------------------------------------------------------------------------- measuring


def measure(case: Case, *, memory: bool) -> dict[str, Any]:
    """Measure the median seconds of a case and of its floor and, if `memory`, the peak memory in a new process."""
    make = CONTENDERS[case.contender]
    small = Embeddings(case.embeddings.per_class, latent=8).make(4 * case.embeddings.per_class)
    for _ in range(2):  # loading libraries, compiling and starting threads belong to the idle state
        make(case, small[0].clone().requires_grad_(), small[1])()
    vectors, labels = case.embeddings.make(case.batch)
    vectors = vectors.clone()
    found = {"r@1": r_at_1(vectors, labels), "items": len(vectors)}
    vectors.requires_grad_()
    run = make(case, vectors, labels)
    limit = _status("VmSize") + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        run()  # compilation for this size belongs to the idle state as well
        if memory:
            vectors.grad = None
            found["megabytes"] = _peak_megabytes(run) - vectors.nbytes / 2**20
        alternately = [run, floor(vectors), ours(case, vectors, labels)]
        if case.contender != "dense":
            alternately.pop()
        for each in alternately[1:]:
            each()
        times: list[list[float]] = []
        start = time.perf_counter()
        while len(times) < (REPEATS if memory else SWEEP_REPEATS) or time.perf_counter() - start < MIN_SECONDS:
            times.append([_seconds(each, vectors) for each in alternately])
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        return {"out_of_memory": True}
    seconds, floor_seconds, *ours_seconds = (statistics.median(each) for each in zip(*times, strict=True))
    if ours_seconds:
        found["ours_times_dense"] = ours_seconds[0] / seconds
    return found | {"seconds": seconds, "floor_seconds": floor_seconds, "times_floor": seconds / floor_seconds}


def _seconds(run: Callable[[], Any], vectors: Tensor) -> float:
    vectors.grad = None
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _peak_megabytes(run: Callable[[], Any]) -> float:
    ctypes.CDLL(None).malloc_trim(0)  # otherwise free memory of the heap would hide a part of the peak
    idle = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    run()
    return (_status("VmHWM") - idle) / 2**20


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# ------------------------------------------------------------------------------------------------------- cases


def table_cases(batches: list[int], losses: list[str], stages: list[str], contenders: list[str]) -> Iterator[Case]:
    for batch, loss, contender in product(batches, losses, contenders):
        if contender != "pml" or loss == "smooth_ap":
            # The time of the other implementations does not depend on the stage.
            for stage in stages if CONTENDERS[contender] is ours else ["trained"]:
                yield Case(loss, batch, contender, STAGES[stage])


def sweep_cases(real: Path | None) -> Iterator[Case]:
    """Yield all kinds of embeddings, with SiMix only those with 4 images per class, as in the paper."""
    grid = product((2, 4, 16, 40), (8, 24, 64, 512), (False, True), (0.05, 0.5, 0.95, 1.0))
    kinds = [Embeddings(*kind) for kind in grid]
    kinds += [Embeddings(per_class, latent=512, shared=False, r_at_1=None) for per_class in (2, 4, 16, 40)]
    for file in sorted(real.glob("*.pt")) if real else ():
        kinds += [Embeddings(per_class, file=file.name) for per_class in (4, 16, 40)]
    for batch in (400, 1000, 4000):
        for kind in kinds:
            if kind.file is not None and len(kind.make(batch)[0]) < 0.9 * batch:
                continue  # there are not enough classes of this size
            for loss in ("recall", "recall+simix") if kind.per_class == 4 else ("recall",):
                yield Case(loss, batch, "eager", kind)
                if kind in (replace(stage, per_class=kind.per_class) for stage in STAGES.values()):
                    yield Case(loss, batch, "dense", kind)  # its time depends on the kind only by subnormal numbers


# -------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    name: str
    loss: str
    batch: int
    times_floor: float
    trained: bool = (
        False  # only trained embeddings with 4 images per class: synthetic ones, or real ones with a high r@1
    )

    def includes(self, case: Case, result: dict[str, Any]) -> bool:
        kind = case.embeddings
        trained = kind.per_class == 4 and result["r@1"] >= 0.9 and (kind.file is not None or kind == STAGES["trained"])
        return case.loss == self.loss and case.batch == self.batch and (trained or not self.trained)


TARGETS = [
    Target("RS@k 4000, every kind", "recall", 4000, 2),
    Target("RS@k 4000, trained", "recall", 4000, 1.25, trained=True),
    Target("RS@k 400, every kind", "recall", 400, 4),
    Target("RS@k + SiMix 4000, trained", "recall+simix", 4000, 5, trained=True),
    Target("RS@k + SiMix 4000, every kind", "recall+simix", 4000, 8),
]


def show_targets(results: Results) -> None:
    """Print the worst case of each target, and the worst ratio of our time to that of dense autograd."""
    ours_results = {case: result for case, result in results.items() if case.contender == "eager"}
    for target in TARGETS:
        measured = {
            case: result["times_floor"] for case, result in ours_results.items() if target.includes(case, result)
        }
        if measured:
            worst = max(measured, key=lambda case: measured[case])
            verdict = "met" if measured[worst] <= target.times_floor else "MISSED"
            times = f"{measured[worst]:6.2f} x floor, target {target.times_floor}"
            print(f"{target.name:32} {times}: {verdict}; {worst.embeddings}")
    ratios = {case: result["ours_times_dense"] for case, result in results.items() if "ours_times_dense" in result}
    if ratios:
        worst = max(ratios, key=lambda case: ratios[case])
        verdict = "met" if ratios[worst] <= 1 else "MISSED"
        where = f"{worst.loss} {worst.batch}, {worst.embeddings}"
        print(f"{'ours / dense autograd':32} {ratios[worst]:6.2f}, target 1: {verdict}; {where}")


# -------------------------------------------------------------------------------------------------- output


def show(case: Case, result: dict[str, Any]) -> None:
    left = f"{case.loss:17} {case.batch:6} {case.contender:9} {case.embeddings!s:60}"
    if "out_of_memory" in result:
        print(f"{left}   out of memory", flush=True)
    else:
        memory = f"{result['megabytes']:8.0f} MB" if "megabytes" in result else ""
        release = RELEASE_SECONDS.get((case.loss, case.batch)) if CONTENDERS[case.contender] is ours else None
        note = f"   {release / result['seconds']:.0f} x as fast as the authors' code" if release and memory else ""
        print(
            f"{left} {result['seconds'] * 1e3:9.1f} ms {result['times_floor']:7.2f} x floor {memory}{note}", flush=True
        )


def load(file: Path) -> Results:
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return {Case.read(row.pop("case")): row for row in rows}


def save(file: Path, results: Results) -> None:
    rows = [{"case": asdict(case)} | result for case, result in results.items()]
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"repeats": REPEATS, "threads": torch.get_num_threads(), "rows": rows}) + "\n")
    unfinished.replace(file)


def run(cases: Iterable[Case], file: Path, again: bool, measure_case: Callable[[Case], dict[str, Any]]) -> Results:
    """Measure each case, except those whose results are in the file already."""
    results = {} if again else load(file)
    for case in cases:
        if case not in results:
            results[case] = measure_case(case)
            save(file, results)
        show(case, results[case])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    batches = [400, 1000, 2000, 4000, 8192, 16384]
    parser.add_argument("--batches", type=int, nargs="+", default=batches, help="batch sizes of the table")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--sweep", "--targets", action="store_true", help="run only the sweep and its targets")
    parser.add_argument("--real", type=Path, help="folder of real embeddings to include in the sweep")
    parser.add_argument("--again", action="store_true", help="repeat measurements whose results exist")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(Case.read(json.loads(options.case)), memory=True)))
        return
    Embeddings.folder = options.real or Path()
    if not options.sweep:
        chosen = table_cases(options.batches, options.losses, options.stages, options.contenders)
        run(chosen, RESULTS / "loss.json", options.again, lambda case: run_alone(__file__, asdict(case)))
    sweep = run(
        sweep_cases(options.real), RESULTS / "loss-sweep.json", options.again, lambda case: measure(case, memory=False)
    )
    show_targets(sweep)


if __name__ == "__main__":
    main()
