"""The duration of a run: measured before it starts, and estimated while it runs."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shortlist.batches.by_size import Images, by_size
from shortlist.batches.large_batch import LargeBatchStep
from shortlist.data import ImageDataset, Transform, image_chunks
from shortlist.distributed import ALONE
from shortlist.encoding.embed import MAX_PIXELS
from shortlist.model import Embedder
from shortlist.progress import Clock, format_duration
from shortlist.seeds import seeded
from shortlist.training.components import build_transforms
from shortlist.training.learner import Learner
from shortlist.training.plan import Plan, inference_batch_size, run_workers
from shortlist.training.requirements import TRAINING_WORK, Requirements

MEASURED_STEPS = 29  # number of measured training steps on features
MEASURED_SECONDS = 6.0  # measured time of training on images; half of it for embedding


@dataclass(frozen=True)
class Durations:
    """Measured durations in seconds.

    Args:
        step: Duration of a training step.
        image: Duration of embedding an image, in evaluations or to encode views for a frozen backbone.
    """

    step: float
    image: float

    def left(self, plan: Plan, step: int) -> float:
        """Return the remaining duration of a run after `step` steps: its other steps, evaluations and final test."""
        return (plan.total_steps - step) * self.step + plan.images_evaluated_after(step) * self.image

    def of(self, plan: Plan) -> dict[str, float]:
        """Return the durations of the parts of a run.

        With a frozen backbone, validation and test images are encoded once, and later evaluations take no time.
        """
        config, epochs = plan.config, plan.total_steps / plan.steps_per_epoch
        if config.frozen:
            views = len(plan.train) * config.data.number_of_views
            encoded = views + plan.images_without_views
            parts = {"encoding": encoded * self.image, "steps": plan.total_steps * self.step}
        else:
            before = plan.images_tested * self.image if config.evaluation.before else 0.0
            steps = plan.total_steps * self.step
            parts = {"steps": steps, "evaluations": before + self.left(plan, 0) - steps}
        whole = sum(parts.values())
        return {"per step": self.step, "per epoch": whole / max(epochs, 1), **parts, "until the end": whole}

    def estimate(self, plan: Plan) -> str:
        """Describe the duration of a run and of its parts in one line."""
        parts, steps = self.of(plan), f"{plan.total_steps:,} steps"
        named = {"encoding": "encoding", "steps": steps, "evaluations": "evaluations"}
        return describe_parts({text: parts[name] for name, text in named.items() if name in parts})


def describe_parts(seconds: Mapping[str, float]) -> str:
    """Describe the duration of a whole, and of its parts.

    Example:
        >>> describe_parts({"encoding": 190, "1,000 steps": 170})
        'about 6 min 00 s: encoding about 3 min 10 s, 1,000 steps about 2 min 50 s'
    """
    parts = ", ".join(f"{name} about {format_duration(each)}" for name, each in seconds.items())
    return f"about {format_duration(sum(seconds.values()))}: {parts}"


class RemainingTime:
    """Estimate of the remaining time of a run, from the durations of its steps and evaluations so far.

    Args:
        plan: Plan of the run.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, plan: Plan, clock: Clock = time.monotonic) -> None:
        self.plan, self.clock = plan, clock
        self._steps: list[float] = []  # the first includes preparations
        self._images, self._evaluating = 0, 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a training step."""
        started = self.clock()
        yield
        self._steps.append(self.clock() - started)

    @contextmanager
    def evaluation(self, images: int) -> Iterator[None]:
        """Measure an evaluation that embeds this many images."""
        started = self.clock()
        yield
        self._images += images
        self._evaluating += self.clock() - started

    def after(self, step: int) -> float:
        """Return the number of seconds that remain after `step` steps. At least one step must have been measured."""
        per_step = statistics.fmean(self._steps[1:] or self._steps)
        return Durations(per_step, self._evaluating / max(self._images, 1)).left(self.plan, step)


def measure_durations(
    plan: Plan, embedder: Embedder, needs: Requirements, clock: Clock = time.perf_counter
) -> Durations:
    """Measure some training steps and the embedding of some images, on this machine.

    Steps on images, including decoding, are measured with parts of the first batches, and the loss with a whole batch.

    Args:
        plan: Plan of the run.
        embedder: Embedder of the run; its weights do not matter, and do not change.
        needs: Requirements of the run.
        clock: Function that returns the time in seconds.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learner = Learner(plan.config, device, plan.classes, embedder)
    train, test = build_transforms(plan.config, learner.embedder)
    if plan.config.frozen:
        step = seconds_per_step(learner, plan.first_labels(), clock=clock) or 0.0
        return Durations(step, _seconds_per_embedding(plan, learner, train, clock))
    step = _seconds_per_training_image(plan, learner, needs, train, clock) * needs.batch
    return Durations(step + _seconds_of_loss(plan, learner, clock), _seconds_per_embedding(plan, learner, test, clock))


