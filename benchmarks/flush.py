"""Measure whether flushing subnormal numbers to zero speeds up the training of a network on this processor.

    python benchmarks/flush.py

The script trains EfficientNet-Lite0 on random pixels. Before training and after every ten steps, it measures the
forward and backward pass of one batch with and without `torch.set_flush_denormal(True)`, each of them first in every
other repeat. It uses a single thread, because the setting applies to one thread only. It prints the ratio of the times
and the share of subnormal numbers in the results of all operations of the network, in the forward pass (activations)
and in the backward pass (gradients), and writes the results to results/flush.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shortlist import Embedder, RecallAtKLoss

RESULTS = Path(__file__).parent / "results" / "flush.json"
BATCH, PIXELS, REPEATS, STEPS, EVERY = 64, 112, 8, 20, 10


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

    def shares() -> dict[str, float]:
        optimizer.zero_grad()
        with SubnormalShare() as activations:
            embeddings = model(pixels)
        (gradient,) = torch.autograd.grad(loss(embeddings, labels), embeddings)
        with SubnormalShare() as gradients:
            embeddings.backward(gradient)
        return {"subnormal_activations": activations.share, "subnormal_gradients": gradients.share}

    rows = []
    for number in range(STEPS + 1):
        step()
        if number % EVERY == 0:
            rows.append({"steps": number, **compare(step), **shares()})
            line = "{steps:3} steps: time with / without flushing {ratio:.3f}; share of subnormal activations "
            print((line + "{subnormal_activations:.1e}, gradients {subnormal_gradients:.1e}").format(**rows[-1]))
        optimizer.step()
    results = {"torch": torch.__version__, "machine": platform.machine(), "processor": processor(), "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def compare(step: Callable[[], None]) -> dict[str, float]:
    ratios = []
    for repeat in range(REPEATS):
        seconds = {}
        for flush in (False, True) if repeat % 2 == 0 else (True, False):
            torch.set_flush_denormal(flush)
            start = time.perf_counter()
            step()
            seconds[flush] = time.perf_counter() - start
        torch.set_flush_denormal(False)
        ratios.append(seconds[True] / seconds[False])
    return {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


class SubnormalShare(TorchDispatchMode):
    """The share of subnormal numbers in the floating-point results of all operations inside a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.subnormal = self.numbers = 0

    @property
    def share(self) -> float:
        return self.subnormal / max(1, self.numbers)

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = operation(*args, **(kwargs or {}))
        if "empty" not in operation.name():  # its result is not initialised
            for each in tree_leaves(results):
                if isinstance(each, Tensor) and each.is_floating_point():
                    self.subnormal += int(((each != 0) & (each.abs() < torch.finfo(each.dtype).tiny)).sum())
                    self.numbers += each.numel()
        return results


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
