"""A run: epochs, schedule, logs, checkpoints, and the number at the end."""

from __future__ import annotations

import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor

from shortlist.config import RunConfig
from shortlist.data import Catalog, ImageDataset, image_chunks
from shortlist.errors import ConfigError, RunError
from shortlist.model import Embedder, GeM
from shortlist.retrieval import Evaluation, embed_images, evaluate
from shortlist.training.checkpoint import latest_state, save_state
from shortlist.training.display import Display
from shortlist.training.folder import RunFolder, write_atomically
from shortlist.training.large_batch import AUTOMATIC_CHUNK
from shortlist.training.learner import Learned, Learner
from shortlist.training.memory import reuse_freed_memory
from shortlist.training.parts import build_transforms
from shortlist.training.plan import decoding_workers, make_plan
from shortlist.training.schedule import learning_rate_factor

Batch = tuple[Tensor, Iterator[Tensor]]  # indices of the images in the training catalog, and their pixels by chunks


class Interrupted(RunError):  # noqa: N818
    """Someone asked to stop, and everything is saved."""


def train(config: RunConfig, path: Path | str, display: Display | None = None) -> RunFolder:
    """Train a run in a new folder, to the end.

    Raises:
        ShortlistError: something that a user can put right.
        Interrupted: by Ctrl-C; `resume` goes on.
    """
    folder = RunFolder.create(Path(path), config)
    with folder.locked():
        Trainer(config, folder, display or Display()).run()
    return folder


