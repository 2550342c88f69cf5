"""Compare the plan of a run (`shortlist plan`) with the run: memory, time per step, and time until the end.

    python benchmarks/plan.py --data FOLDER      all cases: about 12 minutes on 2 cores; resumes an interrupted run
    python benchmarks/plan.py --quick            one small case, to test the script; nothing is written
    python benchmarks/plan.py --table            only write the table to docs/plan.md

FOLDER contains cars196/ and omniglot/; without it, only the recipes that need no downloads run. The recipes are
shortened by the overrides in `CASES`, both for the plan and for the run. Plan and run are separate processes. Memory is
the peak of the training process (VmHWM), without the processes that decode images. Time until the end is that of
`train_run`, which includes opening the images but not the report. Times per step are from metrics.jsonl, without the
first step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from alone import run_alone
from pages import fill

RESULTS = Path(__file__).parent / "results" / "plan.json"
MEMORY, TIME = 0.15, 0.30  # targets: largest relative error
CARS = ("data.root=DATA/cars196", "data.on_missing=skip")
SMALL = (  # images of 112 pixels, in large batches
    "images={size: 112, test_size: null, resize: 128, scale: [0.2, 1.0]}",
    "batch={size: 392, per_class: 4, chunk_size: 56}",
    "loss.simix=false",
)
CASES = {  # recipe and overrides; DATA is the folder of the data sets, and IMAGES a folder of generated images
    "glyphs": ("glyphs", ["training.epochs=10"]),
    "omniglot": ("omniglot", ["data.root=DATA/omniglot", "training.epochs=2"]),
    "cars196-lite0-cpu, 112 pixels, batch 392": (
        "cars196-lite0-cpu",
        [*CARS, *SMALL, "training.epochs=null", "training.steps=12", "evaluation.before=false"],
    ),
    "the same, no graphs kept": (
        "cars196-lite0-cpu",
        [
            *(*CARS, *SMALL, "training.epochs=null", "training.steps=6", "evaluation.before=false"),
            *("batch.keep_graphs=false", "data.withhold_test=true"),
        ],
    ),
    "cars196-lite0-frozen": ("cars196-lite0-frozen", [*CARS, "data.views=2", "training.epochs=20"]),
    "folder": (
        "folder",
        [
            *("data.source=IMAGES", "model.weights=none", "model.freeze_batch_norm=true", "data.validation=none"),
            *("batch.size=48", "training.epochs=null", "training.steps=6", "evaluation.before=false"),
        ],
    ),
}
QUICK = {"glyphs": ("glyphs", ["training.epochs=1", "evaluation.before=false"])}


# ------------------------------------------------------------------------------------------- in a separate process


def plan(recipe: str, settings: list[str]) -> dict[str, Any]:
    """Return the numbers that `shortlist plan` computes."""
    from shortlist.batches.memory import reuse_freed_memory
    from shortlist.progress import Display
    from shortlist.recipes import open_recipe
    from shortlist.threads import threads
    from shortlist.training import find_requirements, make_plan
    from shortlist.training.components import build_embedder
    from shortlist.training.durations import measure_durations

    reuse_freed_memory()
    config = open_recipe(recipe, settings)
    with threads(config.training.threads):
        made, embedder = make_plan(config, Display()), build_embedder(config, weights=False)
        started = time.perf_counter()
        needs = find_requirements(made, embedder)
        traced = time.perf_counter()
        durations = measure_durations(made, embedder, needs)
    return {
        "memory": needs.peak,
        "parts": needs.memory,
        "step": durations.step,
        "until the end": durations.of(made)["until the end"],
        "seconds of tracing": traced - started,
        "seconds of measuring": time.perf_counter() - traced,
    }


def run(recipe: str, settings: list[str]) -> dict[str, Any]:
    """Run a case, and return what it actually takes."""
    from shortlist.batches.memory import reuse_freed_memory
    from shortlist.recipes import open_recipe
    from shortlist.training import RunFolder, train_run

    reuse_freed_memory()
    config = open_recipe(recipe, settings)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        finished: RunFolder = train_run(config, Path(folder) / "run")
        seconds = time.perf_counter() - started
        steps = [each for each in finished.metrics() if each["kind"] == "step"]
        batch = json.loads(finished.facts_file.read_text())["batch_size"]
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "memory": next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")),
        "step": statistics.median(batch / each["images_per_second"] for each in steps[1:]),
        "until the end": seconds,
    }


# ------------------------------------------------------------------------------------------------------- all cases


def write_images(folder: Path, classes: int = 24, images: int = 10, side: int = 400) -> None:
    """Write JPEG files of noisy patterns, in one folder per class."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(classes):
        (folder / f"{number:02}").mkdir()
        pattern = random.integers(0, 256, (8, 8, 3))
        for image in range(images):
            noisy = (pattern + random.normal(0, 40, pattern.shape)).clip(0, 255).astype(np.uint8)
            picture = Image.fromarray(noisy).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
            picture.save(folder / f"{number:02}" / f"{image}.jpg", quality=90)


def errors(result: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors of the plan."""
    names = ("memory", "step", "until the end")
    return {name: result["plan"][name] / result["run"][name] - 1 for name in names}


def table(results: dict[str, Any]) -> str:
    """Return all results as a Markdown table."""
    lines = [
        "| recipe | memory: plan, run | | step: plan, run | | until the end: plan, run | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        planned, ran, error = result["plan"], result["run"], errors(result)
        cells = [
            f"{planned['memory'] / 2**20:,.0f}, {ran['memory'] / 2**20:,.0f} MB",
            f"{error['memory']:+.0%}",
            f"{planned['step']:.3g}, {ran['step']:.3g} s",
            f"{error['step']:+.0%}",
            f"{planned['until the end']:,.0f}, {ran['until the end']:,.0f} s",
            f"{error['until the end']:+.0%}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that contains cars196/ and omniglot/")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    parser.add_argument("--quick", action="store_true", help="run one small case and write nothing")
    parser.add_argument("--again", action="store_true", help="repeat cases whose results exist")
    parser.add_argument("--table", action="store_true", help="only write the table of docs/plan.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        what, recipe, settings = json.loads(arguments.case)
        print(json.dumps({"plan": plan, "run": run}[what](recipe, settings)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.table:
        fill("plan.md", "measured", table(results))
        return
    if arguments.quick:
        results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for name, (recipe, settings) in (QUICK if arguments.quick else CASES).items():
            needs_data = any("DATA" in each for each in settings)
            if not arguments.quick and (name not in arguments.cases or (name in results and not arguments.again)):
                continue
            if needs_data and arguments.data is None:
                print(f"{name}: skipped, since it needs --data", flush=True)
                continue
            where = [each.replace("DATA", str(arguments.data)).replace("IMAGES", folder) for each in settings]
            case = {what: run_alone(__file__, [what, recipe, where]) for what in ("plan", "run")}
            results[name] = {"recipe": recipe, "settings": settings, **case}
            print(
                f"{name}: {', '.join(f'{key} {error:+.0%}' for key, error in errors(results[name]).items())}",
                flush=True,
            )
            if not arguments.quick:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    if not arguments.quick:
        fill("plan.md", "measured", table(results))
    for name, target in (("memory", MEMORY), ("step", TIME), ("until the end", TIME)):
        worst = max((abs(errors(each)[name]) for each in results.values()), default=0.0)
        verdict = "met" if worst <= target else "MISSED"
        print(f"{name}: error at most {worst:.0%}, target {target:.0%}: {verdict}")


if __name__ == "__main__":
    main()
