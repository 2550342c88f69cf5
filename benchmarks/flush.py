"""Measure whether flushing subnormal numbers to zero speeds up the training of a network on this processor.

    python benchmarks/flush.py

The script trains EfficientNet-Lite0 on random pixels. Before training and after every ten steps, it measures the
forward and backward pass of one batch alternately with and without `torch.set_flush_denormal(True)`. It uses a single
thread, because the setting applies to one thread only. It prints the ratio of the times and the share of subnormal
numbers in the gradient, and writes the results to results/flush.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path

import torch

from shortlist import Embedder, RecallAtKLoss

RESULTS = Path(__file__).parent / "results" / "flush.json"
BATCH, PIXELS, REPEATS, STEPS, EVERY = 64, 112, 7, 20, 10


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels = torch.randint(256, (BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8)
    labels = torch.arange(BATCH) // 4
    model, loss = Embedder("tf_efficientnet_lite0", dim=512, image_size=PIXELS).train(), RecallAtKLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(pixels), labels).backward()

    rows = []
    for number in range(STEPS + 1):
        step()
        if number % EVERY == 0:
            rows.append({"steps": number, **compare(step), "subnormal_share": subnormal_share(model)})
            line = "{steps:3} steps: time with / without flushing {ratio:.3f}, subnormal {subnormal_share:.1e}"
            print(line.format(**rows[-1]))
        optimizer.step()
    results = {"torch": torch.__version__, "machine": platform.machine(), "processor": processor(), "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def compare(step) -> dict[str, float]:  # type: ignore[no-untyped-def]
    ratios = []
    for _ in range(REPEATS):
        seconds = {}
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            start = time.perf_counter()
            step()
            seconds[flush] = time.perf_counter() - start
        torch.set_flush_denormal(False)
        ratios.append(seconds[True] / seconds[False])
    return {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def subnormal_share(model: torch.nn.Module) -> float:
    gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    tiny = torch.finfo(gradients.dtype).tiny
    return ((gradients != 0) & (gradients.abs() < tiny)).double().mean().item()


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
