"""Train a recipe, and record its results.

    python benchmarks/recipe.py cars196-lite0-cpu data.root=DATA data.on_missing=skip

The run is in runs/benchmark-RECIPE. An interrupted run is resumed, and a finished one is only recorded. The results and
the command are written to results/RECIPE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path

from shortlist.batches.memory import reuse_freed_memory
from shortlist.progress import display_for
from shortlist.recipes import open_recipe
from shortlist.training import RunFolder, resume_run, train_run
from shortlist.training.folder import write_text_atomically

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--run", type=Path, help="folder of the run")
    options = parser.parse_args()
    reuse_freed_memory()  # as the command line does
    path = options.run or Path("runs") / f"benchmark-{options.recipe}"
    display = display_for(sys.stdout)
    config = open_recipe(options.recipe, options.settings)
    folder = resume_run(path, display) if RunFolder(path).config_file.exists() else train_run(config, path, display)
    write_text_atomically(
        RESULTS / f"{options.recipe}.json", json.dumps(result(folder, options.settings), indent=2) + "\n"
    )


def result(folder: RunFolder, settings: list[str]) -> dict[str, object]:
    config = folder.config()
    steps = [record for record in folder.metrics() if record["kind"] == "step"]
    epochs = sorted({record["epoch"] for record in steps})
    facts = json.loads(folder.facts_file.read_text(encoding="utf-8"))
    public = [setting if not setting.startswith("data.root=") else "data.root=DATA" for setting in settings]
    return {
        "command": " ".join(["python benchmarks/recipe.py", config.name, *public]),
        "config": {**config.model_dump(mode="json"), "data": {**config.data.model_dump(mode="json"), "root": "DATA"}},
        "catalog": facts["catalog"],
        "versions": facts["versions"],
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "steps": len(steps),
        "images_per_second": {
            "median": statistics.median(record["images_per_second"] for record in steps),
            "best": max(record["images_per_second"] for record in steps),
        },
        "loss_by_epoch": [
            statistics.mean(record["loss"] for record in steps if record["epoch"] == epoch) for epoch in epochs
        ],
        "before": json.loads(folder.before_file.read_text(encoding="utf-8")),
        "after": json.loads(folder.evaluation_file.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    main()
