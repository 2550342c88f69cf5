"""Repeat the paper's study of batch sizes on Omniglot, with a small network on a CPU.

    python benchmarks/omniglot.py DATA                                                  # 6 epochs, three seeds
    python benchmarks/omniglot.py DATA --epochs 24 --values "64 256 1024 3856" --seeds 1

RS@k has no gradient if every positive is ranked far behind k, as in a batch of thousands before any training. The paper
starts from ImageNet weights; this study starts from a network that was trained on glyphs, whose characters are not in
Omniglot. It is trained first, which takes a minute. Then the script runs `shortlist ablate batch-size omniglot`. The
same command resumes an interrupted study, and two processes may work on it at the same time. The results and the plot
are written to results/omniglot-EPOCHS-epochs.{json,png}.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

from shortlist.batches.memory import reuse_freed_memory
from shortlist.progress import Display, display_for
from shortlist.recipes import open_recipe
from shortlist.report.study_results import draw, read_results, table
from shortlist.training import RunFolder, ablate, resume_run, train_run
from shortlist.training.folder import write_text_atomically

RESULTS = Path(__file__).parent / "results"
GLYPHS = ("data.source=glyphs", "data.root=null", "batch.size=100", "batch.chunk_size=100", "training.epochs=30")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of Omniglot")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--values", default="16 64 256 1024 3856", help="batch sizes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("ablations/omniglot"))
    options = parser.parse_args()
    reuse_freed_memory()  # as the command line does
    display = display_for(sys.stdout)
    start = options.out / "start"
    train_on_glyphs(start, display)
    settings = [f"data.root={options.data}", f"model.weights={start}", f"training.epochs={options.epochs}"]
    file = ablate(
        "batch-size",
        open_recipe("omniglot", settings),
        options.out / f"{options.epochs}-epochs",
        values=options.values.split(),
        seeds=options.seeds,
        display=display,
    )
    write_down(read_results(file), f"omniglot-{options.epochs}-epochs", options)


def train_on_glyphs(folder: Path, display: Display | None = None) -> None:
    """Train the network that studies of Omniglot start from, or resume its training, unless it is done."""
    run, display = RunFolder(folder), display or Display()
    if not run.config_file.exists():
        train_run(open_recipe("omniglot", GLYPHS), folder, display)
    elif not run.evaluation_file.exists():
        resume_run(folder, display)


def write_down(results: dict[str, object], name: str, options: argparse.Namespace) -> None:
    for row in table(results)[0], *table(results)[1]:
        print("  ".join(f"{cell:>14}" for cell in row))
    config = json.loads(json.dumps(results["config"]))
    config["data"]["root"], config["model"]["weights"] = "DATA", "the network that learned glyphs"
    command = f"python benchmarks/omniglot.py DATA --epochs {options.epochs} --values '{options.values}'"
    facts = {
        "command": f"{command} --seeds {options.seeds}",
        "torch": torch.__version__,
        "processor": platform.machine(),
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**facts, **results, "config": config}, indent=1)
    write_text_atomically(RESULTS / f"{name}.json", text + "\n")
    draw(results, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
