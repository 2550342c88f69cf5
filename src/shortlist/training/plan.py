"""What a run will do, known before it begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shortlist.batches.memory import GraphSize
from shortlist.batches.sampler import ClassBalancedSampler
from shortlist.config import RunConfig
from shortlist.config.arguments import ARGUMENTS
from shortlist.data import Catalog
from shortlist.errors import translate_arguments
from shortlist.model import Embedder
from shortlist.progress import Display
from shortlist.training.folder import RunFolder
from shortlist.training.losses import build_loss
from shortlist.training.opening import EvalSet, open_eval_sets, open_own, open_validation
from shortlist.training.parts import build_transforms

AUTOMATIC_BATCH = 392
STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # numbers that an optimizer keeps for each parameter


@dataclass(frozen=True)
class Plan:
    """The images of a run, and its steps."""

    config: RunConfig
    catalog: Catalog
    train: Catalog
    validation: EvalSet | None
    eval_sets: tuple[EvalSet, ...]
    sampler: ClassBalancedSampler
    unreadable: list[tuple[str, str]]  # images left out, and why

    @property
    def steps_per_epoch(self) -> int:
        return len(self.sampler)

    @property
    def classes(self) -> Tensor:
        """The labels of the classes that batches are made of."""
        labels = torch.tensor(self.train.classes())
        return labels[~torch.isin(labels, torch.tensor(self.sampler.left_out, dtype=labels.dtype))]

    @property
    def classes_left_out(self) -> list[str]:
        """Training classes with too few images for a batch."""
        return [self.catalog.class_names[label] for label in self.sampler.left_out]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of all images, also of those to validate with and to be tested on."""
        eval_sets = (*(() if self.validation is None else (self.validation,)), *self.eval_sets)
        others = (remark for eval_set in eval_sets for remark in eval_set.remarks)
        return tuple(dict.fromkeys((*self.catalog.remarks, *others)))

    @property
    def total_steps(self) -> int:
        training = self.config.training
        return training.steps or (training.epochs or 0) * self.steps_per_epoch

    def batches(self, first_step: int) -> Iterator[tuple[int, Tensor]]:
        """The epoch of each step from `first_step` to the last, and the indices of its images in `train`."""
        for step in range(first_step, self.total_steps):
            epoch, within = divmod(step, self.steps_per_epoch)
            if within == 0 or step == first_step:
                table = self.sampler.batches(epoch)
            yield epoch, table[within]


@translate_arguments(ARGUMENTS)
def make_plan(config: RunConfig, display: Display, folder: RunFolder | None = None) -> Plan:
    """Open the images and split them. What is unreadable is noted in the run's folder, and not looked for again.

    Raises:
        OtherImages: they are not those that the run in `folder` began with.
    """
    catalog, unreadable = open_own(config, display, folder)
    validation = open_validation(config, display, catalog)
    batch = config.batch
    train = catalog.split("train")
    size = batch.size
    if size == "auto":
        classes = int((train.class_sizes() >= batch.per_class).sum())
        size = batch.per_class * max(1, min(classes, AUTOMATIC_BATCH // batch.per_class))
    sampler = ClassBalancedSampler(train.labels.tolist(), size, batch.per_class, config.training.seed)
    eval_sets = open_eval_sets(config, display, lambda: catalog)
    return Plan(config, catalog, train, validation, eval_sets, sampler, unreadable)


def decoding_workers(config: RunConfig) -> int:
    """Processes that decode; by default one less than there are cores, and at most 8: the network needs the rest."""
    if config.data.workers != "auto":
        return config.data.workers
    return max(0, min(8, (os.cpu_count() or 1) - 1))


def images_at_once(config: RunConfig) -> int:
    """Not more than training embeds at once, where someone has said so: then that is what the memory allows."""
    size = config.batch.chunk_size
    return min(64, size) if size != "auto" else 64 if config.images.max_side is None else 8


def describe(plan: Plan, embedder: Embedder) -> dict[str, Any]:
    """The plan as `--dry-run` prints it; the memory is an estimate from the graph of two images.

    Images that keep their shapes are counted as the largest possible, in proportion to their pixels.
    """
    config, batch = plan.config, plan.config.batch
    parts = {name: sum(p.numel() for p in part if p.requires_grad) for name, part in embedder.parts().items()}
    loss = build_loss(config.loss, plan.classes, embedder.dim)  # what it refuses is refused here as well
    if proxies := sum(p.numel() for p in loss.parameters()):
        parts["loss"] = proxies
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
            **({"remarks": list(plan.remarks)} if plan.remarks else {}),
        },
        "batches": str(plan.sampler),
        "classes left out": plan.classes_left_out,
        "steps": plan.total_steps,
        "parameters": {**parts, "all": sum(parts.values())},
        "memory": {name: f"{size / 2**20:,.0f} MB" for name, size in memory.items()},
        "tests": [_eval_set(eval_set) for eval_set in plan.eval_sets],
    }


def _splits(plan: Plan) -> dict[str, Catalog]:
    own = None if plan.config.evaluation.tests else next(iter(plan.eval_sets), None)
    others = {"validation": plan.validation, "test": own}
    return {
        "train": plan.train,
        **{name: eval_set.catalog for name, eval_set in others.items() if eval_set is not None},
    }


def _eval_set(eval_set: EvalSet) -> str:
    others = eval_set.distractors
    more = "" if others is None else f", without and with {len(others):,} images of {others.name}"
    return f"{eval_set.name}: {len(eval_set.catalog):,} images{more}, reported at {', '.join(map(str, eval_set.k))}"


def _count(catalog: Catalog) -> str:
    return f"{len(catalog):,} images of {len(catalog.classes()):,} classes"
