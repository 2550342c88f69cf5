"""Run the experiments of docs/results/PLAN.md. Every result is written immediately, and the next call resumes.

    python benchmarks/evidence.py frozen --data DATA --work FOLDER        the frozen backbone on Cars196
    python benchmarks/evidence.py finetune --data DATA --work FOLDER      all weights, on Cars196
    python benchmarks/evidence.py omniglot --data DATA --work FOLDER      Omniglot, from random weights and from glyphs
    python benchmarks/evidence.py remedies-frozen --data DATA --work FOLDER       remedies, after `frozen`
    python benchmarks/evidence.py remedies-omniglot --data DATA --work FOLDER     remedies, after `omniglot`

DATA is the folder of Cars196 or Omniglot. FOLDER holds cached views, the network that was trained on glyphs, and
unfinished runs. First, every cell of the study chooses its learning rate on validation classes; then it is trained on
all training classes with every seed and tested once. Remedies are compared on validation classes only. Results are
appended to STUDY.jsonl in the folder of results, one line per run: the settings, the phase ("validation" or "test"),
and r@1 after the last step; for tests, also all metrics and, in `finetune`, r@1 of the training images. `make results`
turns them into docs/results.md. To repeat recorded runs, choose another folder with `--results`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "evidence"
PLAIN_K = "[1, 2, 4, 8, 16]"
SIMIX_K = "[1, 2, 4, 8, 12, 16, 20, 24, 28, 32]"
PROXIES = "optimizer.parts.loss={lr_multiplier: 100, weight_decay: 0}"
OTHER_LOSSES = {
    "Multi-Similarity": (
        "loss.name=pml.MultiSimilarityLoss",
        "loss.args={alpha: 2, beta: 50, base: 0.5}",
        "loss.miner={name: MultiSimilarityMiner, args: {epsilon: 0.1}}",
    ),
    "Proxy-Anchor": ("loss.name=pml.ProxyAnchorLoss", PROXIES),
    "normalised softmax": ("loss.name=pml.NormalizedSoftmaxLoss", "loss.args={temperature: 0.05}", PROXIES),
    "SupCon": ("loss.name=pml.SupConLoss",),
    "FastAP": ("loss.name=pml.FastAPLoss", "loss.args={num_bins: 10}"),
    "contrastive with memory": (
        "loss.name=pml.ContrastiveLoss",
        "loss.args={pos_margin: 1, neg_margin: 0.5, distance: CosineSimilarity}",
        "loss.memory={size: 4000}",
    ),
}
METHODS = {
    "RS@k": ("loss.name=recall_at_k", "loss.simix=false"),
    "RS@k + SiMix": ("loss.name=recall_at_k", "loss.simix=true"),
    "SAP": ("loss.name=smooth_ap", "loss.simix=false"),
    "SAP + SiMix": ("loss.name=smooth_ap", "loss.simix=true"),
}


@dataclass(frozen=True)
class Cell:
    """A method under a budget. Its learning rate is its own, or that of another cell."""

    name: str
    steps: int
    settings: tuple[str, ...]
    rate_of: str | None = None  # name of the cell whose learning rate is used


@dataclass(frozen=True)
class Job:
    """One run of a cell."""

    study: str
    cell: Cell
    phase: str  # "validation" or "test"
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.cell.name}, lr {self.rate:g}, seed {self.seed}, {self.phase}"


IMAGES, STEPS = 120_000, 1_000  # budgets of part 1
TEMPERATURES = (0.1, 0.3, 3, 5)  # rank temperatures other than 1
K_SETS = ([1], [1, 2], [1, 2, 4], [1, 2, 4, 8], [16])  # other than PLAIN_K


def equal_images() -> Iterator[Cell]:
    """Yield the grid of part 1 of the plan, for the same number of images."""
    yield from _grid("images", lambda batch: IMAGES // batch)


def equal_steps() -> Iterator[Cell]:
    """Yield the grid of part 1, for the same number of steps."""
    yield from _grid("steps", lambda _: STEPS)


def _grid(budget: str, steps: Callable[[int], int]) -> Iterator[Cell]:
    for batch, method in product((392, 64, 16), METHODS):
        yield Cell(f"{method}, batch {batch}, equal {budget}", steps(batch), (f"batch.size={batch}", *METHODS[method]))


def variations() -> Iterator[Cell]:
    """Yield RS@k at batch 392 with one setting changed, and the learning rate of the grid."""
    plain, mixed = (f"{method}, batch 392, equal images" for method in ("RS@k", "RS@k + SiMix"))

    def variation(name: str, *settings: str, of: str = plain) -> Cell:
        return Cell(name, IMAGES // 392, ("batch.size=392", *METHODS[of.partition(",")[0]], *settings), rate_of=of)

    yield variation("RS@k, K of SiMix", f"loss.k={SIMIX_K}")
    yield variation("RS@k + SiMix, K without SiMix", f"loss.k={PLAIN_K}", of=mixed)
    yield variation("RS@k, query counted", "loss.count_query=true")
    for temperature in TEMPERATURES:
        yield variation(f"RS@k, rank temperature {temperature}", f"loss.rank_temperature={temperature}")
    for k in K_SETS:
        yield variation(f"RS@k, K {k}", f"loss.k={k}")


def other_losses() -> Iterator[Cell]:
    """Yield the losses of pytorch-metric-learning."""
    for (name, settings), batch in product(OTHER_LOSSES.items(), (392, 64)):
        yield Cell(f"{name}, batch {batch}", IMAGES // batch, (f"batch.size={batch}", "loss.simix=false", *settings))


# The best of the other losses in part 1, and three of METHODS.
FINETUNED = ("RS@k", "RS@k + SiMix", "SAP", "Multi-Similarity")
FINETUNED_STEPS = 210


def finetune_cells() -> Iterator[Cell]:
    """Yield the cells of part 2 of the plan."""
    for name in FINETUNED:
        yield Cell(name, FINETUNED_STEPS, METHODS.get(name) or ("loss.simix=false", *OTHER_LOSSES[name]))


def omniglot_cells() -> Iterator[Cell]:
    """Yield the cells of part 3 of the plan."""
    for batch, method in product((16, 64, 256, 1024), ("RS@k", "RS@k + SiMix")):
        settings = (f"batch.size={batch}", *METHODS[method])
        own = f"{method}, batch {batch}, random weights"
        yield Cell(own, 900, settings)
        yield Cell(f"{method}, batch {batch}, from glyphs", 900, (*settings, "model.weights=GLYPHS"), rate_of=own)


REMEDIES = {
    "none": (),
    "rank_temperature: auto": ("loss.rank_temperature=auto",),
    "start: rank_temperature 500": ("loss.start={rank_temperature: 500}",),
    "rank_temperature: auto, tail": ("loss.rank_temperature=auto", "loss.tail={}"),
    "plus: calibration": ("loss.plus=[{name: calibration, weight: 1}]",),
    "plus: normalised softmax": (
        "loss.plus=[{name: pml.NormalizedSoftmaxLoss, weight: 0.1, args: {temperature: 0.05}}]",
        PROXIES,
    ),
    "SiMix": ("loss.simix=true",),
}
REMOVED_REMEDIES = (  # measured, then removed from the library; the table of docs/results.md shows them
    "start: similarity_temperature 0.1",
    "start: k_factor 8",
    "memory",
    "SiMix, simix_alphas 2",
    "SiMix, simix_negatives 1",
)


def remedies(batch: int, steps: int, like: str) -> Iterator[Cell]:
    """Yield the cells of part 4 of the plan, with the learning rate of the cell `like`."""
    for name, settings in REMEDIES.items():
        yield Cell(name, steps, (f"batch.size={batch}", *METHODS["RS@k"], *settings), rate_of=like)


@dataclass(frozen=True)
class Study:
    """A part of the plan.

    Args:
        recipe: Recipe of all runs.
        blocks: Functions that yield cells. A block is finished before the next one begins.
        rates: Learning rates to choose from.
        seeds: Number of seeds of the tests.
        settings: Function of the number of steps and the number of steps per epoch that returns settings of all runs.
        workers: Runs at a time; the cores are divided among them.
        rate_steps: Share of the steps that runs which choose a learning rate take.
        validates: Whether cells are compared on validation classes and not tested.
        after: Study that chooses the learning rates of the cells of this one.
    """

    recipe: str
    blocks: tuple[Callable[[], Iterator[Cell]], ...]
    rates: tuple[float, ...]
    seeds: int
    settings: Callable[[int, int], tuple[str, ...]] = lambda steps, per_epoch: ()
    workers: int = 2
    rate_steps: float = 1.0
    validates: bool = False
    after: str | None = None

    @property
    def frozen(self) -> bool:
        return self.recipe.endswith("frozen")


def like_the_release(steps: int, per_epoch: int) -> tuple[str, ...]:
    """Return the schedule of the release (decays after 80 and 140 of 170 epochs of 14 steps) for fewer steps.

    The images and the batch do not follow the recipe, which is tuned for a single method.
    """
    milestones = [round(steps / per_epoch * epoch / 170) for epoch in (80, 140)]
    return (
        f"schedule={{name: multistep, gamma: 0.3, milestones: {milestones}}}",
        "images={size: 112, test_size: null, resize: 128, scale: [0.2, 1.0]}",
        "batch={size: 392, per_class: 4, chunk_size: 56, keep_graphs: 8}",  # 8 GB: two runs at a time
        "training.ema=null",
    )


STUDIES = {
    "frozen": Study(
        "cars196-lite0-frozen", (equal_images, variations, other_losses, equal_steps), (1e-5, 3e-5, 1e-4, 3e-4, 1e-3), 5
    ),
    "finetune": Study(
        "cars196-lite0-cpu", (finetune_cells,), (5e-5, 1e-4, 2e-4, 5e-4), 3, like_the_release, rate_steps=8 / 21
    ),
    "omniglot": Study("omniglot", (omniglot_cells,), (3e-4, 1e-3, 3e-3), 3, rate_steps=1 / 3),
    "remedies-frozen": Study(
        "cars196-lite0-frozen",
        (lambda: remedies(392, IMAGES // 392, "RS@k, batch 392, equal images"),),
        (),
        3,
        validates=True,
        after="frozen",
    ),
    "remedies-omniglot": Study(
        "omniglot",
        (lambda: remedies(1024, 300, "RS@k, batch 1024, random weights"),),
        (),
        3,
        validates=True,
        after="omniglot",
    ),
}


# ------------------------------------------------------------------------------------------------------------ running


def results(study: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the runs of a study that are done."""
    file = folder / f"{study}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--work", type=Path, required=True, help="folder for cached views and unfinished runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results [benchmarks/results/evidence]")
    options = parser.parse_args()
    study = STUDIES[options.study]
    if study.after and not results(study.after, options.results):
        raise SystemExit(f"{options.results} has no results of {study.after}, which chooses the learning rates.")
    os.environ["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // study.workers, 1))  # of the workers
    with ProcessPoolExecutor(study.workers, mp_context=get_context("spawn")) as pool:
        Runner(options.study, options.data.resolve(), options.work.resolve(), options.results, pool).run()


class Runner:
    """Runs the jobs of a study that have no result yet."""

    def __init__(self, name: str, data: Path, work: Path, folder: Path, pool: ProcessPoolExecutor) -> None:
        self.name, self.study, self.data, self.work, self.pool = name, STUDIES[name], data, work, pool
        self.folder, self.file, self.started = folder, folder / f"{name}.jsonl", time.monotonic()
        self.done = {each["key"]: each for each in results(name, folder)}

    def run(self) -> None:
        rates = {
            each["cell"]["name"]: each["rate"]
            for each in (results(self.study.after, self.folder) if self.study.after else [])
            if each["phase"] == "test"
        }
        phase = "validation" if self.study.validates else "test"
        for block in self.study.blocks:
            cells = list(block())
            own = [cell for cell in cells if cell.rate_of is None]
            self.measure([Job(self.name, cell, "validation", rate, 0) for cell in own for rate in self.study.rates])
            rates |= {cell.name: self.best_rate(cell) for cell in own}
            self.measure(
                [
                    Job(self.name, cell, phase, rates[cell.rate_of or cell.name], seed)
                    for seed in range(self.study.seeds)
                    for cell in cells
                ]
            )
        print(f"{self.file} has all runs of the study. To repeat them, choose another folder with --results.")

    def best_rate(self, cell: Cell) -> float:
        def validated(rate: float) -> float:
            return float(self.done[Job(self.name, cell, "validation", rate, 0).key]["r@1"])

        return max(self.study.rates, key=validated)

    def measure(self, jobs: list[Job]) -> None:
        """Run the jobs that have no result. With a frozen backbone, the first one, which encodes views, runs alone."""
        jobs = [job for job in jobs if job.key not in self.done]
        if jobs and self.name == "omniglot":
            from omniglot import train_on_glyphs

            train_on_glyphs(self.work / "glyphs")
        alone = int(self.study.frozen)
        for part in (jobs[:alone], jobs[alone:]):
            running = {self.pool.submit(train, job, self.data, self.work): job for job in part}
            for future in as_completed(running):
                self.record(running[future], future.result())

    def record(self, job: Job, found: dict[str, Any]) -> None:
        result = self.done[job.key] = {"key": job.key, **asdict(job), **found}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(result) + "\n")
        minutes = (time.monotonic() - self.started) / 60
        result_text = f"{100 * found['r@1']:.2f} ({found['seconds']:.0f} s)"
        print(f"{minutes:6.1f} min, {len(self.done)} runs: {job}: {result_text}", flush=True)


