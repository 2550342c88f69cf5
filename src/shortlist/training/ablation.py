"""The paper's studies: one setting varies and all else stays, for several losses and seeds. A stopped study goes on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortlist.config import RunConfig, read_config
from shortlist.config.arguments import ARGUMENTS
from shortlist.data import Catalog, ClassBalancedSampler, half_validation
from shortlist.errors import ConfigError, Interrupted, RunError, did_you_mean, translate_arguments
from shortlist.files import read_json, write_text_atomically
from shortlist.progress import Display, default_display
from shortlist.training.folder import Busy, RunFolder
from shortlist.training.loop import resume, train
from shortlist.training.opening import open_images

METHODS: Mapping[str, str] = {  # each with the paper's hyper-parameters
    "RS@k": "loss={name: recall_at_k}",
    "RS@k + SiMix": "loss={name: recall_at_k, simix: true}",
    "SAP": "loss={name: smooth_ap}",
}
STUDY_FILE = "study.json"
RATES: Mapping[str, float] = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}  # power of the batch size in the rate


@dataclass(frozen=True)
class Study:
    """What varies.

    Args:
        key: the setting.
        values: as they stand in YAML; none: those that the data allow, see `batch_sizes`.
        methods: the losses that have such a setting.
        label: for an axis.
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


@dataclass(frozen=True)
class Case:
    """One run of a study."""

    method: str
    value: str
    seed: int

    def folder(self, study: Path) -> RunFolder:
        method, value = (re.sub(r"[^\w.]+", "-", text).strip("-") for text in (self.method.lower(), self.value))
        return RunFolder(study / method / value / f"seed-{self.seed}")

    def __str__(self) -> str:
        return f"{self.method}, {self.value}, seed {self.seed}"


@translate_arguments(ARGUMENTS)
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
    """Train every case of a study that is not trained yet, each in a folder of its own, and collect the results.

    Several processes may work on one study: each takes the cases that no other has begun.

    Args:
        name: one of STUDIES.
        config: of every run, but for what varies; the loss is the paper's.
        path: the study's folder.
        values: of the setting, as in YAML; by default the paper's, and as batch sizes all powers of 2 from 16 up to the
            largest that the training classes allow, and that.
        methods: some of METHODS; by default all that have the setting.
        seeds: runs of each, with the seeds 0, 1, ...
        learning_rate: `constant`, or in the study of batch sizes in proportion to the batch (`linear`) or its square
            root (`sqrt`), and the config's own at the config's own batch.
        display: for progress.

    Returns:
        The file of all results so far, `results.json`.

    Raises:
        ConfigError: an unknown study, method or rule.
        RunError: the folder holds a study of something else.
        Interrupted: by Ctrl-C; the same call goes on.
    """
    display, folder = display or default_display(), Path(path)
    study = _known("study", name, STUDIES)
    power = _known("learning-rate rule", learning_rate, RATES)
    for method in methods:
        _known("method", method, {each: each for each in study.methods})
    if power and name != "batch-size":
        raise ConfigError(f"The learning rate follows the batch size, which the study {name} leaves as it is.")
    facts = {"study": name, "learning_rate": learning_rate, "config": config.model_dump(mode="json")}
    _check_same(folder, facts)
    chosen = tuple("".join(value.split()) for value in values) or study.values or batch_sizes(config, display)
    cases = [
        Case(method, value, seed)
        for seed, value, method in itertools.product(range(seeds), chosen, methods or study.methods)
    ]
    configs = [_config(config, study, case, power) for case in cases]  # all, so that a mistake shows at once
    if values and name == "batch-size":
        _check_batches(configs, _training(config, display))
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / STUDY_FILE, json.dumps(facts, indent=1) + "\n")
    for number, (case, of_case) in enumerate(zip(cases, configs, strict=True), 1):
        display.message(f"{number} of {len(cases)}: {case}", case=str(case), number=number, cases=len(cases))
        _run(case, of_case, folder, display)
    return collect(folder)


