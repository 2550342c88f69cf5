"""Measure how time and memory grow: loss and step with the batch, evaluation and changes with the gallery, and more.

    python benchmarks/growth.py                  all cases: about 15 minutes on 2 cores; resumes an interrupted run
    python benchmarks/growth.py --quick          small sizes, to test the script; nothing is written
    python benchmarks/growth.py --draw           only draw the plot and fill docs/growth.md from results/growth.json

Each size is measured twice, in separate processes. Time is the fastest of several repetitions, with freed memory kept
(`reuse_freed_memory`, as in training). Memory is the peak of the process above its initial state, with freed memory
returned to the system immediately. The exponent is the slope of a straight line through the logarithms of all sizes;
the last exponent is that between the two largest sizes.

- *loss*: RS@k, forward and backward, of half-trained embeddings (r@1 of 0.5), 4 per class, 512 dimensions.
- *loss with SiMix*: the same, with 6 virtual examples per class, which make the batch 2.5 times as large.
- *evaluation*: all metrics of 2,000 queries against a gallery of 512 dimensions.
- *step*: the large-batch step of EfficientNet-Lite0 at 112 pixels, chunks of 32, no graphs kept.
- *adding*: 100 vectors added to a gallery in a folder, with the default kind of index.
- *batches*: the class-balanced batches of an epoch, 4 images per class.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alone import run_alone
from embeddings import STAGES
from pages import DOCS, fill

RESULTS = Path(__file__).parent / "results" / "growth.json"
DIMENSIONS, QUERIES, ADDED = 512, 2_000, 100
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
SIZES = {
    "loss": (1024, 2048, 4096, 8192, 16384, 32768),
    "loss with SiMix": (1024, 2048, 4096, 8192),
    "evaluation": (10_000, 20_000, 50_000, 100_000, 200_000),
    "step": (64, 128, 256, 512, 1024),
    "adding": (10_000, 20_000, 50_000, 100_000, 150_000),  # an index is built beyond 200,000, which takes minutes
    "batches": (100_000, 300_000, 1_000_000, 3_000_000),
}
QUICK = {name: tuple(size // 64 for size in sizes[-3:]) for name, sizes in SIZES.items()}
OF = {"loss": "batch", "loss with SiMix": "batch", "step": "batch", "batches": "images"}  # else: gallery
LARGEST = {"seconds": 2.0, "megabytes": 1.0}  # targets: exponents of the loss
REPEATS, SECONDS = 3, 2.0  # minimum number of repetitions, and their minimum duration; the first maps new memory


# ------------------------------------------------------------------------------------------- in a separate process


def loss(batch: int, simix: bool = False) -> Callable[[], Any]:
    from shortlist import RecallAtKLoss, SiMix

    vectors, labels = STAGES["half-trained"].make(batch, DIMENSIONS)
    k = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32) if simix else (1, 2, 4, 8, 16)
    function = RecallAtKLoss(k, simix=SiMix() if simix else None)
    leaf = vectors.clone().requires_grad_()

    def run() -> None:
        leaf.grad = None
        function(leaf, labels).backward()

    return run


def evaluation(gallery: int) -> Callable[[], Any]:
    from shortlist.ranking import query_scores

    vectors, labels = STAGES["half-trained"].make(gallery, DIMENSIONS)
    queries = torch.arange(0, len(labels), max(1, len(labels) // QUERIES))[:QUERIES]
    return lambda: query_scores(vectors[queries], labels[queries], (1, 10, 100), vectors, labels)


def step(batch: int) -> Callable[[], Any]:
    from shortlist import LargeBatchStep, RecallAtKLoss
    from shortlist.model import Embedder

    model = Embedder("tf_efficientnet_lite0", dim=DIMENSIONS, image_size=112)
    large = LargeBatchStep(model, RecallAtKLoss(), 32, keep_graphs=False)
    pixels = torch.randint(256, (batch, 3, 112, 112), dtype=torch.uint8)
    large(pixels[:32], torch.arange(len(pixels[:32])) // 4)
    return lambda: large(pixels, torch.arange(batch) // 4)


def adding(gallery: int) -> Callable[[], Any]:
    from search import NoEncoder, change, clustered

    from shortlist.gallery.folder_store import FolderStore

    folder = tempfile.TemporaryDirectory()  # deleted at the end of the process
    store = FolderStore.create(Path(folder.name) / "gallery", NoEncoder(), "auto")
    change(store, clustered(gallery).numpy(), [])
    added = clustered(ADDED, seed=1).numpy()
    return lambda: (change(store, added, []), folder)


def batches(images: int) -> Callable[[], Any]:
    from shortlist import ClassBalancedSampler

    labels = np.arange(images) // 4
    return lambda: ClassBalancedSampler(labels.tolist(), 400, 4).batches(0)


CASES: dict[str, Callable[[int], Callable[[], Any]]] = {
    "loss": loss,
    "loss with SiMix": lambda batch: loss(batch, simix=True),
    "evaluation": evaluation,
    "step": step,
    "adding": adding,
    "batches": batches,
}


def measure(name: str, size: int, what: str) -> dict[str, float]:
    from shortlist.batches.memory import reuse_freed_memory

    torch.manual_seed(0)
    if what == "seconds":
        reuse_freed_memory()
    run = CASES[name](size)
    if what == "seconds":
        times = []
        while sum(times) < SECONDS or len(times) < REPEATS:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        # adding merges files now and then, so that only the mean is the time of a change
        return {"seconds": sum(times) / len(times) if name == "adding" else min(times)}
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    result = run()
    peak = _status("VmHWM") - before
    del result
    return {"megabytes": peak / 2**20}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# --------------------------------------------------------------------------------------------------------- results


Results = dict[str, dict[str, dict[str, Any]]]  # by name and size


def exponents(found: dict[str, dict[str, Any]], what: str) -> tuple[float, float]:
    """Return the exponent over all sizes, and between the two largest. Less than 2 MB is noise."""
    sizes, least = sorted(map(int, found)), 2.0 if what == "megabytes" else 1e-9
    x, y = np.log(sizes), np.log([max(found[str(size)][what], least) for size in sizes])
    return float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2]))


def table(results: Results) -> str:
    lines = ["| | size | seconds | MB | exponent of time | of memory |", "|---|---|---|---|---|---|"]
    for name, found in results.items():
        sizes = sorted(map(int, found))
        (time_all, time_last), (memory_all, memory_last) = (exponents(found, what) for what in LARGEST)
        for size in sizes:
            row = found[str(size)]
            cells = f"| {row['seconds']:.3g} | {max(row['megabytes'], 0):,.0f} |"
            fitted = f"{time_all:.2f} (last {time_last:.2f}) | {memory_all:.2f} (last {memory_last:.2f})"
            lines.append(
                f"| {name if size == sizes[0] else ''} | {OF.get(name, 'gallery')} {size:,} {cells} "
                f"{fitted if size == sizes[0] else '| '} |"
            )
    return "\n".join(lines)


def show_targets(results: Results) -> None:
    for name in ("loss", "loss with SiMix"):
        for what, target in LARGEST.items():
            found, _ = exponents(results[name], what)
            verdict = "met" if round(found, 2) <= target else "MISSED"
            print(f"{name}: {what} grow with exponent {found:.2f}, target {target:.0f}: {verdict}")


def draw(results: Results, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    units = {"seconds": "s", "megabytes": "MB"}
    panels = [("loss", "seconds"), ("loss", "megabytes"), ("evaluation", "seconds")]
    panels += [("step", "seconds"), ("step", "megabytes"), ("adding", "seconds")]
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.2), layout="constrained")
    for axis, (panel, what) in zip(axes.flat, panels, strict=True):
        names = [name for name in results if name.startswith(panel)]
        for name, colour in zip(names, ("#0072B2", "#D55E00"), strict=False):
            sizes = np.array(sorted(map(int, results[name])))
            values = np.array([results[name][str(size)][what] for size in sizes])
            power, factor = np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)
            axis.loglog(sizes, values, "o", color=colour)
            axis.loglog(sizes, np.exp(factor) * sizes**power, "-", color=colour, label=f"{name}: exponent {power:.2f}")
        axis.set_title(f"{panel}: {what}", loc="left", fontsize=10)
        axis.set_xlabel(OF.get(panel, "gallery"))
        axis.set_ylabel(units[what])
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
    figure.savefig(file, dpi=110, metadata={"Software": None})


# -------------------------------------------------------------------------------------------------- extrapolations


def extrapolations(results: Results) -> str:
    """Return the extrapolations in docs/growth.md that follow from measured rates, as a table."""
    seconds = {name: {int(size): row["seconds"] for size, row in found.items()} for name, found in results.items()}

    def rate(name: str, power: float) -> float:
        size = max(seconds[name])
        return seconds[name][size] / size**power

    evaluated = rate("evaluation", 1) / QUERIES  # seconds per query and gallery image
    sampled = max(results["batches"], key=int)
    bytes_of_sampler = results["batches"][sampled]["megabytes"] * 2**20 / int(sampled)
    rows = [
        ("loss, this machine", "a_l = seconds / B^2", f"{rate('loss', 2):.2e} s"),
        ("loss of B = 65,536, this machine", "a_l B^2", f"{rate('loss', 2) * 65_536**2 / 60:.1f} min"),
        ("evaluation, this machine", "a_e = seconds / (queries x gallery)", f"{evaluated:.2e} s"),
        ("one exact query against 100 million", "a_e x 10^8", f"{evaluated * 1e8:.2f} s"),
        ("10,000 exact queries against 100 million", "a_e x 10^12", f"{evaluated * 1e12 / 3600:.1f} h"),
        ("images per second of a step, this machine", "r", f"{1 / rate('step', 1):.0f}"),
        ("batches of an epoch of a billion images", "a_b x 10^9", f"{rate('batches', 1) * 1e9 / 60:.0f} min"),
        ("memory of the sampler for a billion images", "m_b x 10^9", f"{bytes_of_sampler * 1e9 / 1e9:,.0f} GB"),
    ]
    return "\n".join(["| | formula | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def publish(results: Results) -> None:
    """Draw the plot, and fill the page."""
    draw(results, DOCS / "images" / "growth.png")
    picture = "![Time and memory against sizes, on logarithmic axes, with fitted exponents](images/growth.png)"
    fill("growth.md", "measured", f"{picture}\n\n{table(results)}")
    fill("growth.md", "rates", extrapolations(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use small sizes and write nothing")
    parser.add_argument("--draw", action="store_true", help="only draw the plot and fill the page")
    parser.add_argument("--again", action="store_true", help="repeat measurements whose results exist")
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), help="what to measure")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*json.loads(arguments.case))))
        return
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() and not arguments.quick else {}
    if arguments.draw:
        publish(results)
        return
    for name in arguments.only:
        for size in (QUICK if arguments.quick else SIZES)[name]:
            if arguments.again or str(size) not in results.get(name, {}):
                found: dict[str, Any] = {}
                for what, environment in (("seconds", None), ("megabytes", RETURN_FREED_MEMORY)):
                    found |= run_alone(__file__, [name, size, what], environment)
                results.setdefault(name, {})[str(size)] = found
                if not arguments.quick:
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            row = results[name][str(size)]
            print(f"{name:16} {size:9,} {row['seconds']:9.3g} s {row['megabytes']:9,.0f} MB", flush=True)
    if set(results) == set(SIZES):
        show_targets(results)
        if arguments.quick:
            draw(results, Path(tempfile.mkdtemp()) / "growth.png")
            print(table(results), extrapolations(results), sep="\n\n")
        else:
            publish(results)


if __name__ == "__main__":
    main()
