"""Measure the time of the exact metrics for large classes: iNaturalist's 136,093 test images, 512 dimensions.

    python benchmarks/metrics.py

512 queries rank all images, for classes of several sizes; all queries would take 266 times as long. `compared` is the
plain method, one pass over the similarities for each positive; `product` is the matrix product alone, a lower bound for
any method. Each case runs in a separate process with one thread, and the lowest processor time of three runs counts.
The methods must agree in every score. The results are written to results/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from alone import run_alone

from shortlist.ranking import QueryScores, count_at_least, query_scores

RESULTS = Path(__file__).parent / "results" / "metrics.json"
IMAGES, DIMENSIONS, QUERIES, REPEATS = 136_093, 512, 512, 3
CLASS_SIZES = (4, 16, 55, 250)  # 55 is the mean of iNaturalist's
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    case = parser.parse_args().case
    if case is not None:
        print(json.dumps(measured(**case)))
        return
    rows = []
    print(
        "| positives | product s | compared s | now s | ratio | all queries, now: minutes |\n|---|---|---|---|---|---|"
    )
    for size in CLASS_SIZES:
        row = run_alone(__file__, {"positives": size})
        rows.append(row)
        minutes = row["now"] * IMAGES / QUERIES / 60
        print(
            f"| {size} | {row['product']:.2f} | {row['compared']:.2f} | {row['now']:.2f} "
            f"| {row['compared'] / row['now']:.1f} | {minutes:.0f} |",
            flush=True,
        )
    RESULTS.write_text(json.dumps({"command": "python benchmarks/metrics.py", "cases": rows}, indent=2) + "\n")


def measured(positives: int) -> dict[str, float | int]:
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(IMAGES) // positives
    centres = torch.randn(int(labels.max()) + 1, 24, generator=random)[labels]
    spread = torch.randn(IMAGES, 24, generator=random) + centres  # a few directions, as trained embeddings have
    gallery = torch.nn.functional.normalize(spread @ torch.randn(24, DIMENSIONS, generator=random))
    chosen = torch.randperm(IMAGES - positives, generator=random)[:QUERIES]  # whose classes are whole
    queries, asked = gallery[chosen] + 0.01 * torch.randn(QUERIES, DIMENSIONS, generator=random), labels[chosen]
    tile = 2**22 // IMAGES

    def product() -> None:
        for start in range(0, QUERIES, tile):
            queries[start : start + tile] @ gallery.T

    def scores() -> QueryScores:
        return query_scores(queries, asked, 1, gallery, labels)

    alone, _ = fastest(product)
    now, found = fastest(scores)
    count_at_least._FEW_THRESHOLDS_IN_LONG_ROW = positives  # every positive is compared
    compared, expected = fastest(scores, 1 if positives > 100 else REPEATS)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return {"positives": positives, "product": alone, "compared": compared, "now": now}


def fastest(work: Callable[[], Result], repeats: int = REPEATS) -> tuple[float, Result]:
    """Return the seconds of the fastest run, and the result of the last run."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        result = work()
        times.append(time.process_time() - started)
    return min(times), result


if __name__ == "__main__":
    main()
