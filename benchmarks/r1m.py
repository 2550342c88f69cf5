"""Measure time and memory of the evaluation of Revisited Oxford with a million distractors.

    python benchmarks/r1m.py                     a million vectors of 2,048 numbers in half precision: 4.1 GB of disk
    python benchmarks/r1m.py --folder FAST_DISK --keep --distractors 100000

The script writes a file of random unit vectors in blocks, and evaluates the real ground truth of Revisited Oxford with
synthetic vectors: 70 queries, each against 4,993 images and the distractors, which are read from disk. Each repetition
runs in a separate process with one thread. Memory is its peak, above the memory of the process with all modules
imported and the 4,993 vectors loaded. `held` is the minimum that an evaluation with all vectors in memory in single
precision would need. The results are written to results/r1m.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alone import run_alone

from shortlist.data import Catalog, Judgement
from shortlist.data.unpickling import read_plain_pickle
from shortlist.evaluation import evaluate
from shortlist.search import open_vectors

RESULTS = Path(__file__).parent / "results" / "r1m.json"
GROUND_TRUTH = Path(__file__).parents[1] / "tests" / "revisited" / "gnd_roxford5k.pkl"
DIMENSIONS, IMAGES, QUERIES, REPEATS, BLOCK = 2048, 4_993, 70, 3, 10_000
SETUPS = {
    "easy": (["easy"], ["junk", "hard"]),
    "medium": (["easy", "hard"], ["junk"]),
    "hard": (["hard"], ["junk", "easy"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distractors", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="folder to write the file to; default: a temporary folder")
    parser.add_argument("--keep", action="store_true", help="do not delete the file")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measured(**options.case)))
        return
    folder = options.folder or Path(tempfile.mkdtemp())
    file = folder / f"distractors-{options.distractors}.npy"
    try:
        generate(file, options.distractors)
        runs = [run_alone(__file__, {"file": str(file)}) for _ in range(REPEATS)]
    finally:
        if not options.keep:
            file.unlink(missing_ok=True)
            if options.folder is None:
                folder.rmdir()
    report(options.distractors, runs)


def report(distractors: int, runs: list[dict[str, Any]]) -> None:
    first = runs[0]
    result = {
        "command": f"python benchmarks/r1m.py --distractors {distractors}",
        "ground_truth": GROUND_TRUTH.name,
        "queries": QUERIES,
        "gallery": IMAGES + distractors,
        "dimensions": DIMENSIONS,
        "file_bytes": distractors * DIMENSIONS * 2,
        "seconds": [run["seconds"] for run in runs],
        "processor_seconds": [run["processor_seconds"] for run in runs],
        "peak_bytes": [run["peak_bytes"] for run in runs],
        "process_peak_bytes": [run["process_peak_bytes"] for run in runs],
        "held_bytes": (IMAGES + distractors) * DIMENSIONS * 4,
        "metrics": first["metrics"],
        **{name: first[name] for name in ("torch", "threads", "machine")},
    }
    seconds, peak = statistics.median(result["seconds"]), max(result["peak_bytes"])
    print(
        f"{result['gallery']:,} vectors: {seconds:.1f} s (median of {len(runs)}), peak {peak / 2**20:,.0f} MiB more "
        f"than before, {max(result['process_peak_bytes']) / 2**20:,.0f} MiB in all; "
        f"all in memory would be {result['held_bytes'] / 2**20:,.0f} MiB. {first['metrics']}"
    )
    if distractors >= 1_000_000:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


def generate(file: Path, number: int) -> None:
    """Write unit vectors that share a common direction, as real ones do, unless the file exists."""
    size = number * DIMENSIONS * 2
    if file.exists() and file.stat().st_size > size:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(file.parent).free < size + 2**30:
        sys.exit(f"{file.parent} has no room for {size / 1e9:.1f} GB and something to spare: choose another --folder")
    random = np.random.default_rng(0)
    part = file.with_suffix(".part")
    vectors = np.lib.format.open_memmap(part, mode="w+", dtype=np.float16, shape=(number, DIMENSIONS))
    for start in range(0, number, BLOCK):
        block = random.standard_normal((min(BLOCK, number - start), DIMENSIONS), dtype=np.float32) + 0.5
        vectors[start : start + len(block)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    vectors.flush()
    del vectors
    part.replace(file)


def catalog(queries: list[dict[str, list[int]]]) -> Catalog:
    number = QUERIES + IMAGES

    def rows(query: dict[str, list[int]], keys: list[str]) -> np.ndarray:
        return QUERIES + np.array([index for key in keys for index in query[key]], dtype=np.int64)

    return Catalog(
        name="roxford5k",
        root=Path(),
        paths=np.array([str(row) for row in range(number)], dtype=object),
        labels=np.zeros(number, dtype=np.int64),
        class_names=("unlabelled",),
        splits=np.full(number, "test"),
        roles=np.repeat(["query", "gallery"], [QUERIES, IMAGES]),
        judgements={
            setup: tuple(Judgement(rows(query, right), rows(query, junk)) for query in queries)
            for setup, (right, junk) in SETUPS.items()
        },
    )


def descriptors(queries: list[dict[str, list[int]]]) -> torch.Tensor:
    """Return vectors of the queries and then of the images: easy images are closer to their queries than hard ones."""
    random = np.random.default_rng(2)
    asked, known = (random.standard_normal((number, DIMENSIONS)) for number in (QUERIES, IMAGES))
    for vector, query in zip(asked, queries, strict=True):
        for key, share in {"easy": 0.12, "junk": 0.1, "hard": 0.07}.items():
            known[query[key]] += share * vector
    return torch.nn.functional.normalize(torch.from_numpy(np.concatenate((asked, known)) + 0.5).float())


def measured(file: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    queries = read_plain_pickle(GROUND_TRUTH)["gnd"]
    images, vectors = catalog(queries), descriptors(queries)
    evaluate(vectors, images, bootstrap=0)  # loads what is loaded late
    reset_peak()
    before, processor, started = peak(), time.process_time(), time.perf_counter()
    found = evaluate(vectors, images, bootstrap=0, distractors={"r1m": open_vectors(file)})
    return {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - processor,
        "peak_bytes": peak() - before,
        "process_peak_bytes": peak(),
        "gallery": found.gallery,
        "metrics": {name: round(100 * value, 2) for name, value in found.values.items() if name.startswith("mAP")},
    }


def reset_peak() -> None:
    """Reset the peak memory, if the system supports it (Linux)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak() -> int:
    """Return the peak memory of this process, including the pages of mapped files."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
