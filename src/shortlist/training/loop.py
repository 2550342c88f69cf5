"""The training loop: epochs, schedule, logs, checkpoints, validation and the final test."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from shortlist.batches.by_size import Images
from shortlist.bfloat16 import require_bfloat16
from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.data import ImageDataset, image_chunks
from shortlist.data.given_images import GivenImages, as_catalog
from shortlist.data.tables import write_table
from shortlist.distributed import ALONE, Processes
from shortlist.encoding import NonFiniteError
from shortlist.errors import ConfigError, Interrupted, RunError, in_all_processes, translate_arguments
from shortlist.evaluation import Evaluation
from shortlist.files import write_json
from shortlist.model import Embedder, GeM
from shortlist.progress import Display, default_display
from shortlist.threads import threads
from shortlist.training.baseline import baseline, baseline_name, improvement, with_baseline_name
from shortlist.training.checkpoint import TrainingState, delete_old_states, latest_state, save_state
from shortlist.training.components import Given, build_embedder, build_loss, build_transforms
from shortlist.training.datasets import EvalSet, check_images_exist, with_absolute_paths
from shortlist.training.durations import RemainingTime
from shortlist.training.folder import RunFolder
from shortlist.training.frozen import FrozenBackbone
from shortlist.training.initial_whitening import check_whitening, learn_whitening
from shortlist.training.interim_tests import INTERIM_TEST, with_interim_tests
from shortlist.training.learner import Learner, StepResult
from shortlist.training.plan import inference_batch_size, make_plan, run_workers
from shortlist.training.plan_description import describe_data, describe_needs
from shortlist.training.requirements import find_requirements
from shortlist.training.run_evaluation import build_encoder, evaluate_embedder
from shortlist.training.schedule import learning_rate_factor
from shortlist.training.stopping import StopRequest, report_resume_command
from shortlist.training.tracking import check_trackers, start_trackers

Batch = tuple[Tensor, Iterator[Images]]  # indices of images in the training catalog, and their pixels or features
FROZEN_CHECKPOINT = 250  # steps between checkpoints with a frozen backbone, whose epochs are short
FROZEN_MESSAGES = 20  # approximate number of messages about the losses of epochs, with a frozen backbone
PROGRESS_VALUES = ("epoch", "loss", "images_per_second")  # shown in the progress bar
ADVICE = "A smaller optimizer.lr, schedule.warmup or training.clip_norm often helps."


class Validation(NamedTuple):
    """A validation during training."""

    epoch: int
    step: int
    metrics: dict[str, float]
    last: bool  # whether it follows the last step


OnValidation = Callable[[Validation], None]


@translate_arguments(CONFIG_KEYS)
def train_run(
    config: RunConfig,
    path: Path | str,
    display: Display | None = None,
    given: Given | None = None,
    data: GivenImages | None = None,
    on_validation: OnValidation | None = None,
    processes: Processes = ALONE,
) -> RunFolder:
    """Train a new run, and evaluate it; `shortlist.train` also opens recipes and writes a report.

    Args:
        config: Configuration of the run.
        path: Folder of the run, which is created.
        display: Display for progress.
        given: Model and loss that are given in Python; the configuration must refer to them.
        data: Images to use instead of `data.source`. The folder of the run keeps a list of them.
        on_validation: Called after each validation, in the main process. An exception ends the training.
        processes: Processes that train the run together. All of them call this function; only the main process uses
            the folder and the display.

    Returns:
        The folder of the run.

    Raises:
        ShortlistError: The configuration, images or weights cannot be used.
        Interrupted: The user pressed Ctrl-C; `resume_run` continues the run.
    """
    folder, display = RunFolder(Path(path)), _display_of(processes, display)
    config = with_absolute_paths(config if data is None else folder.with_own_images(config))
    with _locked(folder, processes), threads(config.training.threads):
        processes.on_main(lambda: folder.begin(config))
        try:
            if data is not None:
                processes.on_main(lambda: write_table(as_catalog(data, folder.given_images), folder.images_file))
            trainer = Trainer(config, folder, display, given or Given(), on_validation, processes)
        except BaseException:
            if processes.is_main:
                folder.abandon()
            raise
        trainer.run()
    return folder


@translate_arguments(CONFIG_KEYS)
def resume_run(
    path: Path | str,
    display: Display | None = None,
    given: Given | None = None,
    on_validation: OnValidation | None = None,
    processes: Processes = ALONE,
) -> RunFolder:
    """Resume a run from its last checkpoint; the result is the same as that of an uninterrupted run.

    Args:
        path: Folder of the run.
        display: Display for progress.
        given: Model and loss, if they were given in Python when the run started.
        on_validation: See `train_run`. Validations after the last checkpoint are repeated.
        processes: See `train_run`. Their number may differ from that of the interrupted run.

    Returns:
        The folder of the run.

    Raises:
        RunError: The run cannot be resumed.
        Interrupted: The user pressed Ctrl-C.
    """
    folder, display = processes.on_main(lambda: RunFolder.open(Path(path))), _display_of(processes, display)
    with _locked(folder, processes):
        if processes.on_main(folder.evaluation_file.exists):
            display.message("This run is already finished.")
        else:
            config = processes.on_main(folder.config)
            with threads(config.training.threads):
                Trainer(config, folder, display, given or Given(), on_validation, processes).run()
    return folder


def _display_of(processes: Processes, display: Display | None) -> Display:
    """Return the display of the main process; the others show nothing."""
    return (display or default_display()) if processes.is_main else Display()


@contextmanager
def _locked(folder: RunFolder, processes: Processes) -> Iterator[None]:
    """Lock the folder of a run in the main process. Errors are raised in all processes, and say how to resume."""
    with ExitStack() as stack, report_resume_command(folder), processes.together():
        if processes.is_main:
            stack.enter_context(folder.locked())
        yield


class Trainer:
    """Trains one run, from the last checkpoint in its folder to the end."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        display: Display,
        given: Given,
        on_validation: OnValidation | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.config, self.folder, self.display = config, folder, display
        self.given, self.on_validation, self.processes = given, on_validation, processes
        check_trackers(config.tracking)
        self.accelerator = Accelerator()
        self.device = self.accelerator.device
        if self.device.type == "cpu":
            if config.training.precision == "float16":
                raise ConfigError("training.precision=float16 requires a GPU. Use float32 or bfloat16.")
            if config.training.precision == "bfloat16":
                require_bfloat16()
        self.processes.on_main(lambda: check_images_exist(config))  # before weights are downloaded
        embedder = build_embedder(config, given=given.model)
        build_loss(config.loss, torch.arange(2), embedder.dim, given.loss)  # report errors before images are opened
        self.plan = plan = self.processes.on_main(lambda: make_plan(config, display, folder))
        check_whitening(config, embedder, plan.train)
        if config.frozen:  # features are small: each process gets its share of a batch as a single chunk
            share = math.ceil(plan.sampler.batch_size / self.processes.number)
            config = config.with_changes(batch={"chunk_size": share})
        self.learner = Learner(config, self.device, plan.classes, embedder, given.loss, self.processes)
        self.frozen: FrozenBackbone | None = None
        self.train_transform, _ = build_transforms(config, self.learner.embedder)
        self.step = 0  # number of completed steps
        self.best: float | None = None  # first metric of the best validation
        self.losses: list[float] = []  # losses of the steps of this epoch
        self.remaining = RemainingTime(plan)
        self.processes.on_main(self._report_plan)

    def _report_plan(self) -> None:
        """Record and show what the run will do."""
        plan, display = self.plan, self.display
        left_out = {"missing": list(plan.catalog.missing), "classes_too_small": plan.classes_left_out}
        facts = {"seed": self.config.training.seed, "batch_size": plan.sampler.batch_size}
        self.folder.record_facts(plan.catalog.fingerprint(), self.processes.number, **facts, **left_out)
        for text in describe_data(plan, self.folder.path):
            display.message(text)
        counts = {"missing": len(plan.catalog.missing), "unreadable": len(plan.unreadable)}
        display.message(f"{plan.total_steps:,} steps; {plan.sampler}", steps=plan.total_steps, **counts)
        for path, reason in plan.unreadable:
            display.message(f"unreadable: {path}: {reason}", path=path, reason=reason)
        for remark in (*plan.remarks, *self._idle_processes()):
            display.message(remark, remark=remark)
        if display.shows:  # tracing takes a moment
            with suppress(Exception):  # an estimate must not stop a run
                embedder, processes = self.learner.embedder, self.processes
                number, here = processes.number, processes.on_this_machine
                needs = find_requirements(plan, embedder, self.learner.loss, processes=number, sharing=here)
                facts = {"memory": round(needs.peak), "operations": round(needs.step_work)}
                display.message(describe_needs(plan, needs), **facts)

    def _idle_processes(self) -> Iterator[str]:
        """Yield a remark if the chunks of a batch are too few for all processes to embed one."""
        batch, size, number = self.plan.sampler.batch_size, self.config.batch.chunk_size, self.processes.number
        if size != "auto" and not self.config.frozen and (chunks := math.ceil(batch / size)) < number:
            yield (
                f"With batch.chunk_size={size}, a batch of {batch} images has too few chunks ({chunks}) for {number} "
                f"processes: {number - chunks} of them embed nothing. Set batch.chunk_size={math.ceil(batch / number)} "
                "or smaller."
            )

    def run(self) -> None:
        """Train the remaining steps, then test."""
        try:
            self.processes.on_main(self._begin)
            self._copy_state()
            self._open_features()  # cached by the main process
            self._train()
            self.processes.on_main(self._finish)
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def _begin(self) -> None:
        """Restore the last checkpoint, or initialise the linear layer; and test, if the run has not started."""
        restored = self._restore()
        self._open_features()
        if not restored and self.config.model.whitening != "none":
            self._whiten()
        if self.step == 0 and self.config.evaluation.before:
            with self.remaining.evaluation(self.plan.images_tested):
                embedder, name = baseline(self.config, self.learner.result, self.given.model)
                tested = self._test(embedder, name, distractors=False)
            _write_evaluations([with_baseline_name(each, name) for each in tested], self.folder.before_file)

    def _open_features(self) -> None:
        """Open the cached features of a frozen backbone, after encoding those that are missing."""
        if self.config.frozen and self.frozen is None:
            self.frozen = FrozenBackbone(self.plan, self.folder, self.learner, self.display)

    def _copy_state(self) -> None:
        """Copy the state of the main process to all others, and verify it."""
        state = self.learner.state(self.step)
        step, facts = self.processes.broadcast((self.step, state.facts))
        tensors = self.processes.broadcast_tensors(state.tensors)
        if not self.processes.is_main:
            self.step = step
            self.learner.load(TrainingState(step, dict(tensors), facts))
        self.processes.verify_same(self.learner.state(step).tensors)

    def _whiten(self) -> None:
        """Initialise the linear layer by whitening, and save a checkpoint so that it is not learned again."""
        with self.display.task(f"{self.config.model.whitening} whitening of training images", "images") as progress:
            if self.frozen is not None:
                layer = self.frozen.learn_whitening()
            else:
                workers, size = run_workers(self.config), inference_batch_size(self.config)
                layer = learn_whitening(self.config, self.learner.embedder, self.plan.train, workers, size, progress)
        self.learner.set_linear_layer(*layer)
        self._write_checkpoint()

    def _train(self) -> None:
        plan, frozen = self.plan, self.frozen is not None
        every = self.config.training.checkpoint_every or (FROZEN_CHECKPOINT if frozen else None)
        with StopRequest(self.display) as stop, self.display.task("training", "steps") as advance:
            advance(self.step, plan.total_steps)
            for batch, chunks in self._batches():
                with self.remaining.step():
                    record = self._train_step(batch, chunks)
                shown = {name: record[name] for name in PROGRESS_VALUES}
                advance(self.step, plan.total_steps, seconds_left=self.remaining.after(self.step), **shown)
                end_of_epoch = plan.ends_epoch(self.step)
                if end_of_epoch or plan.validates(self.step):
                    with self.remaining.evaluation(plan.images_evaluated(self.step)):
                        self.processes.on_main(partial(self._after_step, end_of_epoch))
                if end_of_epoch:
                    self.losses.clear()
                stopped = any(requested for (requested,) in self.processes.gather(stop.requested))
                end = self._is_last_step if frozen else end_of_epoch
                if stopped or end or (every and self.step % every == 0):
                    self._save()
                if stopped:
                    text = f"Stopped after step {self.step}. Resume with: {self.folder.resume_command}"
                    raise in_all_processes(Interrupted(text))

    def _batches(self) -> Iterator[Batch]:
        """Iterate over the remaining batches, with the images or features that this process embeds.

        Images are decoded in advance, even across epochs.
        """
        first, parts = self.step, self.learner.large_batch.parts
        if self.frozen is not None:
            yield from self.frozen.batches(first, parts)
            return
        keys = (
            [(epoch, index) for index in part.tolist()]
            for epoch, batch in self.plan.batches(first)
            for part in parts(batch)
        )
        dataset = ImageDataset(self.plan.train, self.train_transform, self.config.training.seed)
        workers = run_workers(self.config, self.processes.on_this_machine)
        chunks = image_chunks(dataset, keys, workers, pin_memory=self.device.type == "cuda")
        for _, batch in self.plan.batches(first):
            yield batch, itertools.islice(chunks, len(parts(batch)))

    def _train_step(self, batch: Tensor, chunks: Iterator[Images]) -> dict[str, Any]:
        started = time.perf_counter()
        plan, learner = self.plan, self.learner
        factor = learning_rate_factor(self.config.schedule, self.step, plan.steps_per_epoch, plan.total_steps)
        progress = self.step / plan.total_steps
        result = learner.train_step(self.step, chunks, plan.labels(batch), factor, progress)
        if not result.finite:
            raise in_all_processes(self.processes.on_main(lambda: self._failure(result, batch)))
        self.step += 1
        record: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "epoch": self._epoch,
            "loss": result.output.loss.item(),
            "lr": self.config.optimizer.lr * factor,
            "gradient_norm": result.gradient_norm.item(),
            "images_per_second": len(batch) / (time.perf_counter() - started),
            "chunk_size": learner.large_batch.chunk_size,
            "graphs_kept": result.output.kept,
        }
        if isinstance(learner.embedder.pooling, GeM):
            record["gem_p"] = learner.embedder.pooling.p.mean().item()
        self._record(record)
        self.losses.append(record["loss"])
        return record

    @property
    def _epoch(self) -> int:
        """Epoch of the last completed step, from 1."""
        return self.plan.epoch(self.step)

    @property
    def _is_last_step(self) -> bool:
        return self.step == self.plan.total_steps

    def _after_step(self, end_of_epoch: bool) -> None:
        """Report the loss of an epoch at its end, and validate and test if due."""
        epoch, validation, texts = self._epoch, self.plan.validation, []
        facts: dict[str, Any] = {"epoch": epoch, "step": self.step}
        if end_of_epoch and self._reports_epoch:
            facts["loss"] = statistics.fmean(self.losses)
            texts.append(f"loss {facts['loss']:.4f}")
        if validation is not None and self.plan.validates(self.step):
            text, facts["validation"] = self._validate(validation)
            texts.append(text)
        if texts:
            where = f"epoch {epoch}" if end_of_epoch else f"step {self.step}"
            self.display.message(f"{where}: {', '.join(texts)}", **facts)
        if self.on_validation is not None and "validation" in facts:
            self.on_validation(Validation(epoch, self.step, facts["validation"], self._is_last_step))
        if self.plan.tests(self.step):
            self._test(self.learner.result, INTERIM_TEST, distractors=False, intervals=False)

    @property
    def _reports_epoch(self) -> bool:
        """Whether to print the loss of this epoch. With a frozen backbone, epochs are short, so only some are."""
        every = math.ceil(self.plan.epoch(self.plan.total_steps) / FROZEN_MESSAGES) if self.config.frozen else 1
        return self._epoch % every == 0 or self._is_last_step

    def _validate(self, validation: EvalSet) -> tuple[str, dict[str, float]]:
        """Validate, and save the embedder if it is the best so far. Return the result as text, and all metrics."""
        (measured,) = self._measure(self.learner.result, validation, validation=True)
        metrics, values = measured.metrics, measured.values
        self._record({"kind": "validation", "step": self.step, "epoch": self._epoch, **values})
        first = next(iter(metrics))
        text = f"validation {first} {metrics[first]}"
        if self.best is None or values[first] > self.best:
            self.best = values[first]
            self.learner.result.save(self.folder.best)
            text += ", the best so far"
        return text, values

    def _finish(self) -> None:
        """Save the best embedder, or the last one if there is no validation, and test it."""
        result = self.learner.result
        if self.best is not None:
            result = Embedder.load(self.folder.best, self.given.model).to(self.device)
        build_encoder(self.config, result).save(self.folder.path)
        if not self.plan.eval_sets and not self.config.data.withhold_test:
            self.display.message("The data contain no test classes, so the embedder was not tested.")
        again = {"on_missing": f"{self.folder.evaluate_command} --on-missing"}  # needs no further training
        with translate_arguments(again, "{name} {value}"):
            tested = self._test(result, "test")
        with_remarks = with_interim_tests(tested, self.folder.metrics())
        for before, measured in zip(tested, with_remarks, strict=True):
            if measured is not before:
                self.display.message(f"{measured.data}: {measured.remarks[-1]}", data=measured.data)
        self._compare_with_baseline(with_remarks)
        _write_evaluations(with_remarks, self.folder.evaluation_file)  # last: the file marks the run as finished

    def _compare_with_baseline(self, tested: list[Evaluation]) -> None:
        found = self.folder.evaluations(before=True) if self.folder.before_file.exists() else []
        before = {each.data: each for each in found}
        for after in tested:
            if after.data in before and (text := improvement(before[after.data], after)):
                self.display.message(text, data=after.data, baseline=baseline_name(before[after.data].remarks))

    def _test(
        self, embedder: Embedder, name: str, *, distractors: bool = True, intervals: bool = True
    ) -> list[Evaluation]:
        """Evaluate on all test sets. Before and during training, distractors are omitted, because there are many."""
        tested: list[Evaluation] = []
        for eval_set in self.plan.eval_sets:
            folder = self.folder if distractors else None
            for measured in self._measure(embedder, eval_set, folder, intervals=intervals):
                tested.append(measured)
                facts = {"step": self.step, "epoch": self._epoch, "data": measured.data}
                self._record({"kind": name, **facts, **measured.values})
                reported = ", ".join(f"{metric} {estimate}" for metric, estimate in measured.headline.items())
                text = f"{name}, {measured.data}: {reported}"
                self.display.message(text, evaluation=name, data=measured.data, **measured.values)
        return tested

    def _measure(
        self, embedder: Embedder, eval_set: EvalSet, folder: RunFolder | None = None, **settings: Any
    ) -> list[Evaluation]:
        try:
            features = None if self.frozen is None else self.frozen.test_features
            return evaluate_embedder(
                embedder, eval_set, self.config, self.display, folder, features=features, **settings
            )
        except NonFiniteError:
            file = save_state(self.folder.failed, self.learner.state(self.step))
            raise RunError(
                f"The embeddings are not finite after step {self.step}, so the run was stopped. The weights are in "
                f"{file}. {ADVICE}"
            ) from None

    def _record(self, record: dict[str, Any]) -> None:
        """Log a record to `metrics.jsonl` and the trackers, in the main process."""
        if not self.processes.is_main:
            return
        self.folder.log(record)
        kind = record["kind"].replace(" ", "_")
        if len(self.plan.eval_sets) > 1 and "data" in record:
            kind = f"{kind}/{record['data']}"
        scalars = {f"{kind}/{name}": value for name, value in record.items() if isinstance(value, float)}
        self.accelerator.log(scalars, step=record["step"])

    def _save(self) -> None:
        """Save a checkpoint, after verifying that all processes have the same state."""
        self.processes.verify_same(self.learner.state(self.step).tensors)
        self.processes.on_main(self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        state = self.learner.state(self.step)
        save_state(self.folder.checkpoints, replace(state, facts={**state.facts, "best": self.best}))

    def _restore(self) -> bool:
        """Restore the last checkpoint and discard later records; return whether there is a checkpoint."""
        state = latest_state(self.folder.checkpoints)
        if state is not None:
            self.learner.load(state)
            self.step, self.best = state.step, state.facts["best"]
            self.display.message(f"Resuming after step {self.step} of {self.plan.total_steps}.", step=self.step)
            delete_old_states(self.folder.checkpoints)  # in case this failed before
        self.folder.discard_records_after(self.step or -1)  # the evaluation before step 1 is repeated
        start = self.step - self.step % self.plan.steps_per_epoch  # first step of the epoch
        steps = (each for each in self.folder.metrics() if each["kind"] == "step" and each["step"] > start)
        self.losses = [each["loss"] for each in steps]
        start_trackers(self.accelerator, self.config, self.folder, self.step)
        return state is not None

    def _failure(self, result: StepResult, batch: Tensor) -> RunError:
        """Save the weights before a step whose loss or gradient is not finite, and its batch, for inspection."""
        state = self.learner.state(self.step)
        tensors = {"batch.embeddings": result.output.embeddings, "batch.labels": self.plan.labels(batch)}
        file = save_state(self.folder.failed, replace(state, tensors={**state.tensors, **tensors}))
        loss, norm = result.output.loss.item(), result.gradient_norm.item()
        facts = {
            "step": self.step + 1,
            "loss": str(loss),  # JSON has no NaN
            "gradient_norm": str(norm),
            "images": [str(self.plan.train.paths[index]) for index in batch.tolist()],
        }
        write_json(file.with_name("step.json"), facts)
        return RunError(
            f"Step {self.step + 1} has loss {loss} and gradient norm {norm}, so the run was stopped. The weights "
            f"before this step, its embeddings and the names of its images are in {file.parent}. {ADVICE}"
        )


def _write_evaluations(evaluations: list[Evaluation], file: Path) -> None:
    write_json(file, [each.to_dict() for each in evaluations])
