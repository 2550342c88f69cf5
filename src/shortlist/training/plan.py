"""The plan of a run: its images, batches and steps, determined before it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shortlist.batches.memory import GraphSize
from shortlist.batches.sampler import ClassBalancedSampler
from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.data import Catalog, loader
from shortlist.errors import translate_arguments
from shortlist.model import Embedder
from shortlist.progress import Display
from shortlist.training.components import build_loss, build_transforms, trained_parts
from shortlist.training.datasets import EvalSet, open_eval_sets, open_run_images, open_validation
from shortlist.training.folder import RunFolder

AUTOMATIC_BATCH = 392  # the paper's batch for Cars196
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # number of values that an optimizer keeps per parameter


@dataclass(frozen=True)
class Plan:
    """Images, batches and steps of a run."""

    config: RunConfig
    catalog: Catalog
    train: Catalog
    validation: EvalSet | None
    eval_sets: tuple[EvalSet, ...]
    sampler: ClassBalancedSampler
    unreadable: list[tuple[str, str]]  # paths of images that were left out, and reasons
    batch_remarks: tuple[str, ...] = ()  # why the batch is smaller than configured

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""
        return len(self.sampler)

    @property
    def classes(self) -> Tensor:
        """Labels of the classes that batches are drawn from."""
        labels = torch.tensor(self.train.classes())
        return labels[~torch.isin(labels, torch.tensor(self.sampler.left_out, dtype=labels.dtype))]

    @property
    def classes_left_out(self) -> list[str]:
        """Names of the training classes that have fewer than `batch.per_class` images."""
        return [self.catalog.class_names[label] for label in self.sampler.left_out]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user on the batch size and on all images, including those for validation and tests."""
        eval_sets = (*(() if self.validation is None else (self.validation,)), *self.eval_sets)
        others = (remark for eval_set in eval_sets for remark in eval_set.remarks)
        return tuple(dict.fromkeys((*self.batch_remarks, *self.catalog.remarks, *others)))

    @property
    def total_steps(self) -> int:
        """Number of steps of the run."""
        training = self.config.training
        return training.steps or (training.epochs or 0) * self.steps_per_epoch

    def batches(self, first_step: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over the epoch and the image indices (in `train`) of each step, from `first_step` to the last."""
        for step in range(first_step, self.total_steps):
            epoch, within = divmod(step, self.steps_per_epoch)
            if within == 0 or step == first_step:
                table = self.sampler.batches(epoch)
            yield epoch, table[within]


@translate_arguments(CONFIG_KEYS)
def make_plan(config: RunConfig, display: Display, folder: RunFolder | None = None) -> Plan:
    """Open and split the images of a run, and plan its batches.

    Args:
        config: Configuration of the run.
        display: Display for progress.
        folder: Folder of the run, where the list of unreadable images is kept so that it is determined only once.

    Raises:
        ImagesChangedError: The images are not those that the run in `folder` started with.
    """
    catalog, unreadable = open_run_images(config, display, folder)
    validation = open_validation(config, display, catalog)
    batch = config.batch
    train = catalog.split("train")
    size, remarks = _batch_size(config, catalog)
    sampler = ClassBalancedSampler(train.labels.tolist(), size, batch.per_class, config.training.seed, batch.epoch)
    eval_sets = open_eval_sets(config, display, lambda: catalog)
    return Plan(config, catalog, train, validation, eval_sets, sampler, unreadable, remarks)


def _batch_size(config: RunConfig, catalog: Catalog) -> tuple[int, tuple[str, ...]]:
    """Return the batch size, and a remark if it is reduced because half of the classes are held out for validation."""
    batch = config.batch

    def usable_classes(split: str) -> int:
        return int((catalog.split(split).class_sizes() >= batch.per_class).sum())

    classes = usable_classes("train")
    if batch.size == "auto":
        return batch.per_class * max(1, min(classes, AUTOMATIC_BATCH // batch.per_class)), ()
    asked = batch.size // batch.per_class
    if config.data.validation != "half" or not 1 < classes < asked <= classes + usable_classes("validation"):
        return batch.size, ()  # if it is too large for all classes as well, the sampler raises an error
    size = classes * batch.per_class
    return size, (
        f"batch.size={batch.size} is reduced to {size}: data.validation=half leaves {classes} classes with at least "
        f"{batch.per_class} training images",
    )


def check_batch_sizes(configs: Iterable[RunConfig], train: Catalog) -> None:
    """Check that the training images have enough classes for the batches of all configurations.

    Raises:
        ConfigError: A batch is too large.
    """
    for batch in {each.batch for each in configs}:
        if batch.size != "auto":
            ClassBalancedSampler(train.labels.tolist(), batch.size, batch.per_class)


def decoding_workers(config: RunConfig, trainers: int = 1) -> int:
    """Return the number of decoding processes: by default one less than the number of CPU cores, and at most 8.

    Args:
        config: Configuration of the run.
        trainers: Number of training processes that share the CPU; each has decoding processes of its own.
    """
    if config.data.workers != "auto":
        return config.data.workers
    return loader.decoding_workers(sharing=trainers)


def inference_batch_size(config: RunConfig) -> int:
    """Return the number of images per forward pass in evaluation, which does not exceed an explicit chunk size."""
    size = config.batch.chunk_size
    return min(64, size) if size != "auto" else 64 if config.images.max_side is None else 8


def describe(plan: Plan, embedder: Embedder) -> dict[str, Any]:
    """Describe a plan as `--dry-run` prints it.

    The memory is estimated from the graph of two images, in proportion to the number of pixels. Images that keep their
    aspect ratio are assumed to have the largest possible size.

    Args:
        plan: Plan of the run.
        embedder: Embedder of the run; its weights do not matter.

    Returns:
        JSON-compatible dictionary.
    """
    config = plan.config
    trained = trained_parts(config, embedder)
    parts = {name: sum(p.numel() for p in part if p.requires_grad) for name, part in trained.items()}
    loss = build_loss(config.loss, plan.classes, embedder.dim)  # refuses what training would refuse
    if proxies := sum(p.numel() for p in loss.parameters()):
        parts["loss"] = proxies
    weights = 4 * sum(parts.values())  # bytes; the gradient and each state of the optimizer need as many again
    states = 2 + OPTIMIZER_STATES[config.optimizer.name] + (config.training.ema is not None)
    others = _memory_of_views(plan, embedder) if config.frozen else _memory_of_images(plan, embedder)
    memory = {"weights, gradient, optimizer": weights * states, **others}
    return {
        "data": {
            "source": config.data.source,
            **{name: _describe_size(part) for name, part in _splits(plan).items()},
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
        "tests": [_describe_eval_set(eval_set) for eval_set in plan.eval_sets],
    }


def _memory_of_images(plan: Plan, embedder: Embedder) -> dict[str, int]:
    """Estimate the memory of pixels and graphs in bytes."""
    config, batch = plan.config, plan.config.batch
    transform, _ = build_transforms(config, embedder)
    side_tried = transform.size or embedder.data_config.input_size[-1]
    with GraphSize(embedder.parameters()) as graph:
        embedder(torch.zeros(2, 3, side_tried, side_tried, dtype=torch.uint8))
    side = config.images.max_side or side_tried
    bytes_per_image = graph.bytes * side**2 // side_tried**2 // 2
    chunk = 64 if batch.chunk_size == "auto" else batch.chunk_size
    return {
        "pixels of a batch": plan.sampler.batch_size * 3 * side**2,
        f"graph of a chunk of {chunk}": bytes_per_image * chunk,
        "graphs of a whole batch, if all are kept": bytes_per_image * plan.sampler.batch_size,
    }


def _memory_of_views(plan: Plan, embedder: Embedder) -> dict[str, int]:
    """Compute the size of cached features in bytes."""
    channels, tested = embedder.layout.channels, [plan.validation, *plan.eval_sets]
    images = sum(len(each.catalog) for each in tested if each is not None)
    views = len(plan.train) * plan.config.data.number_of_views
    return {
        "features of a batch": 4 * plan.sampler.batch_size * channels,
        "cached features, on disk": (2 * views + 4 * images) * channels,
    }


def _splits(plan: Plan) -> dict[str, Catalog]:
    own = None if plan.config.evaluation.tests else next(iter(plan.eval_sets), None)
    others = {"validation": plan.validation, "test": own}
    return {
        "train": plan.train,
        **{name: eval_set.catalog for name, eval_set in others.items() if eval_set is not None},
    }


def _describe_eval_set(eval_set: EvalSet) -> str:
    distractors = eval_set.distractors
    more = "" if distractors is None else f", without and with {len(distractors):,} images of {distractors.name}"
    return f"{eval_set.name}: {len(eval_set.catalog):,} images{more}, reported at {', '.join(map(str, eval_set.k))}"


def _describe_size(catalog: Catalog) -> str:
    return f"{len(catalog):,} images of {len(catalog.classes()):,} classes"