def resume(path: Path | str, display: Display | None = None) -> RunFolder:
    """Go on with a run from its last checkpoint, to the end, as if it had never stopped."""
    folder = RunFolder.open(Path(path))
    with folder.locked():
        if not folder.evaluation_file.exists():
            Trainer(folder.config(), folder, display or Display()).run()
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
            reuse_freed_memory()
        self.plan = make_plan(config, display, folder)
        folder.check_facts(self.plan.catalog.fingerprint(), config.training.seed)
        self.learner = Learner(config, self.device)
        self.train_transform, self.test_transform = build_transforms(config, self.learner.embedder)
        self.step = 0  # steps taken
        self.best: float | None = None  # the first r@k of the best validation
        self._stop = False

    def run(self) -> None:
        """Take the remaining steps, then test."""
        self._restore()
        if self.step == 0 and self.config.evaluation.before:
            self._test(self.learner.result, self.folder.before_file, "before training")
        plan, every = self.plan, self.config.training.checkpoint_every
        with self._stoppable(), self.display.training(self.step, plan.steps_an_epoch, plan.total_steps):
            for batch, chunks in self._batches():
                self._train_step(batch, chunks)
                end_of_epoch = self.step % plan.steps_an_epoch == 0 or self.step == plan.total_steps
                if end_of_epoch:
                    self._end_epoch()
                if self._stop or end_of_epoch or (every and self.step % every == 0):
                    self._save()
                if self._stop:
                    raise Interrupted(
                        f"Stopped after step {self.step}. To go on: shortlist train --resume {self.folder.path}"
                    )
        self._finish()

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

    def _train_step(self, batch: Tensor, chunks: Iterator[Tensor]) -> None:
        started = time.perf_counter()
        plan, learner = self.plan, self.learner
        labels = torch.from_numpy(plan.train.labels[batch.numpy()])
        factor = learning_rate_factor(self.config.schedule, self.step, plan.steps_an_epoch, plan.total_steps)
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
        self.display.step(record)

    @property
    def _epoch(self) -> int:
        """The epoch of the last step taken, from 1."""
        return math.ceil(self.step / self.plan.steps_an_epoch)

    def _end_epoch(self) -> None:
        """Validate, and keep the embedder if it is the best so far."""
        epoch, validation = self._epoch, self.plan.validation
        losses = [each["loss"] for each in self.folder.metrics() if each["kind"] == "step" and each["epoch"] == epoch]
        loss = sum(losses) / len(losses)
        text, facts = f"epoch {epoch}: loss {loss:.4f}", {"epoch": epoch, "step": self.step, "loss": loss}
        last = self.step == self.plan.total_steps
        if validation is not None and (last or epoch % self.config.training.validate_every == 0):
            metrics = self._measure(self.learner.result, validation, bootstrap=0).metrics
            values = {name: estimate.value for name, estimate in metrics.items()}
            self._record({"kind": "validation", "step": self.step, "epoch": epoch, **values})
            first = f"r@{self.plan.k[0]}"
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
        if self.plan.test is None:
            self.display.message("There are no test classes, so nothing was tested.")
            write_atomically(self.folder.evaluation_file, "null\n")
        else:
            self._test(result, self.folder.evaluation_file, "test")
        self.accelerator.end_training()

    def _test(self, embedder: Embedder, file: Path, name: str) -> None:
        if self.plan.test is None:
            return
        measured = self._measure(embedder, self.plan.test, self.config.evaluation.bootstrap)
        write_atomically(file, json.dumps(measured.to_dict(), indent=2) + "\n")
        values = {each: estimate.value for each, estimate in measured.metrics.items()}
        self._record({"kind": name, "step": self.step, **values})
        reported = ", ".join(f"r@{k} {measured.metrics[f'r@{k}']}" for k in self.plan.k)
        self.display.message(f"{name}: {reported}", evaluation=name, **values)

    def _measure(self, embedder: Embedder, catalog: Catalog, bootstrap: int) -> Evaluation:
        workers = decoding_workers(self.config)
        with self.display.task(f"embedding {len(catalog):,} images") as progress:
            vectors = embed_images(embedder, catalog, self.test_transform, workers=workers, progress=progress)
        return evaluate(vectors.to(self.device), catalog, k=self.plan.k, bootstrap=bootstrap)

    def _record(self, record: dict[str, Any]) -> None:
        self.folder.log(record)
        kind = record["kind"].replace(" ", "_")
        scalars = {f"{kind}/{name}": value for name, value in record.items() if isinstance(value, float)}
        self.accelerator.log(scalars, step=record["step"])

    def _save(self) -> None:
        state = self.learner.state(self.step)
        save_state(self.folder.checkpoints, replace(state, facts={**state.facts, "best": self.best}))

    def _restore(self) -> None:
        """Go to the last checkpoint, where there is one, and forget what was logged after it."""
        state = latest_state(self.folder.checkpoints)
        if state is not None:
            self.learner.load(state)
            self.step, self.best = state.step, state.facts["best"]
            self.display.message(f"Going on after step {self.step} of {self.plan.total_steps}.", step=self.step)
        self.folder.forget_after(self.step if state else -1)
        purge = {"tensorboard": {"purge_step": self.step + 1}}
        self.accelerator.init_trackers("tensorboard", init_kwargs=purge)

    def _failure(self, learned: Learned, batch: Tensor) -> RunError:
        """Save what is needed to look at a step without a finite loss or gradient; the weights are those before it."""
        folder, train = self.folder.failed, self.plan.train
        save_state(folder, self.learner.state(self.step))
        tensors = {"embeddings": learned.out.embeddings.cpu(), "indices": batch.contiguous()}
        save_file({**tensors, "labels": torch.from_numpy(train.labels[batch.numpy()])}, folder / "batch.safetensors")
        facts = {
            "step": self.step + 1,
            "loss": learned.out.loss.item(),
            "gradient_norm": learned.gradient_norm.item(),
            "images": [str(train.paths[index]) for index in batch.tolist()],
        }
        write_atomically(folder / "step.json", json.dumps(facts, indent=2) + "\n")
        return RunError(
            f"Step {self.step + 1} gave the loss {facts['loss']} and a gradient of length {facts['gradient_norm']}, "
            f"and the run was stopped. The weights before it, its embeddings and its images are in {folder}. A smaller "
            "optimizer.lr, schedule.warmup or training.clip_norm often helps."
        )

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Ctrl-C (or SIGTERM) lets the step end, saves and stops; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: object) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            self.display.message("Stopping after this step. Again, to stop at once and lose it.")

        before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
