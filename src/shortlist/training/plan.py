"""What a run will do, known before it begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shortlist.config import RunConfig
from shortlist.data import BENCHMARKS, Catalog, half_validation, open_catalog
from shortlist.data.inspection import drop_unreadable
from shortlist.data.sampler import ClassBalancedSampler
from shortlist.model import Embedder
from shortlist.training.display import Display
from shortlist.training.folder import RunFolder, write_atomically
from shortlist.training.memory import GraphSize
from shortlist.training.parts import build_transforms

AUTOMATIC_BATCH = 392
STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # numbers that an optimizer keeps for each parameter


@dataclass(frozen=True)
class Plan:
    """The images of a run, and its steps."""

    config: RunConfig
    catalog: Catalog
    train: Catalog
    validation: Catalog | None
    test: Catalog | None
    sampler: ClassBalancedSampler
    unreadable: list[tuple[str, str]]  # images left out, and why

    @property
    def steps_an_epoch(self) -> int:
        return len(self.sampler)

    @property
    def classes_left_out(self) -> list[str]:
        """Training classes with too few images for a batch."""
        return [self.catalog.class_names[label] for label in self.sampler.left_out]

    @property
    def total_steps(self) -> int:
        training = self.config.training
        return training.steps or (training.epochs or 0) * self.steps_an_epoch

    def batches(self, first_step: int) -> Iterator[tuple[int, Tensor]]:
        """The epoch of each step from `first_step` to the last, and the indices of its images in `train`."""
        for step in range(first_step, self.total_steps):
            epoch, within = divmod(step, self.steps_an_epoch)
            if within == 0 or step == first_step:
                table = self.sampler.batches(epoch)
            yield epoch, table[within]

    @property
    def k(self) -> tuple[int, ...]:
        return reported_k(self.config)


def reported_k(config: RunConfig) -> tuple[int, ...]:
    """The cut-offs to report: the config's, or the benchmark's own."""
    benchmark = BENCHMARKS.get(config.data.source)
    return config.evaluation.k or (benchmark.k if benchmark else (1, 2, 4, 8))


def make_plan(config: RunConfig, display: Display, folder: RunFolder | None = None) -> Plan:
    """Open the images and split them. What is unreadable is noted in the run's folder, and not looked for again."""
    catalog, unreadable = open_images(config, display, folder)
    if config.data.validation == "half":
        catalog = half_validation(catalog)
    batch = config.batch
    train = catalog.split("train")
    size = batch.size
    if size == "auto":
        classes = int((train.class_sizes() >= batch.per_class).sum())
        size = batch.per_class * max(1, min(classes, AUTOMATIC_BATCH // batch.per_class))
    sampler = ClassBalancedSampler(train.labels.tolist(), size, batch.per_class, config.training.seed)
    validation, test = (catalog.split(name) if name in catalog.splits else None for name in ("validation", "test"))
    return Plan(config, catalog, train, validation, test, sampler, unreadable)


def open_images(
    config: RunConfig, display: Display, folder: RunFolder | None = None
) -> tuple[Catalog, list[tuple[str, str]]]:
    """The catalog that a config names and, with `data.on_missing: skip`, the unreadable images that were left out."""
    data = config.data
    with display.task("opening the images") as progress:
        catalog = open_catalog(
            data.source,
            root=data.root,
            on_missing=data.on_missing,
            train_share=data.train_share,
            split_seed=data.split_seed,
            progress=progress,
        )
    if data.on_missing == "error":
        return catalog, []
    if folder is not None and folder.unreadable_file.exists():
        unreadable = [(path, why) for path, why in json.loads(folder.unreadable_file.read_text(encoding="utf-8"))]
    else:
        with display.task("looking for unreadable images") as progress:
            _, unreadable = drop_unreadable(catalog, progress=progress)
        if folder is not None:
            write_atomically(folder.unreadable_file, json.dumps(unreadable, indent=2) + "\n")
    left_out = {path for path, _ in unreadable}
    return catalog.subset([path not in left_out for path in catalog.paths]), unreadable


def decoding_workers(config: RunConfig) -> int:
    """Processes that decode; by default one less than there are cores, and at most 8: the network needs the rest."""
    if config.data.workers != "auto":
        return config.data.workers
    return max(0, min(8, (os.cpu_count() or 1) - 1))


def describe(plan: Plan, embedder: Embedder) -> dict[str, Any]:
    """The plan as `--dry-run` prints it; the memory is an estimate from the graph of two images.

    Images that keep their shapes are counted as the largest possible, in proportion to their pixels.
    """
    config, batch = plan.config, plan.config.batch
    parts = {name: sum(p.numel() for p in part if p.requires_grad) for name, part in embedder.parts().items()}
    transform, _ = build_transforms(config, embedder)
    tried = transform.size or embedder.data_config.input_size[-1]
    with GraphSize(embedder.parameters()) as graph:
        embedder(torch.zeros(2, 3, tried, tried, dtype=torch.uint8))
    side = config.images.max_side or tried
    graph_of_one = graph.bytes * side**2 // tried**2 // 2
    chunk = 64 if batch.chunk_size == "auto" else batch.chunk_size
    kept = 4 * sum(parts.values())  # weights; as much again for the gradient and for each state of the optimizer
    memory = {
        "weights, gradient, optimizer": kept * (2 + STATES[config.optimizer.name] + (config.training.ema is not None)),
        "pixels of a batch": plan.sampler.batch_size * 3 * side**2,
        f"graph of a chunk of {chunk}": graph_of_one * chunk,
        "graphs of a whole batch, if all are kept": graph_of_one * plan.sampler.batch_size,
    }
    return {
        "data": {
            "source": config.data.source,
            **{name: _count(part) for name, part in _splits(plan).items()},
            "missing": len(plan.catalog.missing),
            "unreadable": len(plan.unreadable),
            "fingerprint": plan.catalog.fingerprint(),
        },
        "batches": str(plan.sampler),
        "classes left out": plan.classes_left_out,
        "steps": plan.total_steps,
        "parameters": {**parts, "all": sum(parts.values())},
        "memory": {name: f"{size / 2**20:,.0f} MB" for name, size in memory.items()},
        "reported": [f"r@{k}" for k in plan.k],
    }


def _splits(plan: Plan) -> dict[str, Catalog]:
    return {
        name: part
        for name, part in (("train", plan.train), ("validation", plan.validation), ("test", plan.test))
        if part is not None
    }


def _count(catalog: Catalog) -> str:
    return f"{len(catalog):,} images of {len(catalog.classes()):,} classes"
