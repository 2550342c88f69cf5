"""Ablation studies of the paper: vary one setting, for several losses and seeds. Interrupted studies can be resumed."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shortlist.config import CONFIG_KEYS, RunConfig, validate_config
from shortlist.config.schema import OWN_LOSSES
from shortlist.data import Catalog
from shortlist.errors import ConfigError, Interrupted, RunError, check_known, translate_arguments
from shortlist.evaluation import Evaluation
from shortlist.files import read_json, write_json
from shortlist.progress import Display, default_display
from shortlist.training.datasets import open_run_images, with_shared_views
from shortlist.training.folder import RunFolder, RunInUseError
from shortlist.training.loop import resume_run, train_run
from shortlist.training.plan import check_batch_sizes

METHODS: Mapping[str, Mapping[str, Any]] = {  # settings of the loss that define a method; the others are the recipe's
    "RS@k": {"name": "recall_at_k", "simix": False},
    "RS@k + SiMix": {"name": "recall_at_k", "simix": True},
    "SAP": {"name": "smooth_ap", "simix": False},
}
STUDY_FILE, CASE_FILE = "study.json", "case.json"
RATES: Mapping[str, float] = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}  # exponent of the batch size


@dataclass(frozen=True)
class Study:
    """A study of one setting.

    Args:
        key: Dotted key of the setting.
        values: Values in YAML notation; empty for those that `batch_sizes` returns.
        methods: Names of the losses that have the setting.
        label: Label of the axis in a plot.
    """

    key: str
    values: tuple[str, ...]
    methods: tuple[str, ...]
    label: str


STUDIES: Mapping[str, Study] = {
    "rank-temperature": Study(
        "loss.rank_temperature",
        ("0.1", "0.2", "0.5", "1", "2", "5"),
        ("RS@k", "RS@k + SiMix"),
        "temperature of the sigmoid on ranks",
    ),
    "batch-size": Study("batch.size", (), tuple(METHODS), "batch size"),
    "k": Study(
        "loss.k",
        ("[1]", "[1,2]", "[1,2,4]", "[1,2,4,8]", "[1,2,4,8,16]", "[1,2,4,8,12,16,20,24,28,32]"),
        ("RS@k", "RS@k + SiMix"),
        "values of k in the loss",
    ),
}


class _Facts(BaseModel):
    """The contents of study.json."""

    study: str
    learning_rate: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run of a study."""

    method: str
    value: str
    seed: int

    def folder(self, study: Path) -> RunFolder:
        """Return the folder of the run within the folder of the study."""
        method, value = (re.sub(r"[^\w.]+", "-", text).strip("-") for text in (self.method.lower(), self.value))
        return RunFolder(study / method / value / f"seed-{self.seed}")

    def __str__(self) -> str:
        return f"{self.method}, {self.value}, seed {self.seed}"


@translate_arguments(CONFIG_KEYS)
def ablate(
    name: str,
    config: RunConfig,
    path: Path | str,
    *,
    values: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: int = 3,
    learning_rate: str = "constant",
    display: Display | None = None,
) -> Path:
    """Train all runs of a study that are not trained yet, each in its own folder, and collect the results.

    Several processes can work on one study; each trains the runs that no other process has started.

    Args:
        name: One of STUDIES.
        config: Configuration of all runs, except for the setting that varies, the method and the seed. Settings of its
            loss are kept if the loss of the method has them.
        path: Folder of the study.
        values: Values of the setting in YAML notation. By default those of the paper; for batch sizes, from
            about 16 on, doubling, up to the largest batch that the training classes allow.
        methods: Names from METHODS; by default all that have the setting.
        seeds: Number of runs per method and value, with the seeds 0, 1, ...
        learning_rate: `constant`, or for the study of batch sizes, proportional to the batch size (`linear`) or its
            square root (`sqrt`), relative to the learning rate and the batch size in `config`.
        display: Display for progress.

    Returns:
        Path of `results.json` with all results so far.

    Raises:
        ConfigError: The study, a method or the learning-rate rule is unknown.
        RunError: The folder contains another study.
        Interrupted: The user pressed Ctrl-C; the same call resumes the study.
    """
    display, folder = display or default_display(), Path(path)
    check_known("study", name, STUDIES)
    check_known("learning-rate rule", learning_rate, RATES)
    study, power = STUDIES[name], RATES[learning_rate]
    for method in methods:
        check_known("method", method, study.methods)
    if power and name != "batch-size":
        raise ConfigError(
            f"The learning-rate rule {learning_rate} has no effect in the study {name}, whose batch size is fixed."
        )
    facts = {"study": name, "learning_rate": learning_rate, "config": config.model_dump(mode="json")}
    _check_same(folder, facts)
    chosen = tuple("".join(value.split()) for value in values) or study.values or batch_sizes(config, display)
    cases = [
        Case(method, value, seed)
        for seed, value, method in itertools.product(range(seeds), chosen, methods or study.methods)
    ]
    configs = [case_config(config, study, case, power) for case in cases]  # all of them first, to report errors early
    if values and name == "batch-size":
        check_batch_sizes(configs, _training_images(config, display))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STUDY_FILE, facts)
    for number, (case, settings) in enumerate(zip(cases, configs, strict=True), 1):
        display.message(f"{number} of {len(cases)}: {case}", case=str(case), number=number, cases=len(cases))
        _run(case, settings, folder, display)
    return collect(folder)


