"""Train on Omniglot from random weights with a large batch, where RS@k alone has no gradient, with each remedy.

    python benchmarks/from_random_weights.py DATA                          # 6 epochs each, with one seed
    python benchmarks/from_random_weights.py DATA --only "batch 256" "rank temperature auto"

The recipe is `omniglot`, with the settings of each case below. The same command resumes an interrupted run, and only
records the result of a finished one. The table is printed and written to results/from_random_weights.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

from shortlist.batches.memory import reuse_freed_memory
from shortlist.files import write_text_atomically
from shortlist.progress import display_for
from shortlist.recipes import open_recipe
from shortlist.training import RunFolder, resume_run, train_run

RESULTS = Path(__file__).parent / "results" / "from_random_weights.json"
LARGE = "batch.size=1928"  # 4 images of half of the classes
AUTO = "loss.rank_temperature=auto"
CASES = {
    "batch 256": (),
    "batch 1928": (LARGE,),
    "rank temperature auto": (LARGE, AUTO),
    "rank temperature from 500": (LARGE, "loss.start.rank_temperature=500"),
    "auto, linear tail": (LARGE, AUTO, "loss.tail={}"),
    "calibration": (LARGE, "loss.plus=[{name: calibration, weight: 1}]"),
    "proxies": (
        LARGE,
        "loss.plus=[{name: pml.NormalizedSoftmaxLoss, weight: 0.1}]",
        "optimizer.parts.loss={lr_multiplier: 10, weight_decay: 0}",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of Omniglot")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), metavar="CASE", help="; ".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("runs/from-random-weights"))
    options = parser.parse_args()
    reuse_freed_memory()  # as the command line does
    display = display_for(sys.stdout)
    for name in options.only:
        path = options.out / f"{options.epochs}-epochs" / name.replace(", ", "-").replace(" ", "-")
        settings = [f"data.root={options.data}", f"training.epochs={options.epochs}", *CASES[name]]
        started = RunFolder(path).config_file.exists()
        folder = resume_run(path, display) if started else train_run(open_recipe("omniglot", settings), path, display)
        record(name, folder, options.epochs)
    show()


def record(name: str, folder: RunFolder, epochs: int) -> None:
    steps = [each for each in folder.metrics() if each["kind"] == "step"]
    values = json.loads(folder.evaluation_file.read_text(encoding="utf-8"))[0]["metrics"]
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"cases": {}}
    known |= {
        "command": f"python benchmarks/from_random_weights.py DATA --epochs {epochs}",
        "torch": torch.__version__,
        "processor": platform.machine(),
    }
    known["cases"][name] = {
        "settings": CASES[name],
        "epochs": epochs,
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "steps_without_gradient": sum(each["gradient_norm"] == 0 for each in steps),
        "r@1": values["r@1"]["value"],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    write_text_atomically(RESULTS, json.dumps(known, indent=1) + "\n")


def show() -> None:
    for name, case in json.loads(RESULTS.read_text(encoding="utf-8"))["cases"].items():
        losses = f"loss {case['first_loss']:.4f} -> {case['last_loss']:.4f}"
        print(f"{name:28}{case['steps']:5} steps, {losses}, r@1 {100 * case['r@1']:.1f} %")


if __name__ == "__main__":
    main()
