"""Measure the steps per minute of a head on a frozen backbone: Cars196, EfficientNet-Lite0, 16 cached views.

    python benchmarks/frozen_speed.py DATA --cache FOLDER            five minutes after the views are encoded
    python benchmarks/frozen_speed.py DATA --cache FOLDER --quick    one case; nothing is written

Two runs of the recipe differ only in their number of steps. The difference between their durations is the time of the
additional steps as a user experiences it, including reading the cached views. The results are written to
results/frozen-speed.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from shortlist.batches.memory import reuse_freed_memory
from shortlist.files import write_text_atomically
from shortlist.progress import Display
from shortlist.recipes import open_recipe
from shortlist.training import train_run

RESULTS = Path(__file__).parent / "results" / "frozen-speed.json"
BATCHES, REPEATS = (16, 64, 196), 3  # 196: 4 images of each of the 49 classes that train
FEW, SECONDS = 50, 8  # steps of the shorter run, and about how much longer the other run takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of Cars196")
    parser.add_argument("--cache", type=Path, required=True, help="folder for encoded views")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    reuse_freed_memory()  # as the command line does
    results = []
    for batch, simix in [(64, True)] if options.quick else product(BATCHES, (False, True)):
        steps = 200 if options.quick else max(200, int(SECONDS * 10_000 / (batch + 100)))
        rates = []
        for _ in range(1 if options.quick else REPEATS):
            short, long = (duration(options, batch, simix, FEW + further) for further in (0, steps))
            rates.append(60 * steps / (long - short))
        results.append({"batch": batch, "simix": simix, "steps": steps, "steps_per_minute": rates})
        print(f"batch {batch}, SiMix {simix}: {statistics.median(rates):,.0f} steps per minute", flush=True)
    if not options.quick:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads()}
        write_text_atomically(RESULTS, json.dumps({**facts, "results": results}, indent=1) + "\n")


def duration(options: argparse.Namespace, batch: int, simix: bool, steps: int) -> float:
    settings = {
        "data.root": options.root,
        "data.on_missing": "skip",
        "data.view_cache": options.cache.absolute(),
        "data.validation": "half",
        "data.withhold_test": "true",
        "batch.size": batch,
        "loss.simix": simix,
        "training.epochs": "null",
        "training.steps": steps,
        "training.validate_every": 1,
        "training.validate_every_steps": steps,
        "tracking": "[]",
    }
    config = open_recipe("cars196-lite0-frozen", [f"{key}={value}" for key, value in settings.items()])
    with tempfile.TemporaryDirectory() as path:
        started = time.perf_counter()
        train_run(config, Path(path) / "run", Display())
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
