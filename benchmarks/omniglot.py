"""The paper's study of batch sizes, on Omniglot, with a small network on a CPU.

    python benchmarks/omniglot.py DATA [--out STUDY] [--seeds 3]

RS@k has no gradient where every positive stands far behind its k (a batch of thousands before any training), so, as the
paper starts from ImageNet, this starts from a network that has learned glyphs, whose characters are not Omniglot's. It
is trained first, in a minute. Then `shortlist ablate batch-size omniglot`. A study that was stopped goes on with the
same command, and two processes may work on it. Results and plot go into results/omniglot-batch-size.{json,png}.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

from shortlist.recipes import open_recipe
from shortlist.report.ablation import draw, read_results, table
from shortlist.training import RunFolder, ablate, resume, train
from shortlist.training.display import display_for
from shortlist.training.folder import write_atomically

RESULTS = Path(__file__).parent / "results"
VALUES = ("16", "64", "256", "1024", "3856")
GLYPHS = ("name=omniglot-start", "data.source=glyphs", "data.root=null", "batch.size=100", "batch.chunk_size=100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="Omniglot's folder")
    parser.add_argument("--out", type=Path, default=Path("ablations/omniglot"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    display = display_for(sys.stdout)
    start = RunFolder(options.out / "start")
    if not start.config_file.exists():
        train(open_recipe("omniglot", [*GLYPHS, "training.epochs=30"]), start.path, display)
    elif not start.evaluation_file.exists():
        resume(start.path, display)
    config = open_recipe("omniglot", [f"data.root={options.data}", f"model.weights={start.path}"])
    study = options.out / "batch-size"
    results = read_results(ablate("batch-size", config, study, values=VALUES, seeds=options.seeds, display=display))
    header, rows = table(results)
    for row in (header, *rows):
        print("  ".join(f"{cell:>14}" for cell in row))
    results["config"]["data"]["root"], results["config"]["model"]["weights"] = "DATA", "STUDY/start"
    facts = {
        "command": "python benchmarks/omniglot.py DATA",
        "torch": torch.__version__,
        "processor": platform.machine(),
        "threads a run": config.training.threads,
    }
    RESULTS.mkdir(exist_ok=True)
    write_atomically(RESULTS / "omniglot-batch-size.json", json.dumps({**facts, **results}, indent=1) + "\n")
    draw(results, RESULTS / "omniglot-batch-size.png")


if __name__ == "__main__":
    main()