def _seconds_per_training_image(
    plan: Plan, learner: Learner, needs: Requirements, transform: Transform, clock: Clock
) -> float:
    """Measure training on two chunks at a time for some seconds, after a warm-up."""
    size, per_class = needs.chunk, plan.config.batch.per_class
    number = min(needs.batch, max(1, 2 * size // per_class) * per_class)
    learner.large_batch.chunk_size, learner.large_batch.keep_graphs = size, needs.kept > 0

    def batches() -> Iterator[Tensor]:
        for epoch in itertools.count():
            yield from plan.sampler.batches(epoch)[:, :number]

    def steps(chunks: Iterator[Images]) -> Iterator[int]:
        for step, batch in enumerate(batches()):
            part = itertools.islice(chunks, -(-number // size))
            learner.train_step(step, part, plan.labels(batch), lr_factor=0.0)
            yield number

    with closing(_load(plan, transform, (part for batch in batches() for part in torch.split(batch, size)))) as chunks:
        seconds = _seconds_per_item(steps(chunks), MEASURED_SECONDS, clock)
    embedded_twice = 1 - needs.kept / needs.share if needs.kept else 0.0  # otherwise, the measurement includes it
    return seconds * (1 + embedded_twice / TRAINING_WORK)


def _seconds_per_embedding(plan: Plan, learner: Learner, transform: Transform, clock: Clock) -> float:
    """Measure the embedding of training images, after a warm-up."""
    embedder, size = learner.embedder, inference_batch_size(plan.config)
    images = torch.arange(len(plan.train)).repeat(-(-1000 * size // len(plan.train)))

    def embed(chunks: Iterator[Images]) -> Iterator[int]:
        for chunk in chunks:
            with torch.inference_mode():
                by_size(lambda same: embedder(same.to(learner.device)), chunk, MAX_PIXELS)
            yield len(chunk)

    embedder.eval()
    try:
        with closing(_load(plan, transform, torch.split(images, size))) as chunks:
            return _seconds_per_item(embed(chunks), MEASURED_SECONDS / 2, clock)
    finally:
        embedder.train()


def _seconds_of_loss(plan: Plan, learner: Learner, clock: Clock) -> float:
    """Measure the loss of a whole batch of random vectors, after a warm-up; 0 for a loss that refuses them."""
    labels = plan.first_labels().to(learner.device)
    vectors = torch.nn.functional.normalize(torch.randn(len(labels), learner.embedder.dim, device=learner.device))

    def losses() -> Iterator[int]:
        while True:
            loss = learner.loss(vectors.requires_grad_(), labels)
            if loss.requires_grad:
                loss.backward()
            yield 1

    try:
        return _seconds_per_item(losses(), 0.5, clock)
    except Exception:  # a user-defined loss
        return 0.0


def _load(plan: Plan, transform: Transform, parts: Iterable[Tensor]) -> Generator[Images, None, None]:
    dataset = ImageDataset(plan.train, transform, plan.config.training.seed)
    keys = ([(0, index) for index in part.tolist()] for part in parts)
    yield from image_chunks(dataset, keys, run_workers(plan.config))


def _seconds_per_item(counts: Iterator[int], seconds: float, clock: Clock) -> float:
    """Time an iterator over numbers of items for some seconds, without its first number, which includes a warm-up."""
    next(counts)
    started, done = clock(), 0
    for count in counts:
        done += count
        if clock() - started >= seconds:
            break
    return (clock() - started) / max(done, 1)


def seconds_per_step(
    learner: Learner, labels: Tensor, number: int | None = None, clock: Clock = time.monotonic
) -> float | None:
    """Measure the time of a training step on random features, without changing the learner.

    Args:
        learner: The learner of the run.
        labels: Labels of a batch.
        number: Number of steps to measure. Default: `MEASURED_STEPS`.
        clock: Function that returns the time in seconds.

    Returns:
        The time in seconds; None for a loss that cannot be copied.
    """
    try:
        head, loss = copy.deepcopy((learner.trained, learner.loss))
    except Exception:  # a user-defined loss
        return None
    with seeded(0, learner.device):
        features = torch.randn(len(labels), learner.embedder.layout.channels)
        step = LargeBatchStep(head, loss, len(labels), keep_graphs=True, processes=ALONE)
        times = []
        for _ in range(1 + (number or MEASURED_STEPS)):  # the first step includes preparations
            started = clock()
            step(features, labels)
            times.append(clock() - started)
    return statistics.median(times[1:])
