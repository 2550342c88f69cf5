"""A run's folder: where everything about a run lies, and who may write to it."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import filelock
import torch
import yaml

from shortlist.config import RunConfig, read_config
from shortlist.errors import RunError

PACKAGES = ("shortlist", "torch", "torchvision", "timm", "accelerate", "numpy", "pillow")


class RunFolder:
    """
    config.yaml             the resolved config: `shortlist train config.yaml` repeats the run
    facts.json              catalog fingerprint, versions, seed, threads, command
    metrics.jsonl           a line for each step and each validation
    tensorboard/            the same for TensorBoard
    checkpoints/            the last two training states
    best/                   the embedder that was best on the validation classes
    embedder.*              the result
    evaluation-before.json  the test classes before the first step
    evaluation.json         and with the result
    """  # fmt: skip

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file, self.facts_file = path / "config.yaml", path / "facts.json"
        self.metrics_file, self.unreadable_file = path / "metrics.jsonl", path / "unreadable.json"
        self.checkpoints, self.best, self.failed = path / "checkpoints", path / "best", path / "failed"
        self.before_file, self.evaluation_file = path / "evaluation-before.json", path / "evaluation.json"

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """A new run's folder.

        Raises:
            RunError: there is a run already, or the folder cannot be written to.
        """
        folder = cls(path)
        if folder.config_file.exists():
            raise RunError(
                f"{path} holds a run already. Go on with it: shortlist train --resume {path}. Or choose another folder."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            with folder.locked():
                text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
                write_atomically(folder.config_file, text)
        except OSError as error:
            raise RunError(f"The run's folder {path} cannot be written to: {error.strerror}.") from None
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        folder = cls(path)
        if not folder.config_file.is_file():
            raise RunError(f"There is no run in {path}: it has no {folder.config_file.name}.")
        return folder

    def config(self) -> RunConfig:
        return read_config(self.config_file.read_text(encoding="utf-8"), str(self.config_file))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process alone; a killed process lets go of it."""
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise RunError(
                f"Another training is at work in {self.path}. Wait for it, or choose another folder."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def check_facts(self, fingerprint: str, seed: int) -> None:
        """Write down what the run stands on, or compare with what was written when it began.

        Raises:
            RunError: the images are not those that the run began with.
        """
        if self.facts_file.exists():
            before = json.loads(self.facts_file.read_text(encoding="utf-8"))["catalog"]
            if before != fingerprint:
                raise RunError(
                    f"The images, classes or splits are not those that {self.path} began with (fingerprint "
                    f"{fingerprint[:12]}, then {before[:12]}). Put them back, or start a new run."
                )
            return
        facts = {
            "catalog": fingerprint,
            "seed": seed,
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        }
        write_atomically(self.facts_file, json.dumps(facts, indent=2) + "\n")

    def log(self, record: dict[str, Any]) -> None:
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records; a last line that was cut off is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def forget_after(self, step: int) -> None:
        """Drop the records of steps that a resumed run takes again."""
        kept = [json.dumps(record) + "\n" for record in self.metrics() if record["step"] <= step]
        write_atomically(self.metrics_file, "".join(kept))


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
