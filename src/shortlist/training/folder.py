"""The folder of a run: its files, its lock, and its records."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
import warnings
from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shortlist.config import RunConfig, read_config
from shortlist.errors import RunError
from shortlist.evaluation import Evaluation, read_evaluations
from shortlist.files import (
    exclusive_lock,
    parse_json,
    read_json,
    read_text,
    validated,
    verified,
    with_checksum,
    write_json,
    write_text_atomically,
)

_PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@\s]+@")  # in the URL of a database
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # five times as fast
PACKAGES = ("shortlist", "torch", "timm", "accelerate", "numpy", "pillow")


class Facts(BaseModel):
    """The contents of facts.json; the declared fields are compared when a run is resumed."""

    model_config = ConfigDict(extra="allow")

    catalog: str
    config_sha256: str
    versions: dict[str, str | None]
    threads: int
    processes: int
    missing: list[str]
    classes_too_small: list[str]


class Record(BaseModel):
    """A line of metrics.jsonl; its other values depend on its kind."""

    model_config = ConfigDict(extra="allow")

    kind: str
    step: int
    epoch: int

    @model_validator(mode="after")
    def _is_complete(self) -> Record:
        if self.kind == "step" and not {"loss", "lr", "images_per_second"} <= (self.model_extra or {}).keys():
            raise ValueError("a step needs loss, lr and images_per_second")
        return self


class MinScore(BaseModel):
    """The contents of min-score.json."""

    min_score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]


class Unreadable(BaseModel):
    """The contents of unreadable.json: paths and reasons."""

    images: list[tuple[str, str]]


class RunInUseError(RunError):
    """Another process is training in the folder of the run."""


class ImagesChangedError(RunError):
    """The images are not those that the run started with."""


class RunFolder:
    """The folder of a run.

    config.yaml             the resolved configuration; `shortlist train config.yaml` repeats the run
    facts.json              digests of the images and config.yaml, what was left out, versions, seed, threads, command
    images.parquet          paths and labels of the images, if they were given in Python
    given-images/           the images themselves, if they were given as a torch dataset
    unreadable.json         images that were left out because they cannot be read, and why (data.on_missing: skip)
    metrics.jsonl           one line per step and per evaluation
    tensorboard/            the same for TensorBoard, and wandb/ for Weights & Biases
    tracking.json           ids of the run in Weights & Biases and MLflow, if it is tracked there
    checkpoints/            the last two checkpoints
    best/                   the embedder with the best validation result
    embedder.*              the trained embedder
    encoder.json            preprocessing of the images that are searched, for `Encoder.from_run`
    views/                  features of a frozen backbone, unless data.view_cache is another folder
    vectors/                embeddings of test images and distractors, which `report` and `compare` use
    evaluation-before.json  results of all tests with the pretrained backbone alone, or before training
    evaluation.json         results of all tests with the trained embedder
    report.html             the report that `shortlist train` and `shortlist report` write
    min-score.json          the minimum score of results that the report recommends, which `shortlist index` uses
    failed/                 the state of a step whose loss or gradient was not finite
    """  # fmt: skip

    def __init__(self, path: Path) -> None:
        self.path, self._parent_is_new = path, not path.parent.exists()
        self.config_file, self.facts_file = path / "config.yaml", path / "facts.json"
        self.metrics_file, self.unreadable_file = path / "metrics.jsonl", path / "unreadable.json"
        self.checkpoints, self.best, self.failed = path / "checkpoints", path / "best", path / "failed"
        self.before_file, self.evaluation_file = path / "evaluation-before.json", path / "evaluation.json"
        self.views, self.vectors, self.lock_file = path / "views", path / "vectors", path / ".lock"
        self.tracking_file = path / "tracking.json"
        self.min_score_file = path / "min-score.json"
        self.images_file, self.given_images = path / "images.parquet", path / "given-images"

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run.

        Raises:
            RunError: The folder does not contain a run.
        """
        folder = cls(path)
        if not folder.config_file.is_file():
            raise RunError(f"No run found in {path}: it contains no {folder.config_file.name}.")
        return folder

    def recommend_min_score(self, recommended: tuple[float, float] | None) -> None:
        """Write the minimum score of results and its rate of false matches, or none, if the folder is writable."""
        if not os.access(self.path, os.W_OK):
            return
        if recommended is None:
            self.min_score_file.unlink(missing_ok=True)
        else:
            write_json(self.min_score_file, dict(zip(("min_score", "false_match_rate"), recommended, strict=True)))

    def recommended_min_score(self) -> float | None:
        """Return the minimum score that the last report recommends; None if there is none.

        Raises:
            RunError: The file is damaged.
        """
        if not self.min_score_file.exists():
            return None
        found: MinScore = read_json(self.min_score_file, MinScore)
        return found.min_score

    def config(self) -> RunConfig:
        """Read the configuration of the run, and warn if it is not the one that the run started with."""
        text = read_text(self.config_file)
        config = read_config(text, str(self.config_file))
        if self.facts_file.exists() and self.facts().config_sha256 != _digest(text):
            warnings.warn(
                f"{self.config_file} has changed since the start of the run. If you have not edited it, it is damaged: "
                "restore a copy.",
                stacklevel=1,  # once per run, whoever reads it
            )
        return self.with_own_images(config) if self.images_file.exists() else config

    def with_own_images(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the list of images in this folder as `data.source`."""
        return config.with_changes(data={"source": str(self.images_file.absolute()), "root": None})

    @property
    def resume_command(self) -> str:
        """Shell command that resumes the run."""
        return f"shortlist train --resume {shlex.quote(str(self.path))}"

    @property
    def evaluate_command(self) -> str:
        """Shell command that evaluates the run."""
        return f"shortlist evaluate {shlex.quote(str(self.path))}"

    def locked(self) -> AbstractContextManager[None]:
        """Create the folder if needed, and lock it for this process. The lock of a killed process is released.

        Raises:
            RunInUseError: Another process holds the lock.
            RunError: The folder is not writable.
        """
        in_use = f"Another process is training in {self.path}. Wait until it has finished, or choose another folder."
        return exclusive_lock(self.lock_file, RunInUseError(in_use))

    def begin(self, config: RunConfig) -> None:
        """Start a new run in the folder, which must be locked.

        Raises:
            RunError: The folder already contains a run.
        """
        if self.config_file.exists() or self.given_images.exists():
            raise RunError(
                f"{self.path} already contains a run. Resume it with: {self.resume_command} - or choose another folder."
            )
        text = yaml.dump(config.model_dump(mode="json"), Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
        write_text_atomically(self.config_file, text)

    def abandon(self) -> None:
        """Undo `begin`, so that a run that could not be set up leaves no files behind."""
        with suppress(OSError):
            for file in (self.config_file, self.images_file, self.unreadable_file, self.facts_file, self.lock_file):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.given_images, ignore_errors=True)
            self.path.rmdir()  # fails if it contains other files
            if self._parent_is_new:
                self.path.parent.rmdir()

    def check_images(self, fingerprint: str) -> None:
        """Compare the fingerprint of the images with that at the start of the run, if it has started.

        Raises:
            ImagesChangedError: The fingerprints differ.
        """
        if not self.facts_file.exists():
            return
        before = self.facts().catalog
        if before != fingerprint:
            raise ImagesChangedError(
                f"The images, classes or splits have changed since the start of the run in {self.path} (fingerprint "
                f"{before[:12]} then, {fingerprint[:12]} now). Restore them, or start a new run."
            )

    def facts(self) -> Facts:
        """Read `facts.json`.

        Raises:
            RunError: The file is missing or damaged.
        """
        found: Facts = read_json(self.facts_file, Facts)
        return found

    def unreadable(self) -> list[tuple[str, str]]:
        """Read the paths of the images that were left out because they cannot be read, and the reasons.

        Raises:
            RunError: The file is damaged.
        """
        return read_unreadable(self.unreadable_file) if self.unreadable_file.exists() else []

    def evaluations(self, *, before: bool = False) -> list[Evaluation]:
        """Read `evaluation.json`, or `evaluation-before.json`; the list is empty if the run has no test images.

        Raises:
            RunError: The file is missing or damaged.
        """
        file = self.before_file if before else self.evaluation_file
        found = read_evaluations(file)
        if not found and any(record["kind"] == "test" for record in self.metrics()):
            raise RunError(f"{file} is damaged: it has no results, but the run was tested. Restore it.")
        return found

    def record_facts(self, fingerprint: str, processes: int = 1, **others: Any) -> None:
        """Record versions and hardware at the start of a run; warn about differences when it is resumed."""
        versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        threads = torch.get_num_threads()
        if self.facts_file.exists():
            before = self.facts()
            then = {**before.versions, "threads": before.threads, "processes": before.processes}
            now = {**versions, "threads": threads, "processes": processes}
            changes = [f"{name} {then.get(name)}, now {now[name]}" for name in now if then.get(name) != now[name]]
            if changes:
                warnings.warn(
                    f"The run started with {'; '.join(changes)}: the last digits of its weights may differ from "
                    "those of an uninterrupted run.",
                    stacklevel=2,
                )
            return
        facts = {
            "catalog": fingerprint,
            "config_sha256": _digest(read_text(self.config_file)),
            **others,
            "versions": versions,
            "platform": platform.platform(),
            "threads": threads,
            "processes": processes,
            "device": device_name(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": _PASSWORD.sub(r"\1***@", shlex.join([_program(), *sys.argv[1:]])),
        }
        write_json(self.facts_file, facts)

    def log(self, record: dict[str, Any]) -> None:
        """Append a record to `metrics.jsonl`."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def metrics(self) -> list[dict[str, Any]]:
        """Read all records of `metrics.jsonl`, except for an incomplete last line of a run that is not finished.

        Raises:
            RunError: The file is damaged.
        """
        file = self.metrics_file
        *lines, rest = (read_text(file) if file.exists() else "").split("\n")
        parsed = validated([parse_json(line, file) for line in lines], file, list[dict[str, Any]])
        found = validated([verified(each, file) for each in parsed], file, list[Record])
        records = [each.model_dump() for each in found]
        if self.evaluation_file.exists():
            tested = records and records[-1]["kind"] == "test"  # the last record of a run with test images
            if rest or not records or (read_json(self.evaluation_file) and not tested):
                raise RunError(f"{file} is damaged: its last records are missing. Restore it.")
        return records

    def discard_records_after(self, step: int) -> None:
        """Remove the records that a resumed run writes again: those of later steps, and of the final test."""
        records = [record for record in self.metrics() if record["step"] <= step and record["kind"] != "test"]
        write_text_atomically(self.metrics_file, "".join(map(_line, records)))


def read_unreadable(file: Path) -> list[tuple[str, str]]:
    """Read the paths of images that cannot be read, and the reasons, from a file that `write_unreadable` wrote."""
    found: Unreadable = read_json(file, Unreadable)
    return found.images


def write_unreadable(file: Path, images: list[tuple[str, str]]) -> None:
    """Write the paths of images that cannot be read, and the reasons."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"images": images})


def _line(record: dict[str, Any]) -> str:
    """Return a line of metrics.jsonl."""
    return json.dumps(with_checksum(record)) + "\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def device_name() -> str:
    """Return the name of the GPU or, without one, of the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"


def _program() -> str:
    """Return the name of the running program; `python -m shortlist` is shortlist."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


@cache
def _version(name: str) -> str | None:
    """Return the version of an installed package. Cached, because it is read from the package's metadata files."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
