"""Optuna studies: their storage, samplers and pruners."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.errors import ConfigError, RunError, check_known
from shortlist.extras import extra
from shortlist.files import exclusive_write, naming, open_regular_file, validated, verified, with_checksum
from shortlist.seeds import derived_seed
from shortlist.training.search_space import Choices, Space

with extra("sweep", "A sweep"):
    import optuna
    from optuna import TrialPruned
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
    from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
    from optuna.storages import BaseStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, Trial, TrialState
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

SAMPLERS = ("grid", "random", "tpe")
PRUNERS: Mapping[str, Callable[[], BasePruner]] = {
    "none": NopPruner,
    "median": MedianPruner,
    "halving": partial(SuccessiveHalvingPruner, min_resource=1),  # "auto" ignores the first trial
}
__all__ = [
    "TrialPruned",
    "TrialState",
    "address_without_password",
    "importances",
    "make_pruner",
    "make_sampler",
    "open_study",
    "resume_trial",
    "trials_of",
]

JOURNAL = "journal.log"  # in the folder of a study
BEST_SHARE = 0.25  # share of the trials whose values are compared with those of all trials, for importances


class _TrialSampler(BaseSampler):
    """Samples each trial with a sampler of its own, whose seed depends on the number of the trial.

    With a single seed, all workers would draw the same values, and so would a resumed study.
    """

    def __init__(self, create: Callable[[int], BaseSampler]) -> None:
        self.create = create

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.sampler = self.create(trial.number)
        self.sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self.sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.sampler.sample_independent(study, trial, param_name, param_distribution)


def make_sampler(name: str, space: Space, seed: int) -> BaseSampler:
    """Create a sampler.

    Raises:
        ConfigError: The name is unknown, or a grid has a range.
    """
    check_known("sampler", name, SAMPLERS)
    if name != "grid":
        kind = RandomSampler if name == "random" else TPESampler
        return _TrialSampler(lambda number: kind(seed=derived_seed("sweep", seed, number) % 2**32))
    ranges = [key for key, values in space.items() if not isinstance(values, Choices)]
    if ranges:
        raise ConfigError(
            f"A grid needs lists, but {ranges[0]} is a range: list its values, or use the sampler random or tpe."
        )
    grid = GridSampler({key: values.texts for key, values in space.items() if isinstance(values, Choices)}, seed)
    return _TrialSampler(lambda number: grid)


def make_pruner(name: str) -> BasePruner:
    """Create a pruner.

    Raises:
        ConfigError: The name is unknown.
    """
    check_known("pruner", name, PRUNERS)
    return PRUNERS[name]()


class _JournalFile(JournalFileBackend):
    """Journal with a digest of each entry, which a full disk does not damage: incomplete writes are undone.

    The operating system releases its lock if the process is killed. Optuna's lock would block for 30 seconds.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._path = file

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        for log in super().read_logs(log_number_from):
            yield verified(validated(log, self._path, dict[str, Any]), self._path)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(with_checksum(log), separators=(",", ":")) + "\n" for log in logs).encode()
        with (
            exclusive_write(self._path, timeout=math.inf),
            naming(self._path),
            self._path.open("ab", buffering=0) as stream,
        ):
            _write_all(stream, lines)


def _write_all(stream: FileIO, content: bytes) -> None:
    """Append to a file, and restore its previous length if this fails."""
    size = stream.tell()
    try:
        while content:
            content = content[stream.write(content) :]
        os.fsync(stream.fileno())
    except OSError:
        stream.truncate(size)
        raise


def address_without_password(storage: str) -> str:
    """Return the URL of a database without its password.

    Raises:
        ConfigError: It is not a URL.
    """
    try:
        url = make_url(storage)
    except SQLAlchemyError:
        raise ConfigError(
            f"`storage` is not the URL of a database, such as postgresql://user@host/database: {storage!r}"
        ) from None
    return str(URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query))


