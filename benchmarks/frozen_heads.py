"""Compare heads on a frozen backbone, on validation classes: Cars196, EfficientNet-Lite0 at 112 pixels.

    python benchmarks/frozen_heads.py DATA --cache FOLDER            about ten minutes on 2 cores
    python benchmarks/frozen_heads.py DATA --cache FOLDER --quick    two heads and a few steps; nothing is written

Heads are trained on the first half of the training classes and validated on the second half; test images are not
opened. Four views are encoded once, and all runs share them. The results are written to results/frozen-heads.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from shortlist.batches.memory import reuse_freed_memory
from shortlist.files import read_json, write_text_atomically
from shortlist.progress import Display
from shortlist.recipes import open_recipe
from shortlist.training import train_run

RESULTS = Path(__file__).parent / "results" / "frozen-heads.json"
SHOWN = ("best", "last", "steps_per_minute")
FACTS = {
    "recipe": "cars196-lite0-frozen",
    "metric": "r@1 of validation classes in %",
    "torch": torch.__version__,
    "machine": platform.machine(),
}
PCA, PAIRS = ("model.whitening=pca",), ("model.whitening=pairs",)
HEADS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "linear, lr 1e-3": ("optimizer.lr=1e-3",),
    "PCA whitening": PCA,
    "PCA whitening, lr 1e-5": (*PCA, "optimizer.lr=1e-5"),
    "whitening from pairs": PAIRS,
    "residual of PCA whitening": (*PCA, "model.head=residual"),
    "rank 16 on PCA whitening": (*PCA, "model.head=low_rank", "model.head_rank=16"),
    "rank 64 on PCA whitening": (*PCA, "model.head=low_rank", "model.head_rank=64"),
    "residual of the identity, d 1280": ("model.head=residual", "model.dim=1280"),
    "rank 64 on the identity, d 1280": ("model.head=low_rank", "model.head_rank=64", "model.dim=1280"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of Cars196")
    parser.add_argument("--cache", type=Path, required=True, help="folder for encoded views")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    reuse_freed_memory()  # as the command line does
    heads = dict(list(HEADS.items())[:3:2]) if options.quick else HEADS
    steps, seeds = (4, 1) if options.quick else (options.steps, options.seeds)
    command = f"python benchmarks/frozen_heads.py DATA --cache FOLDER --steps {steps} --seeds {seeds}"
    results = {} if options.quick else known_results(command)
    for name, settings in heads.items():
        if name not in results:
            start = trained(options.root, options.cache, 1, 0, (*settings, "optimizer.lr=1e-12"))["last"]
            runs = [trained(options.root, options.cache, steps, seed, settings) for seed in range(seeds)]
            results[name] = {"settings": list(settings), "untrained": start, "runs": runs}
        shown = {key: statistics.mean(run[key] for run in results[name]["runs"]) for key in SHOWN}
        values = {"untrained": results[name]["untrained"], **shown}.items()
        print(name, *(f"{key} {value:.4g}" for key, value in values), sep="\t", flush=True)
        if not options.quick:
            facts = {"command": command, **FACTS, "results": results}
            write_text_atomically(RESULTS, json.dumps(facts, indent=1) + "\n")


def known_results(command: str) -> dict[str, Any]:
    """Return the results that an interrupted call of the same command has written."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return known["results"] if known.get("command") == command else {}


def trained(root: Path, cache: Path, steps: int, seed: int, settings: tuple[str, ...]) -> dict[str, Any]:
    """Train one head, and return r@1 on the validation classes by step, and the speed."""
    general = {
        "data.root": root,
        "data.on_missing": "skip",
        "data.views": 4,
        "data.view_cache": cache.absolute(),
        "data.validation": "half",
        "data.withhold_test": "true",
        "training.epochs": "null",
        "training.steps": steps,
        "training.seed": seed,
        "training.threads": 1,  # the other core decodes images
        "training.validate_every": 1,
        "training.validate_every_steps": max(1, steps // 8),
        "tracking": "[]",
    }
    config = open_recipe("cars196-lite0-frozen", [*(f"{key}={value}" for key, value in general.items()), *settings])
    with tempfile.TemporaryDirectory() as path:
        folder = train_run(config, Path(path) / "run", Display())
        records, size = folder.metrics(), read_json(folder.facts_file)["batch_size"]
    curve = {record["step"]: 100 * record["r@1"] for record in records if record["kind"] == "validation"}
    rate = statistics.median(record["images_per_second"] for record in records if record["kind"] == "step")
    best, last = max(curve.values()), list(curve.values())[-1]
    return {"seed": seed, "best": best, "last": last, "steps_per_minute": 60 * rate / size, "curve": curve}


if __name__ == "__main__":
    main()
