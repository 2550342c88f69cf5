"""Try settings of a Cars196 recipe on validation classes, and evaluate them with test images of several sizes.

    python benchmarks/tuning.py SETTING... --data DATA --work FOLDER

The recipe is trained with the settings on the first half of the training classes and evaluated on the second half; the
test classes are not read. r@1 for each size of the images is appended to tuning.jsonl in the folder of results. An
interrupted trial is resumed. To repeat a recorded trial, choose another folder. docs/results.md has the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from shortlist import Encoder, retrieval_metrics, runs
from shortlist.batches.memory import reuse_freed_memory
from shortlist.data import open_catalog
from shortlist.data.splits import half_validation
from shortlist.progress import Display
from shortlist.training import RunFolder

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", help="key=value")
    parser.add_argument("--recipe", default="cars196-lite0-cpu")
    parser.add_argument("--data", type=Path, required=True, help="folder of Cars196")
    parser.add_argument("--work", type=Path, required=True, help="folder for unfinished trials")
    parser.add_argument("--sizes", type=int, nargs="+", default=[112, 160, 192, 224], help="sides of the test images")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results [benchmarks/results]")
    options = parser.parse_args()
    file = options.results / "tuning.jsonl"
    recorded = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if [options.recipe, options.settings] in [[each["recipe"], each["settings"]] for each in recorded]:
        raise SystemExit(f"{file} already has this trial. To repeat it, choose another folder with --results.")
    reuse_freed_memory()  # as the command line does
    key = hashlib.sha256(json.dumps([options.recipe, *options.settings]).encode()).hexdigest()[:16]
    folder, started = options.work / key, time.perf_counter()
    if (folder / "config.yaml").exists():
        runs.resume(folder, report=False, display=Display())
    else:
        runs.train(
            options.recipe,
            f"data.root={options.data}",
            "data.on_missing=skip",
            "data.validation=half",
            "data.withhold_test=true",
            "training.validate_every=1000",  # once, at the end
            "evaluation.before=false",
            "tracking=[]",
            *options.settings,
            output=folder,
            report=False,
            display=Display(),
        )
    seconds = time.perf_counter() - started
    steps = [record for record in RunFolder.open(folder).metrics() if record["kind"] == "step"]
    found = {
        "recipe": options.recipe,
        "settings": options.settings,
        "steps": len(steps),
        "seconds": round(seconds),
        "last_loss": statistics.mean(record["loss"] for record in steps[-20:]),
        "r@1": {size: validation_recall(folder, options.data, size) for size in options.sizes},
    }
    options.results.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(found) + "\n")
    print(json.dumps(found), flush=True)


def validation_recall(run: Path, data: Path, size: int) -> float:
    """Return r@1 of the second half of the training classes, whose shorter sides are resized to `size` pixels."""
    catalog = half_validation(open_catalog("cars196", root=data, on_missing="skip")).split("validation")
    trained = Encoder.from_run(run)
    encoder = Encoder(trained.embedder, replace(trained.transform, size=size, resize=size))
    vectors = encoder.encode([catalog.file(index) for index in range(len(catalog))])
    return float(retrieval_metrics(vectors, torch.tensor(catalog.labels), k=[1])["r@1"])


if __name__ == "__main__":
    main()