@contextmanager
def open_study(
    folder: Path, storage: str | None, sampler: BaseSampler | None = None, pruner: BasePruner | None = None
) -> Iterator[optuna.Study]:
    """Open the study of a folder, whose name is the name of the study.

    Args:
        folder: Folder of the study.
        storage: URL of a database. None: a journal file in the folder.
        sampler: Sampler of a study that is created if it does not exist. None: the study must exist.
        pruner: Pruner of the study.

    Raises:
        ConfigError: `storage` is not a URL, or its driver is not installed.
        RunError: The storage cannot be read or written, or does not contain the study.
    """
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    place = str(folder / JOURNAL) if storage is None else address_without_password(storage)
    opened: BaseStorage | None = None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        opened = _open_journal(folder / JOURNAL) if storage is None else _open_database(storage, place)
        name = folder.absolute().name
        if sampler is not None:
            create = partial(optuna.create_study, sampler=sampler, pruner=pruner, direction="maximize")
            yield create(storage=opened, study_name=name, load_if_exists=True)
        elif name in optuna.get_all_study_names(opened):
            yield optuna.load_study(study_name=name, storage=opened)
        else:
            raise RunError(f"Study {name} not found in {place}.")
    except (optuna.exceptions.OptunaError, SQLAlchemyError) as error:
        reason = " ".join(str(error.__cause__ or error).split("\n")[0].split())
        raise RunError(
            f"The study in {place} cannot be read or written: {reason}. Fix the cause, and run the same command again."
        ) from error
    finally:
        if isinstance(opened, RDBStorage):
            opened.engine.dispose()
        optuna.logging.set_verbosity(before)


def _open_journal(file: Path) -> BaseStorage:
    try:
        with naming(file):
            if file.exists():
                open_regular_file(file).close()  # otherwise, Optuna would wait for a named pipe
            return JournalStorage(_JournalFile(file))
    except (ValueError, KeyError, RecursionError) as error:
        raise RunError(f"{file} is damaged ({error}). Restore a copy, or choose another folder.") from None


def _open_database(url: str, place: str) -> BaseStorage:
    if url.startswith("postgresql://"):  # older versions of SQLAlchemy use psycopg2
        url = f"postgresql+psycopg{url.removeprefix('postgresql')}"
    try:
        return _create_storage(url)
    except ImportError as error:
        raise ConfigError(f"The driver of the database {place} is not installed: {error.__cause__ or error}.") from None


def _create_storage(url: str) -> BaseStorage:
    """Open a database. Processes that create its tables at the same time fail, and succeed when they try again."""
    options = {"pool_pre_ping": True}  # connections may break during a long trial
    for seconds in (0.2, 0.5, 1.0, 2.0):
        with suppress(IntegrityError, ProgrammingError):
            return RDBStorage(url, engine_kwargs=options)
        time.sleep(seconds)
    return RDBStorage(url, engine_kwargs=options)


def resume_trial(study: optuna.Study, trial: FrozenTrial) -> Trial:
    """Return a running trial, to continue it."""
    return Trial(study, trial._trial_id)


def trials_of(study: optuna.Study) -> list[FrozenTrial]:
    """Return all trials, without those that exceeded the number of trials and were discarded."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.params or not trial.state.is_finished()]


def importances(study: optuna.Study, keys: Sequence[str], min_trials: int) -> dict[str, float] | None:
    """Return the share of each key in the difference between the values of the best quarter and of all trials.

    This is PED-ANOVA, which needs no other package.

    Returns:
        Shares in descending order, or None if fewer than `min_trials` trials are complete, the best are as good as the
        others, or the best have the same values as all.
    """
    values = sorted(trial.value or 0.0 for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    best = math.ceil(BEST_SHARE * len(values))  # number of trials
    if len(values) < min_trials or values[-best] == values[0]:
        return None
    found = PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE).evaluate(study, params=list(keys))
    total = sum(found.values())
    return {key: share / total for key, share in found.items()} if total else None
