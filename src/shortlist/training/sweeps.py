"""Search for hyper-parameters as in the paper: train on half of the training classes, validate on the other half."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from pydantic import BaseModel

from shortlist.config import CONFIG_KEYS, RunConfig, validate_config
from shortlist.data import Catalog, half_validation
from shortlist.errors import ConfigError, Interrupted, RunError, translate_arguments
from shortlist.files import check_writable, exclusive_lock, read_json, write_json, write_text_atomically
from shortlist.imports import import_modules
from shortlist.progress import Display, default_display, format_duration
from shortlist.training.components import build_loss
from shortlist.training.datasets import check_validation_source, open_images, with_shared_views
from shortlist.training.folder import RunFolder, RunInUseError
from shortlist.training.loop import Validation, resume_run, train_run
from shortlist.training.plan import check_batch_sizes
from shortlist.training.search_space import Choices, Space, candidates, read_space, with_values

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, Trial

STUDY_FILE, RESULTS_FILE = "study.json", "results.json"
MIN_FOR_IMPORTANCES = 8  # minimum number of complete trials
DEFAULT_TRIALS = 20  # for the samplers random and tpe
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "running"}
NOT_COMPARED: dict[str, Any] = {  # settings that may differ between the workers of a study
    **dict.fromkeys(("name", "about", "paper", "measured", "repeats", "tracking"), True),
    "data": {  # images are compared
        **dict.fromkeys(("source", "root", "workers", "view_cache"), True),
        "validation_source": {"root"},
    },
    "batch": {"chunk_size", "keep_graphs"},
    "training": {"threads", "checkpoint_every"},
}


@dataclass(frozen=True)
class TrialResult:
    """One trial of a sweep.

    Args:
        number: Number of the trial, from 0.
        state: "complete", "pruned", "failed" (its loss or gradient was not finite) or "running".
        values: Value of each searched key.
        value: The metric after the last validation; None if there was none.
        validations: The metric by epoch, or by step with `training.validate_every_steps`.
        seconds: Time from start to end, including interruptions; None for a running trial.
    """

    number: int
    state: str
    values: dict[str, Any]
    value: float | None
    validations: dict[int, float]
    seconds: float | None


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep so far.

    Args:
        path: Folder of the study.
        recipe: Name of the recipe.
        metric: Validation metric that is maximised.
        sampler: Name of the sampler.
        pruner: Name of the pruner.
        keys: The searched keys.
        total: Number of trials when the sweep is finished.
        trials: All trials by number.
        importances: Share of each key in the differences between the best trials and all trials; None if there are too
            few trials, or no differences.
        unit: Unit of the keys of `validations`, "epochs" or "steps".
    """

    path: Path
    recipe: str
    metric: str
    sampler: str
    pruner: str
    keys: tuple[str, ...]
    total: int
    trials: tuple[TrialResult, ...]
    importances: dict[str, float] | None
    unit: str = "epochs"

    @property
    def best(self) -> TrialResult | None:
        """The complete trial with the largest value; None if there is none."""
        complete = [trial for trial in self.trials if trial.state == "complete"]
        return max(complete, key=lambda trial: trial.value or 0.0, default=None)

    @property
    def done(self) -> int:
        """Number of trials that are not running."""
        return sum(trial.state != "running" for trial in self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values, as in results.json."""
        best = self.best
        return {**asdict(self), "path": str(self.path), "best": None if best is None else best.number}


@translate_arguments(CONFIG_KEYS)
def sweep(
    config: RunConfig,
    space: Mapping[str, Any] | Path | str,
    path: Path | str,
    *,
    sampler: str | None = None,
    trials: int | None = None,
    pruner: str = "none",
    seed: int = 0,
    storage: str | None = None,
    take_over: bool = False,
    display: Display | None = None,
    on_trial: Callable[[SweepResult], object] | None = None,
) -> SweepResult:
    """Search for the values of settings with the best validation result. Test images are not used.

    Each trial trains on the first half of the training classes and validates on the other half. If the images define a
    validation split, or the configuration has `data.validation_source`, these are used instead. The result of a trial
    is the first metric (r@1) after its last epoch, since the final training, without validation, also uses its last
    epoch.

    The same call resumes a sweep: an interrupted trial is resumed from its last checkpoint. Several processes can work
    on one study; each trains trials that no other process is training.

    Args:
        config: Configuration of all trials, except for the keys of `space`.
        space: Values to try by dotted key, or a YAML file with them; see `read_space`.
        path: Folder of the study. Its name is the name of the study in a database.
        sampler: "grid" (all combinations), "random" or "tpe". None: "grid" if all values are lists, otherwise "tpe".
        trials: Number of trials. None: all of a grid, otherwise 20.
        pruner: "none"; "median", which ends a trial whose validation results are below the median of earlier trials at
            the same epoch; or "halving" (successive halving), which continues the best quarter after 1, 4, 16, ...
            epochs.
        seed: Seed of the sampler.
        storage: URL of a database, for workers on several machines. None: a journal file in the folder, for workers on
            one machine.
        take_over: Whether to also resume trials of other machines that are lost.
        display: Display for progress.
        on_trial: Called with all results after each trial of this process.

    Returns:
        All results, including those of other processes.

    Raises:
        ConfigError: An argument, or a combination of values in the space, is not valid.
        RunError: The folder or the database contains another study, or cannot be written.
        Interrupted: The user pressed Ctrl-C; the same call resumes the sweep.
    """
    from shortlist.training import sweep_study

    display, folder, searched = display or default_display(), Path(path), read_space(space)
    if sampler is None:
        sampler = "grid" if all(isinstance(values, Choices) for values in searched.values()) else "tpe"
    strategy = sweep_study.make_sampler(sampler, searched, seed), sweep_study.make_pruner(pruner)
    total = _number_of_trials(sampler, searched, trials)
    import_modules(config.imports)
    base, images = _without_test(config, display)
    _check_candidates(base, searched, images)
    chosen = {"sampler": sampler, "pruner": pruner, "seed": seed}
    facts = {
        **chosen,
        "space": {key: asdict(values) for key, values in searched.items()},
        "images": images.fingerprint(),
        "config": base.model_dump(mode="json", exclude=NOT_COMPARED),
    }
    with sweep_study.open_study(folder, storage, *strategy) as study:
        _check_same(study, json.loads(json.dumps(facts)), folder)  # JSON has no tuples
        place = None if storage is None else sweep_study.address_without_password(storage)
        saved = {**chosen, "trials": total, "storage": place, "config": config.model_dump(mode="json")}
        write_json(folder / STUDY_FILE, saved)
        return _Worker(study, folder, base, searched, total, storage is None or take_over, display).run(on_trial)


def _check_same(study: optuna.Study, facts: dict[str, Any], folder: Path) -> None:
    """Check that a study has the same settings as when it was created."""
    before = study.user_attrs.get("facts", facts)
    if before != facts:
        different = ", ".join(name for name in facts if before.get(name) != facts[name])
        raise RunError(f"{folder} contains a sweep with other settings ({different}). Choose another folder.")
    study.set_user_attr("facts", facts)


def _number_of_trials(sampler: str, space: Space, wanted: int | None) -> int:
    if wanted is not None and wanted < 1:
        raise ConfigError(f"`trials` is the number of trials, at least 1, not {wanted}.")
    if sampler != "grid":
        return wanted or DEFAULT_TRIALS
    size = prod(len(values.examples()) for values in space.values())
    return size if wanted is None else min(wanted, size)


def _without_test(config: RunConfig, display: Display) -> tuple[RunConfig, Catalog]:
    """Return the configuration of a trial, which withholds all test images, and the remaining images."""
    check_validation_source(config, display)
    base = config.with_changes(data={"withhold_test": True}, evaluation={"tests": (), "before": False})
    images = open_images(base, display).catalog
    if config.data.validation_source is None and "validation" not in images.splits:
        base = base.with_changes(data={"validation": "half"})
    return base, half_validation(images) if base.data.validation == "half" else images


def _check_candidates(base: RunConfig, space: Space, images: Catalog) -> None:
    """Check the settings and losses of all candidates, and that the training classes suffice for their batches."""
    checked = list(candidates(base, space))
    for loss in {each.loss.model_dump_json(): each.loss for each in checked}.values():
        build_loss(loss, torch.arange(2), base.model.dim or 2)
    check_batch_sizes(checked, images.split("train"))


class _Worker:
    """Trains the trials of a study that no other worker is training."""

    def __init__(
        self,
        study: optuna.Study,
        folder: Path,
        config: RunConfig,
        space: Space,
        total: int,
        continue_all: bool,
        display: Display,
    ) -> None:
        self.study, self.folder, self.config, self.space, self.total = study, folder, config, space, total
        self.continue_all, self.display = continue_all, display

    def run(self, on_trial: Callable[[SweepResult], object] | None) -> SweepResult:
        """Train until no trial is left, and return the results of all workers."""
        result, started = self._collect(), time.monotonic()
        first = result.done
        with self.display.task("sweep", "trials") as advance:
            advance(result.done, result.total)
            while self._train_next():
                result = self._collect()
                advance(result.done, result.total)
                left = (result.total - result.done) * (time.monotonic() - started) / max(1, result.done - first)
                self._report_progress(result, left)
                if on_trial is not None:
                    on_trial(result)
        running = [trial.number for trial in result.trials if trial.state == "running"]
        if running:
            self.display.message(f"Other workers are still training trials {', '.join(map(str, running))}.")
        return result

    def _report_progress(self, result: SweepResult, seconds_left: float) -> None:
        best = result.best
        known = "" if best is None else f"; best {result.metric} {100 * (best.value or 0):.1f} % in trial {best.number}"
        text = f"{result.done} of {result.total} trials{known}; {format_duration(seconds_left)} left"
        facts = {} if best is None else {"best": best.number, "value": best.value}
        self.display.message(text, trials=result.done, total=result.total, seconds_left=round(seconds_left, 1), **facts)

    def _train_next(self) -> bool:
        """Train one trial; return whether there was one."""
        with ExitStack() as claim:
            trial = self._claim(claim)
            if trial is None:
                return False
            values = {key: each.suggest(trial, key) for key, each in self.space.items()}
            listed = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
            self.display.message(f"trial {trial.number}: {listed}", trial=trial.number, values=values)
            self._train(trial, with_values(self.config, values))
        return True

    def _claim(self, claim: ExitStack) -> Trial | None:
        """Return an interrupted trial, or a new one if there is none, and lock its folder. None: no trial is left."""
        from shortlist.training.sweep_study import TrialState, resume_trial, trials_of

        with exclusive_lock(self.folder / ".lock", RunInUseError(f"{self.folder} is locked by another process."), -1):
            trials = trials_of(self.study)
            for each in trials:
                ours = self.continue_all or self._run(each.number).path.exists()
                if each.state == TrialState.RUNNING and ours and self._lock(each.number, claim):
                    return resume_trial(self.study, each)
            if len(trials) >= self.total:
                return None
            trial = self.study.ask()
            if trial.number not in {each.number for each in trials_of(self.study)[: self.total]}:  # others were faster
                self.study.tell(trial, state=TrialState.FAIL)
                return None
            self._lock(trial.number, claim)
            return trial

    def _run(self, number: int) -> RunFolder:
        return RunFolder(self.folder / "trials" / f"{number:04}")

    def _lock(self, number: int, claim: ExitStack) -> bool:
        """Lock the folder of a trial; return whether no other worker holds its lock."""
        in_use = RunInUseError(f"Another process is training trial {number}.")
        try:
            claim.enter_context(exclusive_lock(self._run(number).path / ".worker.lock", in_use))
        except RunInUseError:
            return False
        return True

    def _train(self, trial: Trial, config: RunConfig) -> None:
        """Train or resume a trial, and report its result to the study."""
        from shortlist.training.sweep_study import TrialPruned, TrialState

        run, on_validation = self._run(trial.number), partial(self._report, trial)
        try:
            if run.config_file.exists():
                resume_run(run.path, self.display, on_validation=on_validation)
            else:
                shared = with_shared_views(config, self.folder)
                train_run(shared, run.path, self.display, on_validation=on_validation)
        except TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            self.display.message(f"trial {trial.number} was pruned", trial=trial.number, state="pruned")
        except Interrupted:
            raise Interrupted(f"Stopped in trial {trial.number}. Run the same command again to resume.") from None
        except RunError as error:
            if not run.failed.exists():
                raise
            self.study.tell(trial, state=TrialState.FAIL)
            self.display.message(f"trial {trial.number} failed: {error}", trial=trial.number, state="failed")
        else:
            self.study.tell(trial, _last_validation(run))

    def _report(self, trial: Trial, validation: Validation) -> None:
        """Report a validation to the study.

        Raises:
            TrialPruned: The trial is not worth continuing.
        """
        from shortlist.training.sweep_study import TrialPruned

        metric, value = next(iter(validation.metrics.items()))
        if "metric" not in self.study.user_attrs:
            self.study.set_user_attr("metric", metric)
        length = validation.epoch if self.config.training.validate_every_steps is None else validation.step
        if length not in self.study.trials[trial.number].intermediate_values:  # known if repeated after a resume
            trial.report(value, length)
        if not validation.last and trial.should_prune():
            raise TrialPruned

    def _collect(self) -> SweepResult:
        """Write the results of all trials so far to `results.json`, and delete checkpoints that are no longer needed.

        Checkpoints are large, and only needed to resume a trial.
        """
        result = collect_results(self.study, self.folder, self.config.name, tuple(self.space), self.total)
        write_json(self.folder / RESULTS_FILE, result.to_dict())
        for trial in result.trials:
            if trial.state in ("complete", "pruned"):
                shutil.rmtree(self._run(trial.number).checkpoints, ignore_errors=True)
        return result


def _last_validation(run: RunFolder) -> float:
    record = [each for each in run.metrics() if each["kind"] == "validation"][-1]
    return float(next(value for name, value in record.items() if name not in ("kind", "step", "epoch")))


def collect_results(study: optuna.Study, folder: Path, recipe: str, keys: tuple[str, ...], total: int) -> SweepResult:
    """Collect the results of a study."""
    from shortlist.training.sweep_study import importances, trials_of

    facts = study.user_attrs["facts"]
    trials = tuple(_trial_result(trial, facts["space"]) for trial in trials_of(study))
    metric = study.user_attrs.get("metric", "r@1")
    shares = importances(study, keys, MIN_FOR_IMPORTANCES)
    unit = "epochs" if facts["config"]["training"]["validate_every_steps"] is None else "steps"
    return SweepResult(folder, recipe, metric, facts["sampler"], facts["pruner"], keys, total, trials, shares, unit)


def _trial_result(trial: FrozenTrial, space: Mapping[str, Any]) -> TrialResult:
    values = {
        key: json.loads(value) if "texts" in space[key] else value for key, value in trial.params.items()
    }  # the values of lists are stored as JSON
    seconds = None if trial.duration is None else trial.duration.total_seconds()
    state = STATES[trial.state.name]
    return TrialResult(trial.number, state, values, trial.value, dict(trial.intermediate_values), seconds)


class _Saved(BaseModel):
    """The fields of study.json that are used here."""

    config: dict[str, Any]
    storage: str | None
    trials: int


def write_best_recipe(path: Path | str, out: Path | str | None = None, *, storage: str | None = None) -> Path:
    """Write the recipe with the values of the best trial of a sweep, to train once on all training classes.

    Args:
        path: Folder of the study.
        out: File to write; best.yaml in the folder by default.
        storage: URL of the database of the study, which is needed if it contains a password.

    Returns:
        The file.

    Raises:
        RunError: No sweep found in the folder, or no trial is complete.
    """
    from shortlist.training.sweep_study import open_study

    folder = Path(path)
    file = folder / STUDY_FILE
    if not file.is_file():
        raise RunError(f"No sweep found in {folder}: it contains no {STUDY_FILE}.")
    saved: _Saved = read_json(file, _Saved)
    config = validate_config(saved.config, str(file))
    with open_study(folder, storage or saved.storage) as study:
        keys = tuple(study.user_attrs["facts"]["space"])
        result = collect_results(study, folder, config.name, keys, saved.trials)
    best = result.best
    if best is None:
        raise RunError(f"No trial of the sweep in {folder} is complete yet, so there is no best trial.")
    about = (
        f"The best of {f'{result.done} of ' * (result.done < result.total)}{result.total} trials of a sweep over "
        f"{', '.join(keys)}: "
        f"validation {result.metric} {100 * (best.value or 0):.1f} % in trial {best.number}."
    )
    recipe = with_values(config, best.values).with_changes(data={"validation": "none"})  # train on all training classes
    recipe = recipe.model_copy(update={"name": f"{config.name}-best", "about": about, "measured": {}})
    out = folder / "best.yaml" if out is None else Path(out)
    check_writable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    write_text_atomically(out, text)
    return out