def batch_sizes(config: RunConfig, display: Display) -> tuple[str, ...]:
    """Powers of 2 from 16 up, as far as the training classes go, and the largest batch possible."""
    largest = int((_training(config, display).class_sizes() >= config.batch.per_class).sum()) * config.batch.per_class
    powers = itertools.takewhile(lambda size: size < largest, (2**power for power in itertools.count(4)))
    return tuple(str(size) for size in (*powers, largest))


def _training(config: RunConfig, display: Display) -> Catalog:
    catalog = open_images(config, display).catalog
    return (half_validation(catalog) if config.data.validation == "half" else catalog).split("train")


def _check_batches(configs: Sequence[RunConfig], training: Catalog) -> None:
    """Every batch can be filled; if not, the sampler says which can."""
    for batch in {each.batch for each in configs}:
        if batch.size != "auto":
            ClassBalancedSampler(training.labels.tolist(), batch.size, batch.per_class)


def collect(folder: Path) -> Path:
    """Write the results of all finished cases of a study into its `results.json`."""
    facts = read_json(folder / STUDY_FILE)
    results = {**facts, "cases": list(_results(folder))}
    file = folder / "results.json"
    write_text_atomically(file, json.dumps(results, indent=1) + "\n")
    return file


def _results(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*/*/seed-*/case.json")):
        run = RunFolder(file.parent)
        case = read_json(file)
        if run.failed.exists():
            yield {**case, "failed": True}
        elif run.evaluation_file.exists():
            tested = _tested(run)
            steps = [record for record in run.metrics() if record["kind"] == "step"]
            metrics = {name: estimate["value"] for name, estimate in tested[0]["metrics"].items()}
            yield {**case, "steps": len(steps), "loss": steps[-1]["loss"], "metrics": metrics}


def _tested(run: RunFolder) -> list[dict[str, Any]]:
    tested: list[dict[str, Any]] = read_json(run.evaluation_file)
    if not tested:
        raise RunError(f"{run.path} was tested on nothing: its images have no test classes. Set evaluation.tests.")
    return tested


def _run(case: Case, config: RunConfig, folder: Path, display: Display) -> None:
    run = case.folder(folder)
    if run.evaluation_file.exists() or run.failed.exists():
        return
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_text_atomically(run.path / "case.json", json.dumps(vars(case)) + "\n")
        if run.config_file.exists():
            resume(run.path, display)
        else:
            train(config, run.path, display)
        if run.evaluation_file.exists():
            _tested(run)
    except Busy:
        display.message("Another process is at it.")
    except Interrupted:
        raise Interrupted(f"Stopped in {case}. To go on, give the same command again.") from None
    except RunError as error:
        if not run.failed.exists():
            raise
        display.message(f"{case} failed, which is a result, too: {error}")


def _config(config: RunConfig, study: Study, case: Case, power: float) -> RunConfig:
    changes = [METHODS[case.method], f"{study.key}={case.value}", f"training.seed={case.seed}"]
    text, where = config.model_dump_json(), f"{case} of {config.name}"
    if power:
        before, now = config.batch.size, read_config(text, where, changes).batch.size
        if before == "auto" or now == "auto":
            raise ConfigError("A learning rate that follows the batch needs numbers: batch.size is auto.")
        changes.append(f"optimizer.lr={config.optimizer.lr * (now / before) ** power}")
    return read_config(text, where, [*changes, "evaluation.before=false"])


def _check_same(folder: Path, facts: dict[str, Any]) -> None:
    """A folder is one study's, from its first run on: what could not even begin is no reason to choose another one."""
    file = folder / STUDY_FILE
    begun = any(folder.glob(f"*/*/seed-*/{RunFolder(folder).config_file.name}"))
    if begun and file.exists() and read_json(file) != facts:
        raise RunError(
            f"{folder} holds another study, or this one with other settings: see {file}. Choose another folder."
        )


def _known(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"There is no {what} {name!r}; {did_you_mean(name, known)}")
    return known[name]
