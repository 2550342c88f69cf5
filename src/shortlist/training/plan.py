"""The plan of a run: its images, batches and steps, determined before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from shortlist.batches.sampler import ClassBalancedSampler
from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.data import Catalog, loader
from shortlist.errors import ConfigError, translate_arguments
from shortlist.imports import is_reference
from shortlist.progress import Display
from shortlist.training.datasets import EvalSet, open_eval_sets, open_run_images, open_validation
from shortlist.training.folder import RunFolder

FEW_CLASSES = 10  # fewer training classes are worth a remark
AUTOMATIC_BATCH = 392  # the paper's batch for Cars196


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
    def evaluated(self) -> tuple[EvalSet, ...]:
        """The validation images, if there are any, and all test sets."""
        return self.eval_sets if self.validation is None else (self.validation, *self.eval_sets)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user on the batch size and on all images, including those for validation and tests."""
        others = (remark for eval_set in self.evaluated for remark in eval_set.remarks)
        return tuple(dict.fromkeys((*self.batch_remarks, *self._few_classes, *self.catalog.remarks, *others)))

    @property
    def _few_classes(self) -> tuple[str, ...]:
        """Remark on a small number of training classes."""
        number = len(self.classes)
        text = (
            f"Only {number} training classes: a model trained on so few classes is unlikely to generalise to other "
            "classes. Add classes, or compare with a pretrained model: shortlist evaluate --model timm:NAME IMAGES"
        )
        return (text,) if number < FEW_CLASSES else ()

    @property
    def total_steps(self) -> int:
        """Number of steps of the run."""
        training = self.config.training
        return training.steps or (training.epochs or 0) * self.steps_per_epoch

    def validates(self, step: int) -> bool:
        """Return whether there is a validation after `step` steps."""
        training, last = self.config.training, step == self.total_steps
        if self.validation is None:
            return False
        if training.validate_every_steps is not None:
            return last or step % training.validate_every_steps == 0
        return self.ends_epoch(step) and (last or self.epoch(step) % training.validate_every == 0)

    def tests(self, step: int) -> bool:
        """Return whether to test after `step` steps.

        As in the authors' release, tests follow the first epoch, every few epochs, and the last epoch. Without
        validation, the last of them is the final test, which is not counted here.
        """
        every, last = self.config.evaluation.test_every, step == self.total_steps
        if every is None or not self.ends_epoch(step) or (last and self.validation is None):
            return False
        return last or (self.epoch(step) - 1) % every == 0

    def epoch(self, step: int) -> int:
        """Return the epoch of the last of `step` steps, from 1."""
        return math.ceil(step / self.steps_per_epoch)

    def ends_epoch(self, step: int) -> bool:
        """Return whether an epoch, or the run, ends after `step` steps."""
        return step % self.steps_per_epoch == 0 or step == self.total_steps

    def images_evaluated(self, step: int) -> int:
        """Return the number of images that are embedded for validation and interim tests after `step` steps."""
        validated = len(self.validation.catalog) if self.validation is not None and self.validates(step) else 0
        return validated + (self.images_tested if self.tests(step) else 0)

    @property
    def images_tested(self) -> int:
        """Number of test images, without distractors."""
        return sum(len(each.catalog) for each in self.eval_sets)

    @property
    def images_without_views(self) -> int:
        """Number of validation and test images, which a frozen backbone encodes once, without augmentation."""
        return sum(len(each.catalog) for each in self.evaluated)

    def images_evaluated_after(self, step: int) -> int:
        """Return the number of images that are embedded in all evaluations after `step` steps and in the final test."""
        return self._images_left[step]

    @cached_property
    def _images_left(self) -> list[int]:
        """Results of `images_evaluated_after` for each step."""
        distractors = sum(len(each.distractors) for each in self.eval_sets if each.distractors is not None)
        later = (self.images_evaluated(step) for step in range(self.total_steps, 0, -1))
        return [*accumulate(later, initial=self.images_tested + distractors)][::-1]

    def batches(self, first_step: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over the epoch and the image indices (in `train`) of each step, from `first_step` to the last."""
        for step in range(first_step, self.total_steps):
            epoch, within = divmod(step, self.steps_per_epoch)
            if within == 0 or step == first_step:
                table = self.sampler.batches(epoch)
            yield epoch, table[within]

    def labels(self, batch: Tensor) -> Tensor:
        """Return the labels of a batch of image indices."""
        return torch.from_numpy(self.train.relevance_labels[batch.numpy()])

    def first_labels(self) -> Tensor:
        """Return the labels of the first batch."""
        return self.labels(self.sampler.batches(0)[0])


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
    if train.label_sets is not None:
        _check_loss_for_several_labels(config)
    size, remarks = batch_size(config, catalog)
    sampler = ClassBalancedSampler(train.labels.tolist(), size, batch.per_class, config.training.seed, batch.epoch)
    eval_sets = open_eval_sets(config, display, lambda: catalog)
    return Plan(config, catalog, train, validation, eval_sets, sampler, unreadable, remarks)


def _check_loss_for_several_labels(config: RunConfig) -> None:
    for loss in (config.loss, *config.loss.plus):
        if loss.pml_class or is_reference(loss.name):
            raise ConfigError(f"loss.name={loss.name} needs images with one label each, but some have several.")


def batch_size(config: RunConfig, catalog: Catalog) -> tuple[int, tuple[str, ...]]:
    """Return the batch size, and a remark if it is reduced because half of the classes are held out for validation."""
    batch = config.batch

    def usable_classes(split: str) -> int:
        return int((catalog.split(split).class_sizes() >= batch.per_class).sum())

    classes = usable_classes("train")
    if batch.size == "auto":
        return batch.per_class * max(1, min(classes, AUTOMATIC_BATCH // batch.per_class)), ()
    requested = batch.size // batch.per_class
    if config.data.validation != "half" or not 1 < classes < requested <= classes + usable_classes("validation"):
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


def run_workers(config: RunConfig, trainers: int = 1) -> int:
    """Return the number of decoding processes: by default one less than the number of CPU cores, and at most 8.

    Args:
        config: Configuration of the run.
        trainers: Number of training processes that share the CPU; each has decoding processes of its own.
    """
    if config.data.workers != "auto":
        return loader.bounded_workers(config.data.workers)
    return loader.decoding_workers(sharing=trainers)


def inference_batch_size(config: RunConfig) -> int:
    """Return the number of images per forward pass in evaluation, which does not exceed an explicit chunk size."""
    size = config.batch.chunk_size
    return min(32, size) if size != "auto" else 32 if config.images.max_side is None else 8