def train(job: Job, data: Path, work: Path) -> dict[str, Any]:
    """Train one run, or resume it, and return its results."""
    from shortlist import runs
    from shortlist.batches.memory import reuse_freed_memory
    from shortlist.progress import Display
    from shortlist.training import RunFolder

    reuse_freed_memory()  # as the command line does
    study, validation = STUDIES[job.study], job.phase == "validation"
    folder, started = work / "runs" / job.key, time.perf_counter()
    if (folder / "config.yaml").exists():
        run = runs.resume(folder, report=False, display=Display())
    else:
        steps = round(job.cell.steps * study.rate_steps) if validation else job.cell.steps
        settings = [setting.replace("GLYPHS", str(work / "glyphs")) for setting in job.cell.settings]
        run = runs.train(
            study.recipe,
            *study.settings(steps, 16 if validation else 14),  # on Cars196, with 49 and 98 classes
            *settings,
            f"optimizer.lr={job.rate}",
            f"data.root={data}",
            "data.on_missing=skip",
            *([f"data.view_cache={work / 'views'}"] if study.frozen else []),
            f"data.validation={'half' if validation else 'none'}",
            f"data.withhold_test={validation}",
            "training.epochs=null",
            f"training.steps={steps}",
            f"training.seed={job.seed}",
            f"training.validate_every_steps={steps}",
            "training.validate_every=1",
            "evaluation.before=false",
            "tracking=[]",
            output=folder,
            report=False,
            display=Display(),
        )
    records = RunFolder.open(folder).metrics()
    if validation:
        found: dict[str, Any] = {"r@1": [each for each in records if each["kind"] == "validation"][-1]["r@1"]}
    else:
        found = {"r@1": run.metrics["r@1"], "test": run.evaluations[0].to_dict()}
    if job.study == "finetune" and not validation:
        found["training r@1"] = training_recall(folder, data)
    losses = [each["loss"] for each in records if each["kind"] == "step"]
    shutil.rmtree(folder)
    return {**found, "seconds": time.perf_counter() - started, "last_loss": losses[-1]}


def training_recall(run: Path, data: Path) -> float:
    """Return r@1 of the training images of Cars196 among themselves, without augmentation, which shows overfitting."""
    import torch

    from shortlist import Encoder, retrieval_metrics
    from shortlist.data import open_catalog

    catalog = open_catalog("cars196", root=data, on_missing="skip").split("train")
    vectors = Encoder.from_run(run).encode([catalog.file(index) for index in range(len(catalog))])
    return float(retrieval_metrics(vectors, torch.tensor(catalog.labels), k=[1])["r@1"])


if __name__ == "__main__":
    main()
