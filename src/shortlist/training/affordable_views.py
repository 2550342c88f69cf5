"""The number of views per image in the recipe folder-fast, chosen so that encoding takes minutes on this machine."""

from __future__ import annotations

import shutil
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from shortlist.batches.memory import available_memory
from shortlist.config import RunConfig
from shortlist.data import Catalog, ImageDataset
from shortlist.data.images import ImageError
from shortlist.model import Embedder
from shortlist.progress import Clock
from shortlist.threads import threads
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.durations import seconds_per_step
from shortlist.training.learner import Learner
from shortlist.training.plan import batch_size

CHANNELS = 1280  # of EfficientNet-Lite0
ENCODING_SECONDS = 600.0  # maximum time to encode all views
FREE_SHARE = 0.5  # maximum share of the free memory, and of the free disk space, for cached features
MEASURED_VIEWS, MEASURED_SECONDS = 4, 1.5
MEASURED_IMAGES, MEASURED_STEPS = 16, 5


class Machine(NamedTuple):
    """Speed and free resources of a machine without a GPU.

    Args:
        seconds: Time that it takes to decode and encode a view on an idle machine.
        step: Time of a training step, likewise.
        memory: Free memory in bytes.
        disk: Free space on the disk of the run, in bytes.
    """

    seconds: float
    step: float
    memory: int
    disk: int


class AffordableViews(NamedTuple):
    """A number of views.

    Args:
        number: Number of views of each training image.
        seconds: Estimated duration of encoding them, and all other images once.
        limit: Limit that the wanted number of views would exceed, as text; None if this is the wanted number.
    """

    number: int
    seconds: float
    limit: str | None


def this_machine(config: RunConfig, folder: Path, images: Catalog) -> Machine:
    """Measure the speed and free resources of this machine.

    Times are processor times of one core, divided by the number of cores, so that other work has no effect on them.

    Args:
        config: Configuration whose backbone encodes the views. Its speed is measured for a second or two.
        folder: Folder of the features, which need not exist.
        images: The images of the run, some of which are decoded.
    """
    path = folder.absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    memory = available_memory(torch.device("cpu"))
    embedder = build_embedder(config, weights=False)
    cores = torch.get_num_threads()
    with threads(1):
        view = _seconds_per_view(config, embedder) + _seconds_per_decoding(config, embedder, images)
        step = _seconds_per_step(config, embedder, images)
    return Machine(view / cores, step / cores, memory, shutil.disk_usage(existing).free)


def _seconds_per_step(config: RunConfig, embedder: Embedder, images: Catalog) -> float:
    """Measure the processor time of some training steps on random features."""
    per_class = config.batch.per_class
    classes = torch.arange(batch_size(config, images)[0] // per_class)
    learner = Learner(config, torch.device("cpu"), classes, embedder)
    labels = classes.repeat_interleave(per_class)
    return seconds_per_step(learner, labels, MEASURED_STEPS, time.process_time) or 0.0


def _seconds_per_decoding(
    config: RunConfig, embedder: Embedder, images: Catalog, clock: Clock = time.process_time
) -> float:
    """Return the mean processor time of decoding and augmenting an image; 0 if none of a few images can be read."""
    dataset, times = ImageDataset(images, build_transforms(config, embedder)[0], 0), list[float]()
    for index in np.linspace(0, len(images) - 1, MEASURED_IMAGES, dtype=int).tolist():
        started = clock()
        with suppress(ImageError):
            dataset[0, index]
            times.append(clock() - started)
    return statistics.fmean(times) if times else 0.0


def _seconds_per_view(config: RunConfig, embedder: Embedder) -> float:
    """Measure the backbone, which takes most of the time.

    The result is the processor time of the fastest of several passes, so that other work on this machine has no effect.
    """
    embedder, times = embedder.eval(), list[float]()
    side = config.images.size or embedder.data_config.input_size[-1]
    images = torch.zeros(MEASURED_VIEWS, 3, side, side, dtype=torch.uint8)
    with torch.inference_mode():
        while len(times) < 2 or sum(times) < MEASURED_SECONDS:
            started = time.process_time()
            embedder.pooled_features(images)
            times.append(time.process_time() - started)
    return min(times) / len(images)


def affordable_views(wanted: int, trained: int, others: int, machine: Machine, at_least: int = 1) -> AffordableViews:
    """Return a number of views that can be encoded in about 10 minutes, and whose features fit in memory and on disk.

    This is the wanted number, or the largest possible power of two, so that repeated calls usually return the same
    number. Features of views take 2 bytes per channel, and those of validation and test images, which have one view, 4.

    Args:
        wanted: Maximum number of views.
        trained: Number of training images.
        others: Number of validation and test images.
        machine: The machine.
        at_least: Minimum number of views, even if they take longer or do not fit.
    """
    view, once = 2 * CHANNELS * max(trained, 1), 4 * CHANNELS * others  # bytes
    largest = {
        "longer than 10 minutes": (ENCODING_SECONDS / machine.seconds - others) / max(trained, 1),
        "more than half of the free memory": (FREE_SHARE * machine.memory - once) / view,
        "more than half of the free disk space": (FREE_SHARE * machine.disk - once) / view,
    }
    limit = min(largest, key=lambda name: largest[name])
    possible = max(1, int(largest[limit]))
    number = max(at_least, wanted if possible >= wanted else 2 ** (possible.bit_length() - 1))
    seconds = (trained * number + others) * machine.seconds
    return AffordableViews(number, seconds, limit if number < wanted else None)
