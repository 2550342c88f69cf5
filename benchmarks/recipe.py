"""Train a recipe with several seeds, and record its results.

    python benchmarks/recipe.py cars196-lite0-cpu data.root=DATA data.on_missing=skip --seeds 3 --results FOLDER

The runs are in runs/benchmark-RECIPE/SEED. Their results are appended to RECIPE.json in the folder of results as soon
as they finish. An interrupted run is resumed. Seeds that the file already has are not trained again, so the seeds can
be trained on several machines, one after another; to repeat recorded runs, choose another folder. With `--workers 2`,
two runs at a time have half of the cores each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shortlist.batches.memory import reuse_freed_memory
from shortlist.files import write_text_atomically
from shortlist.progress import Display, display_for
from shortlist.recipes import open_recipe
from shortlist.training import RunFolder, resume_run, train_run

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs, with seeds from 0")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; the cores are divided among them")
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results [benchmarks/results]")
    options = parser.parse_args()
    facts = shared_facts(options.recipe, options.settings)
    file = options.results / f"{options.recipe}.json"
    if file.exists() and not facts.items() <= read(file).items():
        raise SystemExit(f"{file} has results of other settings. Choose another folder with --results.")
    found = read(file)["runs"] if file.exists() else []
    seeds = sorted({*range(options.seeds)} - {run["seed"] for run in found})
    if not seeds:
        raise SystemExit(f"{file} already has these runs. To repeat them, choose another folder with --results.")
    folder = options.runs or Path("runs") / f"benchmark-{options.recipe}"
    cores = max((os.cpu_count() or 1) // options.workers, 1)
    os.environ["OMP_NUM_THREADS"] = str(cores)  # of the workers
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        alone = options.workers == 1
        futures = [pool.submit(train, options.recipe, options.settings, seed, folder, alone) for seed in seeds]
        for future in as_completed(futures):
            found.append({**future.result(), "cores": cores})
            found.sort(key=lambda run: run["seed"])
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, json.dumps({**facts, "runs": found}, indent=2) + "\n")


def train(recipe: str, settings: list[str], seed: int, folder: Path, progress: bool) -> dict[str, Any]:
    """Train one run, or resume it, and return its results."""
    reuse_freed_memory()  # as the command line does
    display = display_for(sys.stdout) if progress else Display()
    path, config = folder / str(seed), open_recipe(recipe, [*settings, f"training.seed={seed}"])
    if not RunFolder(path).config_file.exists():
        return result(train_run(config, path, display))
    if RunFolder(path).config() == config:
        return result(resume_run(path, display))
    raise SystemExit(f"{path} has a run with other settings: remove it, or set --runs.")


def shared_facts(recipe: str, settings: list[str]) -> dict[str, Any]:
    """Return what the runs have in common, without the folder of the images and without earlier results."""
    public = [setting if not setting.startswith("data.root=") else "data.root=DATA" for setting in settings]
    return {
        "command": " ".join(["python benchmarks/recipe.py", recipe, *public]),
        "config": open_recipe(recipe, public).model_dump(mode="json", exclude={"about", "measured"}),
    }


def result(folder: RunFolder) -> dict[str, Any]:
    steps = [record for record in folder.metrics() if record["kind"] == "step"]
    epochs = sorted({record["epoch"] for record in steps})
    config, facts = folder.config(), read(folder.facts_file)
    return {
        "seed": config.training.seed,
        "catalog": facts["catalog"],
        "versions": facts["versions"],
        "processor": platform.machine(),
        "steps": len(steps),
        "training_minutes": sum(config.batch.size / record["images_per_second"] for record in steps) / 60,
        "images_per_second": {
            "median": statistics.median(record["images_per_second"] for record in steps),
            "best": max(record["images_per_second"] for record in steps),
        },
        "loss_by_epoch": [
            statistics.mean(record["loss"] for record in steps if record["epoch"] == epoch) for epoch in epochs
        ],
        "before": read(folder.before_file) if folder.before_file.exists() else None,
        "after": read(folder.evaluation_file),
    }


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
