"""Trackers that a run reports its metrics to, besides `metrics.jsonl`: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, WandBTracker
from pydantic import Field

from shortlist.config import RunConfig, flatten
from shortlist.errors import RunError
from shortlist.extras import extra
from shortlist.files import read_json, write_json
from shortlist.training.folder import RunFolder

PROJECT = "shortlist"  # project of Weights & Biases, and experiment of MLflow
_Ids = Annotated[dict[str, str], Field(min_length=1)]  # of the run, by the name of the tracker
RUN_IDS = {"wandb": lambda run: run.id, "mlflow": lambda run: run.info.run_id}


def check_trackers(names: Iterable[str]) -> None:
    """Raise a MissingExtraError if the package of a tracker is not installed."""
    for name in names:
        with extra("tracking", f"tracking: {name}"):
            import_module(name)


def start_trackers(accelerator: Accelerator, config: RunConfig, folder: RunFolder, step: int) -> None:
    """Start the trackers of a run, or resume those of an interrupted run.

    Args:
        accelerator: Forwards logged values to the trackers.
        config: Configuration of the run, which is sent to the trackers of a new run.
        folder: Folder of the run, which keeps the ids that the trackers gave to the run.
        step: Number of completed steps.

    Raises:
        RunError: A tracker cannot be started, for example without a connection or a login.
    """
    ids: dict[str, str] = read_json(folder.tracking_file, _Ids) if folder.tracking_file.exists() else {}
    settings = dict(flatten(config.model_dump(mode="json", exclude={"about", "paper", "measured"})))
    for name in config.tracking:
        try:
            tracker = _create(name, folder, step, ids.get(name))
            tracker.start()
            accelerator.trackers.append(tracker)
            if name in RUN_IDS and name not in ids:
                tracker.store_init_configuration(settings)
                ids[name] = RUN_IDS[name](tracker.tracker)
        except Exception as error:  # each library has its own
            raise RunError(
                f"Tracking with {name} cannot be started: {' '.join(str(error).split())}. Fix the cause, or change "
                f"tracking in {folder.config_file}, and then resume the run with: {folder.resume_command}"
            ) from error
    if ids:
        write_json(folder.tracking_file, ids)


def _create(name: str, folder: RunFolder, step: int, run_id: str | None) -> GeneralTracker:
    path = folder.path.absolute()
    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", str(path), purge_step=step + 1)
    if name == "wandb":
        return WandBTracker(PROJECT, name=path.name, dir=str(path), id=run_id, resume="allow")
    return _MLflow(PROJECT, run_id=run_id, run_name=path.name)


class _MLflow(MLflowTracker):  # type: ignore[misc]
    """MLflow, with the metrics under names that it allows: letters, digits and a few other characters."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        allowed = {re.sub(r"[^\w/. -]", "_", name.replace("@", "_at_")): value for name, value in values.items()}
        super().log({posixpath.normpath(name): value for name, value in allowed.items()}, step=step, **options)
