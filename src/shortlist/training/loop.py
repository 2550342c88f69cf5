"""A run: epochs, schedule, logs, checkpoints, and the number at the end."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from shortlist.batches.large_batch import AUTOMATIC_CHUNK
from shortlist.batches.sizes import Images
from shortlist.config import RunConfig
from shortlist.config.arguments import ARGUMENTS
from shortlist.data import ImageDataset, image_chunks
from shortlist.encoding import NotFinite
from shortlist.errors import ConfigError, Interrupted, RunError, translate_arguments
from shortlist.evaluation import Evaluation
from shortlist.files import write_text_atomically
from shortlist.model import Embedder, GeM
from shortlist.process import threads
from shortlist.processor import require_bfloat16
from shortlist.progress import Display, default_display
from shortlist.training.checkpoint import latest_state, save_state
from shortlist.training.evaluation import evaluate_embedder
from shortlist.training.folder import RunFolder
from shortlist.training.learner import Learned, Learner
from shortlist.training.losses import build_loss
from shortlist.training.opening import EvalSet, with_absolute_paths
from shortlist.training.parts import build_embedder, build_transforms
from shortlist.training.plan import decoding_workers, images_at_once, make_plan
from shortlist.training.schedule import learning_rate_factor
from shortlist.training.stopping import StopRequest, report_resume_command
from shortlist.training.whitening import check_whitening, learn_whitening

Batch = tuple[Tensor, Iterator[Images]]  # indices of the images in the training catalog, and their pixels by chunks
SHOWN = ("epoch", "loss", "images_per_second")  # of a step, while it trains
REMEDY = "A smaller optimizer.lr, schedule.warmup or training.clip_norm often helps."


@translate_arguments(ARGUMENTS)
def train(config: RunConfig, path: Path | str, display: Display | None = None) -> RunFolder:
    """Train a run in a new folder, to the end.

    Raises:
        ShortlistError: something that a user can put right.
        Interrupted: by Ctrl-C; `resume` goes on.
    """
    folder, config = RunFolder(Path(path)), with_absolute_paths(config)
    with folder.locked(), report_resume_command(folder), threads(config.training.threads):
        folder.begin(config)
        try:
            trainer = Trainer(config, folder, display or default_display())
        except BaseException:
            folder.abandon()
            raise
        trainer.run()
    return folder


@translate_arguments(ARGUMENTS)
def resume(path: Path | str, display: Display | None = None) -> RunFolder:
    """Go on with a run from its last checkpoint, to the end, as if it had never stopped."""
    folder, display = RunFolder.open(Path(path)), display or default_display()
    with folder.locked(), report_resume_command(folder):
        if folder.evaluation_file.exists():
            display.message("This run is finished already.")
        else:
            config = folder.config()
            with threads(config.training.threads):
                Trainer(config, folder, display).run()
    return folder


class Trainer:
    """One run, from where its folder stands to the end."""

    def __init__(self, config: RunConfig, folder: RunFolder, display: Display) -> None:
        self.config, self.folder, self.display = config, folder, display
        self.accelerator = Accelerator(log_with="tensorboard", project_dir=str(folder.path))
        if self.accelerator.num_processes > 1:
            raise ConfigError("Training in several processes at once is not possible yet. Start one.")
        self.device = self.accelerator.device
        if self.device.type == "cpu":
            if config.training.precision == "float16":
                raise ConfigError("training.precision=float16 needs a GPU. Use float32 or bfloat16.")
            if config.training.precision == "bfloat16":
                require_bfloat16()
        embedder = build_embedder(config)  # and the loss, tried: what is misspelt in either costs no look at the images
        build_loss(config.loss, torch.arange(2), embedder.dim)
        self.plan = plan = make_plan(config, display, folder)
        check_whitening(config, embedder, plan.train)
        self.learner = Learner(config, self.device, plan.classes, embedder)
        self.train_transform, self.test_transform = build_transforms(config, self.learner.embedder)
        kept_out = {"missing": list(plan.catalog.missing), "classes_too_small": plan.classes_left_out}
        folder.check_facts(plan.catalog.fingerprint(), seed=config.training.seed, **kept_out)
        left_out = {"missing": len(plan.catalog.missing), "unreadable": len(plan.unreadable)}
        display.message(f"{plan.total_steps:,} steps; {plan.sampler}", steps=plan.total_steps, **left_out)
        for remark in plan.remarks:
            display.message(remark, remark=remark)
        self.step = 0  # steps taken
        self.best: float | None = None  # the first metric of the best validation

    def run(self) -> None:
        """Take the remaining steps, then test."""
        try:
            if not self._restore() and self.config.model.whitening != "none":
                self._whiten()
            if self.step == 0 and self.config.evaluation.before:
                self._test(self.learner.result, self.folder.before_file, "before training", distractors=False)
            self._train()
            self._finish()
        finally:
            self.accelerator.end_training()

    def _whiten(self) -> None:
        """Begin the linear layer with learned whitening, and keep it: it need not be learned twice."""
        with self.display.task(f"{self.config.model.whitening} whitening of training images", "images") as progress:
            workers, at_once = decoding_workers(self.config), images_at_once(self.config)
            learned = learn_whitening(self.config, self.learner.embedder, self.plan.train, workers, at_once, progress)
        self.learner.set_linear(*learned)
        self._save()

    def _train(self) -> None:
        plan, every = self.plan, self.config.training.checkpoint_every
        with StopRequest(self.display) as stop, self.display.task("training", "steps") as advance:
            advance(self.step, plan.total_steps)
            for batch, chunks in self._batches():
                record = self._train_step(batch, chunks)
                advance(self.step, plan.total_steps, **{name: record[name] for name in SHOWN})
                end_of_epoch = self.step % plan.steps_per_epoch == 0 or self.step == plan.total_steps
                if end_of_epoch:
                    self._end_epoch()
                if stop.asked or end_of_epoch or (every and self.step % every == 0):
                    self._save()
                if stop.asked:
                    raise Interrupted(f"Stopped after step {self.step}. To go on: {self.folder.resume_command}")

    def _batches(self) -> Iterator[Batch]:
        """The batches from the present step to the last, decoded ahead, also over the ends of epochs."""
        first, size = self.step, self.config.batch.chunk_size
        decoded_at_once = AUTOMATIC_CHUNK.get(self.device.type, 64) if size == "auto" else size
        keys = (
            [(epoch, index) for index in chunk.tolist()]
            for epoch, batch in self.plan.batches(first)
            for chunk in torch.split(batch, decoded_at_once)
        )
        dataset = ImageDataset(self.plan.train, self.train_transform, self.config.training.seed)
        chunks = image_chunks(dataset, keys, decoding_workers(self.config), pin_memory=self.device.type == "cuda")
        for _, batch in self.plan.batches(first):
            yield batch, itertools.islice(chunks, math.ceil(len(batch) / decoded_at_once))

    def _train_step(self, batch: Tensor, chunks: Iterator[Images]) -> dict[str, Any]:
        started = time.perf_counter()
        plan, learner = self.plan, self.learner
        labels = torch.from_numpy(plan.train.labels[batch.numpy()])
        factor = learning_rate_factor(self.config.schedule, self.step, plan.steps_per_epoch, plan.total_steps)
        learned = learner.learn(self.step, chunks, labels, factor)
        if not learned.finite:
            raise self._failure(learned, batch)
        self.step += 1
        record = {
            "kind": "step",
            "step": self.step,
            "epoch": self._epoch,
            "loss": learned.out.loss.item(),
            "lr": self.config.optimizer.lr * factor,
            "gradient_norm": learned.gradient_norm.item(),
            "images_per_second": len(batch) / (time.perf_counter() - started),
            "chunk_size": learner.large_batch.chunk_size,
            "graphs_kept": learned.out.kept,
        }
        if isinstance(learner.embedder.pooling, GeM):
            record["gem_p"] = learner.embedder.pooling.p.mean().item()
        self._record(record)
        return record

    @property
    def _epoch(self) -> int:
        """The epoch of the last step taken, from 1."""
        return math.ceil(self.step / self.plan.steps_per_epoch)

    def _end_epoch(self) -> None:
        """Validate, and keep the embedder if it is the best so far."""
        epoch, validation = self._epoch, self.plan.validation
        losses = [each["loss"] for each in self.folder.metrics() if each["kind"] == "step" and each["epoch"] == epoch]
        loss = sum(losses) / len(losses)
        text, facts = f"epoch {epoch}: loss {loss:.4f}", {"epoch": epoch, "step": self.step, "loss": loss}
        last = self.step == self.plan.total_steps
        if validation is not None and (last or epoch % self.config.training.validate_every == 0):
            (measured,) = self._measure(self.learner.result, validation, validation=True)
            metrics, values = measured.metrics, measured.values
            self._record({"kind": "validation", "step": self.step, "epoch": epoch, **values})
            first = next(iter(metrics))
            text, facts = f"{text}, validation {first} {metrics[first]}", {**facts, "validation": values}
            if self.best is None or values[first] > self.best:
                self.best = values[first]
                self.learner.result.save(self.folder.best)
                text += ", the best so far"
        self.display.message(text, **facts)

    def _finish(self) -> None:
        """Keep the best embedder by validation, or the last where nothing was validated, and test it once."""
        result = self.learner.result if self.best is None else Embedder.load(self.folder.best).to(self.device)
        result.save(self.folder.path)
        if not self.plan.eval_sets:
            self.display.message("There are no test classes, so nothing was tested.")
        later = {"on_missing": f"{self.folder.evaluate_command} --on-missing"}  # nothing need be trained again
        with translate_arguments(later, "{name} {value}"):
            self._test(result, self.folder.evaluation_file, "test")

    def _test(self, embedder: Embedder, file: Path, name: str, *, distractors: bool = True) -> None:
        """Measure on all that there is to test on; distractors are many, so not before training."""
        tested: list[Evaluation] = []
        for eval_set in self.plan.eval_sets:
            for measured in self._measure(embedder, eval_set, self.folder if distractors else None):
                tested.append(measured)
                self._record({"kind": name, "step": self.step, "data": measured.data, **measured.values})
                reported = ", ".join(f"{metric} {estimate}" for metric, estimate in measured.headline.items())
                text = f"{name}, {measured.data}: {reported}"
                self.display.message(text, evaluation=name, data=measured.data, **measured.values)
        found = [measured.to_dict() for measured in tested]
        write_text_atomically(file, json.dumps(found, indent=2) + "\n")  # the last thing that a run does

    def _measure(
        self, embedder: Embedder, eval_set: EvalSet, folder: RunFolder | None = None, *, validation: bool = False
    ) -> list[Evaluation]:
        try:
            return evaluate_embedder(embedder, eval_set, self.config, self.display, folder, validation=validation)
        except NotFinite:
            file = save_state(self.folder.failed, self.learner.state(self.step))
            raise RunError(
                f"After step {self.step} the embeddings are not finite, and the run was stopped. The weights are in "
                f"{file}. {REMEDY}"
            ) from None

    def _record(self, record: dict[str, Any]) -> None:
        self.folder.log(record)
        kind = record["kind"].replace(" ", "_")
        if len(self.plan.eval_sets) > 1 and "data" in record:
            kind = f"{kind}/{record['data']}"
        scalars = {f"{kind}/{name}": value for name, value in record.items() if isinstance(value, float)}
        self.accelerator.log(scalars, step=record["step"])

    def _save(self) -> None:
        state = self.learner.state(self.step)
        save_state(self.folder.checkpoints, replace(state, facts={**state.facts, "best": self.best}))
        self.accelerator.get_tracker("tensorboard", unwrap=True).flush()

    def _restore(self) -> bool:
        """Go to the last checkpoint, where there is one, and forget what was logged after it."""
        state = latest_state(self.folder.checkpoints)
        if state is not None:
            self.learner.load(state)
            self.step, self.best = state.step, state.facts["best"]
            self.display.message(f"Going on after step {self.step} of {self.plan.total_steps}.", step=self.step)
        self.folder.forget_after(self.step or -1)  # what came before the first step is done again
        purge = {"tensorboard": {"purge_step": self.step + 1}}
        self.accelerator.init_trackers("tensorboard", init_kwargs=purge)
        return state is not None

    def _failure(self, learned: Learned, batch: Tensor) -> RunError:
        """Save what is needed to look at a step without a finite loss or gradient; the weights are those before it."""
        state, train = self.learner.state(self.step), self.plan.train
        tensors = {
            "batch.embeddings": learned.out.embeddings,
            "batch.labels": torch.from_numpy(train.labels[batch.numpy()]),
        }
        file = save_state(self.folder.failed, replace(state, tensors={**state.tensors, **tensors}))
        loss, norm = learned.out.loss.item(), learned.gradient_norm.item()
        facts = {
            "step": self.step + 1,
            "loss": str(loss),  # JSON has no nan
            "gradient_norm": str(norm),
            "images": [str(train.paths[index]) for index in batch.tolist()],
        }
        write_text_atomically(file.with_name("step.json"), json.dumps(facts, indent=2) + "\n")
        return RunError(
            f"Step {self.step + 1} gave the loss {loss} and a gradient of length {norm}, and the run was stopped. The "
            f"weights before it, its embeddings and the names of its images are in {file.parent}. {REMEDY}"
        )
