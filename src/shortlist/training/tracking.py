"""Trackers that a run reports its metrics to, besides `metrics.jsonl`: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, WandBTracker

from shortlist.config import RunConfig
from shortlist.errors import ConfigError, RunError
from shortlist.files import read_json, write_text_atomically
from shortlist.training.folder import RunFolder

PROJECT = "shortlist"  # of Weights & Biases, and experiment of MLflow


def check_trackers(names: Iterable[str]) -> None:
    """Raise a ConfigError if a package is not installed."""
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError:
            raise ConfigError(f"tracking: {name} needs the package {name}: pip install {name}") from None


def start_trackers(accelerator: Accelerator, config: RunConfig, folder: RunFolder, step: int) -> None:
    """Start the trackers of a run, or continue with those of an interrupted run.

    Args:
        accelerator: Passes what is logged to the trackers.
        config: Configuration of the run.
        folder: Folder of the run, which keeps the ids that the trackers gave to the run.
        step: Number of steps that were done before.

    Raises:
        RunError: A tracker cannot be started, for example without a connection or a login.
    """
    known: dict[str, str] = read_json(folder.tracking_file) if folder.tracking_file.exists() else {}
    try:
        accelerator.log_with = [_create(name, config, folder, step, known.get(name)) for name in config.tracking]
        accelerator.init_trackers(PROJECT)
    except Exception as error:  # each library has its own
        problem = " ".join(str(error).split())
        raise RunError(
            f"Tracking with {', '.join(config.tracking)} cannot be started: {problem}. Correct this, or change "
            f"tracking in {folder.config_file}, and then resume the run with: {folder.resume_command}"
        ) from error
    ids = {"wandb": lambda run: run.id, "mlflow": lambda run: run.info.run_id}
    known = {each.name: ids[each.name](each.tracker) for each in accelerator.trackers if each.name in ids}
    if known:
        write_text_atomically(folder.tracking_file, json.dumps(known) + "\n")


def _create(name: str, config: RunConfig, folder: RunFolder, step: int, run_id: str | None) -> GeneralTracker:
    settings = config.model_dump(mode="json")
    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", str(folder.path), purge_step=step + 1)
    if name == "wandb":
        path = folder.path.absolute()
        return WandBTracker(PROJECT, name=path.name, dir=str(path), config=settings, id=run_id, resume="allow")
    return _MLflow(PROJECT, run_id=run_id, run_name=folder.path.absolute().name, tags={"recipe": config.name})


class _MLflow(MLflowTracker):  # type: ignore[misc]
    """MLflow, which does not allow @ in the name of a metric."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        super().log({name.replace("@", "_at_"): value for name, value in values.items()}, step=step, **options)
