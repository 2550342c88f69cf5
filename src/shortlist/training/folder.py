"""A run's folder: where everything about a run lies, and who may write to it."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import filelock
import torch
import yaml

from shortlist.config import RunConfig, read_config
from shortlist.errors import RunError
from shortlist.files import parse_json, read_json, write_text_atomically

PACKAGES = ("shortlist", "torch", "timm", "accelerate", "numpy", "pillow")


class Busy(RunError):  # noqa: N818 - says what the folder is
    """Another process is at work in the run's folder."""


class OtherImages(RunError):  # noqa: N818 - says what was found
    """The images are not those that a run began with."""


class RunFolder:
    """
    config.yaml             the resolved config: `shortlist train config.yaml` repeats the run
    facts.json              catalog fingerprint, what was left out, versions, seed, threads, command
    unreadable.json         images left out because they cannot be read, and why (data.on_missing: skip)
    metrics.jsonl           a line for each step and each validation
    tensorboard/            the same for TensorBoard
    checkpoints/            the last two training states
    best/                   the embedder that was best on the validation classes
    embedder.*              the result
    vectors/                embeddings of what was tested, which `report` and `compare` read, and of distractors
    evaluation-before.json  a list of all tests before the first step
    evaluation.json         and with the result
    report.html             the report of the run, by `shortlist train` and `shortlist report`
    failed/                 the step that had no finite loss, if there was one
    """  # fmt: skip

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file, self.facts_file = path / "config.yaml", path / "facts.json"
        self.metrics_file, self.unreadable_file = path / "metrics.jsonl", path / "unreadable.json"
        self.checkpoints, self.best, self.failed = path / "checkpoints", path / "best", path / "failed"
        self.before_file, self.evaluation_file = path / "evaluation-before.json", path / "evaluation.json"
        self.vectors, self.lock_file = path / "vectors", path / ".lock"

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        folder = cls(path)
        if not folder.config_file.is_file():
            raise RunError(f"There is no run in {path}: it has no {folder.config_file.name}.")
        return folder

    def config(self) -> RunConfig:
        return read_config(self.config_file.read_text(encoding="utf-8"), str(self.config_file))

    @property
    def resume_command(self) -> str:
        return f"shortlist train --resume {shlex.quote(str(self.path))}"

    @property
    def evaluate_command(self) -> str:
        return f"shortlist evaluate {shlex.quote(str(self.path))}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, made if need be, for this process alone; a killed process lets go of it.

        Raises:
            Busy: another process holds it.
            RunError: it cannot be written to.
        """
        lock = filelock.FileLock(self.lock_file)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise Busy(f"Another training is at work in {self.path}. Wait for it, or choose another folder.") from None
        except OSError as error:
            raise RunError(f"The run's folder {self.path} cannot be written to: {error.strerror}.") from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, config: RunConfig) -> None:
        """Make the (locked) folder that of a new run.

        Raises:
            RunError: there is a run in it already.
        """
        if self.config_file.exists():
            raise RunError(
                f"{self.path} holds a run already. Go on with it: {self.resume_command} - or choose another folder."
            )
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_text_atomically(self.config_file, text)

    def abandon(self) -> None:
        """Undo `begin`: a run that could not be set up leaves nothing behind."""
        with suppress(OSError):
            for file in (self.config_file, self.unreadable_file, self.facts_file, self.lock_file):
                file.unlink(missing_ok=True)
            self.path.rmdir()  # unless it holds something of others

    def check_images(self, fingerprint: str) -> None:
        """Compare the fingerprint of the images with the one of when the run began, if it has.

        Raises:
            OtherImages: it is another.
        """
        if not self.facts_file.exists():
            return
        before = read_json(self.facts_file)["catalog"]
        if before != fingerprint:
            raise OtherImages(
                f"The images, classes or splits are not those that {self.path} began with (fingerprint "
                f"{fingerprint[:12]}, then {before[:12]}). Put them back, or start a new run."
            )

    def check_facts(self, fingerprint: str, **others: Any) -> None:
        """Write down what the run stands on, or warn of what is no longer as it was when the run began."""
        versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        threads = torch.get_num_threads()
        if self.facts_file.exists():
            before = read_json(self.facts_file)
            then, now = {**before["versions"], "threads": before["threads"]}, {**versions, "threads": threads}
            changes = [f"{name} {then.get(name)}, now {now[name]}" for name in now if then.get(name) != now[name]]
            if changes:
                warnings.warn(
                    f"The run began with {'; '.join(changes)}: the last digits of its weights may differ from those of "
                    "a run that was never stopped.",
                    stacklevel=2,
                )
            return
        facts = {
            "catalog": fingerprint,
            **others,
            "versions": versions,
            "platform": platform.platform(),
            "threads": threads,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        }
        write_text_atomically(self.facts_file, json.dumps(facts, indent=2) + "\n")

    def log(self, record: dict[str, Any]) -> None:
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records; a last line that was cut off is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]
        return [parse_json(line, self.metrics_file) for line in lines]

    def forget_after(self, step: int) -> None:
        """Drop the records of what a resumed run does again: later steps, and the test."""
        records = [record for record in self.metrics() if record["step"] <= step and record["kind"] != "test"]
        kept = [json.dumps(record) + "\n" for record in records]
        write_text_atomically(self.metrics_file, "".join(kept))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