def batch_sizes(config: RunConfig, display: Display) -> tuple[str, ...]:
    """Return batch sizes from about 16 on, doubling, up to the largest batch that the training classes allow."""
    per_class = config.batch.per_class
    largest = int((_training_images(config, display).class_sizes() >= per_class).sum()) * per_class
    rounded = (2**power // per_class * per_class for power in itertools.count(4))
    smaller = itertools.takewhile(lambda size: size < largest, rounded)
    return tuple(str(size) for size in (*(size for size in smaller if size >= 2 * per_class), largest))


def _training_images(config: RunConfig, display: Display) -> Catalog:
    return open_run_images(config, display).catalog.split("train")


def collect(folder: Path) -> Path:
    """Write the results of all finished runs of a study to its `results.json`, and return its path."""
    file = folder / "results.json"
    facts: _Facts = read_json(folder / STUDY_FILE, _Facts)
    write_json(file, {**facts.model_dump(), "cases": list(_results(folder))})
    return file


def _results(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*/*/seed-*")):
        run = RunFolder(path)
        if run.failed.exists():
            yield {**_case(run), "failed": True}
        elif run.evaluation_file.exists():
            tested = _tested(run)
            steps = [record for record in run.metrics() if record["kind"] == "step"]
            yield {**_case(run), "steps": len(steps), "loss": steps[-1]["loss"], "metrics": tested[0].values}


def _case(run: RunFolder) -> dict[str, Any]:
    return asdict(read_json(run.path / CASE_FILE, Case))


def _tested(run: RunFolder) -> list[Evaluation]:
    tested = run.evaluations()
    if not tested:
        raise RunError(f"The run in {run.path} was not tested: its images have no test classes. Set evaluation.tests.")
    return tested


def _run(case: Case, config: RunConfig, folder: Path, display: Display) -> None:
    run = case.folder(folder)
    if run.evaluation_file.exists() or run.failed.exists():
        return
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.path / CASE_FILE, asdict(case))
        if run.config_file.exists():
            resume_run(run.path, display)
        else:
            train_run(with_shared_views(config, folder), run.path, display)
        _tested(run)
    except RunInUseError:
        display.message("Another process is training this run.")
    except Interrupted:
        raise Interrupted(f"Stopped in {case}. Run the same command again to resume.") from None
    except RunError as error:
        if not run.failed.exists():
            raise
        display.message(f"{case} failed; this is recorded as its result: {error}")


def case_config(config: RunConfig, study: Study, case: Case, power: float = 0.0) -> RunConfig:
    """Return the configuration of one run of a study; see `ablate`.

    Args:
        config: Configuration of the study.
        study: The study.
        case: Method, value and seed of the run.
        power: Exponent of the batch size in the learning rate.
    """
    method = METHODS[case.method]
    shared = {*OWN_LOSSES[method["name"]], "plus"}  # settings of the recipe that apply to the method, too
    loss = {**config.loss.model_dump(mode="json", include=shared), **method}
    changes = [f"loss={json.dumps(loss)}", f"{study.key}={case.value}", f"training.seed={case.seed}"]
    values, where = config.model_dump(mode="json"), f"{case} of {config.name}"
    if power:
        before, now = config.batch.size, validate_config(values, where, changes).batch.size
        if before == "auto" or now == "auto":
            raise ConfigError(
                "A learning rate that depends on the batch size requires a number for batch.size, not auto."
            )
        changes.append(f"optimizer.lr={config.optimizer.lr * (now / before) ** power}")
    return validate_config(values, where, [*changes, "evaluation.before=false"])


def _check_same(folder: Path, facts: dict[str, Any]) -> None:
    """Check that a folder with runs belongs to the same study; without any run, the study can be replaced."""
    file = folder / STUDY_FILE
    started = any(folder.glob(f"*/*/seed-*/{RunFolder(folder).config_file.name}"))
    if started and file.exists() and read_json(file) != facts:
        raise RunError(
            f"{folder} contains another study, or this one with other settings: see {file}. Choose another folder."
        )
