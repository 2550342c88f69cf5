"""Run the experiments of docs/results/PLAN.md. Every result is written immediately, and the next call resumes.

    python benchmarks/evidence.py frozen --data DATA --work FOLDER        the frozen backbone on Cars196

DATA is the folder of Cars196. FOLDER holds the cached views, and unfinished runs. First, every cell of the
study chooses its learning rate on validation classes; then it is trained on all training classes with every seed and
tested once. Runs take one thread each, two at a time. Results are appended to results/evidence/STUDY.jsonl, one line
per run: the settings, the phase ("validation" or "test"), and r@1 after the last step; for tests, also all metrics.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

RESULTS = Path(__file__).parent / "results" / "evidence"
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
SEEDS = range(5)
IMAGES, STEPS = 240_000, 1_500  # budgets: images seen, or steps
BATCHES = (16, 64, 392)
SAME_K = {  # K crossed with SiMix
    "plain K": "[1, 2, 4, 8, 16]",
    "SiMix K": "[1, 2, 4, 8, 12, 16, 20, 24, 28, 32]",
}
OTHER_LOSSES = {
    "Multi-Similarity": (
        "loss.name=pml.MultiSimilarityLoss",
        "loss.args={alpha: 2, beta: 50, base: 0.5}",
        "loss.miner={name: MultiSimilarityMiner, args: {epsilon: 0.1}}",
    ),
    "Proxy-Anchor": ("loss.name=pml.ProxyAnchorLoss", "optimizer.parts.loss={lr_multiplier: 100, weight_decay: 0}"),
    "normalised softmax": (
        "loss.name=pml.NormalizedSoftmaxLoss",
        "loss.args={temperature: 0.05}",
        "optimizer.parts.loss={lr_multiplier: 100, weight_decay: 0}",
    ),
    "SupCon": ("loss.name=pml.SupConLoss",),
    "FastAP": ("loss.name=pml.FastAPLoss", "loss.args={num_bins: 10}"),
    "contrastive with memory": (
        "loss.name=pml.ContrastiveLoss",
        "loss.args={pos_margin: 1, neg_margin: 0.5, distance: CosineSimilarity}",
        "loss.memory={size: 4000}",
    ),
}


@dataclass(frozen=True)
class Cell:
    """A method under a budget. Its learning rate is its own, or that of another cell."""

    name: str
    batch: int
    steps: int
    settings: tuple[str, ...]
    rate_of: str | None = None  # name of the cell whose learning rate is used


@dataclass(frozen=True)
class Job:
    """One run of a cell."""

    cell: Cell
    phase: str  # "validation" or "test"
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def frozen_cells() -> Iterator[Cell]:
    """Yield the cells of part 1 of the plan, those first whose learning rates others use."""
    for budget, loss, simix, batch in product(
        ("images", "steps"), ("recall_at_k", "smooth_ap"), (False, True), BATCHES
    ):
        steps = IMAGES // batch if budget == "images" else STEPS
        name = f"{loss}{' + SiMix' if simix else ''}, batch {batch}, equal {budget}"
        yield Cell(name, batch, steps, (f"loss.name={loss}", f"loss.simix={simix}"))
    steps, base = IMAGES // 392, "recall_at_k, batch 392, equal images"
    for simix, (label, k) in product((False, True), SAME_K.items()):
        with_simix = " + SiMix" if simix else ""
        source = f"recall_at_k{with_simix}, batch 392, equal images"
        yield Cell(f"{label}{with_simix}", 392, steps, (f"loss.k={k}", f"loss.simix={simix}"), source)
    yield Cell("query counted", 392, steps, ("loss.count_query=true",), base)
    for temperature in (0.1, 0.3, 3, 5):
        yield Cell(f"rank temperature {temperature}", 392, steps, (f"loss.rank_temperature={temperature}",), base)
    for k in ([1], [1, 2], [1, 2, 4], [1, 2, 4, 8], [16]):
        yield Cell(f"k {k}", 392, steps, (f"loss.k={k}",), base)
    for (name, settings), batch in product(OTHER_LOSSES.items(), (64, 392)):
        yield Cell(f"{name}, batch {batch}", batch, IMAGES // batch, ("loss.simix=false", *settings))


STUDIES = {"frozen": ("cars196-lite0-frozen", frozen_cells)}


# ------------------------------------------------------------------------------------------------------------ running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--work", type=Path, required=True, help="folder for cached views and unfinished runs")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(train(options.study, options.data, options.work, options.job)))
        return
    study = Study(options.study, options.data, options.work)
    study.run(options.workers)


class Study:
    """Jobs of a study and their results."""

    def __init__(self, name: str, data: Path, work: Path) -> None:
        self.name, self.data, self.work = name, data, work
        self.file, self.lock, self.started = RESULTS / f"{name}.jsonl", Lock(), time.monotonic()
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done: dict[str, dict[str, Any]] = {each["key"]: each for each in map(json.loads, lines)}

    def run(self, workers: int) -> None:
        cells = list(STUDIES[self.name][1]())
        with ThreadPoolExecutor(workers) as pool:
            choices = [Job(cell, "validation", rate, 0) for cell in cells if cell.rate_of is None for rate in RATES]
            for job in choices[:1]:
                self.measure(job)  # encodes the views, which the other runs then share
            list(pool.map(self.measure, choices))
            by_name = {cell.name: cell for cell in cells}
            tests = [
                Job(cell, "test", self.best_rate(by_name[cell.rate_of or cell.name]), seed)
                for seed in SEEDS
                for cell in cells
            ]
            for job in tests[:1]:
                self.measure(job)
            list(pool.map(self.measure, tests))

    def best_rate(self, cell: Cell) -> float:
        return max(RATES, key=lambda rate: float(self.done[Job(cell, "validation", rate, 0).key]["r@1"]))

    def measure(self, job: Job) -> None:
        """Run a job in a process of its own, unless its result exists."""
        if job.key in self.done:
            return
        command = [sys.executable, __file__, self.name, "--data", str(self.data), "--work", str(self.work)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        found = subprocess.run(
            [*command, "--job", json.dumps(asdict(job))],
            env={**os.environ, **threads},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result = {"key": job.key, **asdict(job), **json.loads(found.stdout.splitlines()[-1])}
        with self.lock:
            self.done[job.key] = result
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps(result) + "\n")
            minutes = (time.monotonic() - self.started) / 60
            what = f"{job.cell.name}, lr {job.rate:g}, seed {job.seed}, {job.phase}"
            print(f"{minutes:6.1f} min, {len(self.done):4} runs: {what}: {100 * result['r@1']:.2f}", flush=True)


def train(study: str, data: Path, work: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Train one run, or resume it, and return its results."""
    from shortlist import runs
    from shortlist.training import RunFolder

    cell, validation = job["cell"], job["phase"] == "validation"
    key = Job(**{**job, "cell": Cell(**{**cell, "settings": tuple(cell["settings"])})}).key
    folder = work / "runs" / key
    started = time.perf_counter()
    if (folder / "config.yaml").exists():
        run = runs.resume(folder, report=False)
    else:
        run = runs.train(
            STUDIES[study][0],
            *cell["settings"],
            f"batch.size={cell['batch']}",
            f"optimizer.lr={job['rate']}",
            f"data.root={data}",
            "data.on_missing=skip",
            f"data.view_cache={work / 'views'}",
            f"data.validation={'half' if validation else 'none'}",
            f"data.withhold_test={validation}",
            "training.epochs=null",
            f"training.steps={cell['steps']}",
            f"training.seed={job['seed']}",
            f"training.validate_every_steps={cell['steps']}",
            f"training.checkpoint_every={cell['steps']}",
            "training.validate_every=1",
            "evaluation.before=false",
            "tracking=[]",
            output=folder,
            report=False,
        )
    records = RunFolder.open(folder).metrics()
    seconds = time.perf_counter() - started
    if validation:
        last = [record for record in records if record["kind"] == "validation"][-1]
        found = {"r@1": last["r@1"]}
    else:
        evaluation = run.evaluations[0]
        found = {"r@1": run.metrics["r@1"], "test": evaluation.to_dict()}
    steps = [record for record in records if record["kind"] == "step"]
    shutil.rmtree(folder)
    return {**found, "seconds": seconds, "last_loss": steps[-1]["loss"]}


if __name__ == "__main__":
    main()
