"""Runs that are tracked by MLflow, in a local database, and by Weights & Biases, offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from shortlist.errors import RunError
from shortlist.extras import MissingExtraError
from shortlist.training import RunFolder, train_run
from shortlist.training.tracking import _MLflow, start_trackers
from tests.processes import Commands
from tests.training.runs import RECIPE, class_folders, config, records

# In a process of its own: these packages take seconds to import, and start threads and another process.
SCRIPT = """
import json, os, sys
from pathlib import Path
from mlflow import MlflowClient
from shortlist import resume, train

os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
settings = ["data.source=images", "data.validation=none", "training.epochs=1", "tracking=[wandb, mlflow]"]
run = train("tiny.yaml", *settings, output="run", report=False)
(run.path / "evaluation.json").unlink()  # as if it had been interrupted before the end
resume(run.path, report=False)
client = MlflowClient()
(experiment,) = client.search_experiments(filter_string="name = 'shortlist'")
(found,) = client.search_runs([experiment.experiment_id])
history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
facts = {
    "name": found.info.run_name,
    "status": found.info.status,
    "settings": found.data.params,
    "metrics": {name: [(each.step, each.value) for each in values] for name, values in history.items()},
}
Path("facts.json").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """A folder with a tracked run that was resumed, and what MLflow's client reads from its database."""
    home = tmp_path_factory.mktemp("tracked")
    class_folders(home / "images")
    (home / "tiny.yaml").write_text(RECIPE)
    (home / "script.py").write_text(SCRIPT)
    code, _, error = commands.run(cwd=home, script=home / "script.py")
    assert code == 0, error
    return home


def test_mlflow_has_the_same_numbers_and_the_settings(home: Path) -> None:
    facts = json.loads((home / "facts.json").read_text())
    steps, (test,) = records(home / "run"), records(home / "run", "test")
    assert facts["metrics"]["step/loss"] == [[each["step"], each["loss"]] for each in steps]
    assert facts["metrics"]["test/r_at_1"] == 2 * [[test["step"], test["r@1"]]]  # once more after it was resumed
    assert (facts["name"], facts["status"]) == ("run", "FINISHED")
    assert facts["settings"]["optimizer.lr"] == "0.001"
    assert facts["settings"]["loss.name"] == "recall_at_k"


def test_weights_and_biases_has_the_same_names(home: Path) -> None:
    files = sorted((home / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    ids = json.loads((home / "run" / "tracking.json").read_text())
    assert len({file.name for file in files}) == 1
    assert files[0].name == f"run-{ids['wandb']}.wandb"
    contents = b"".join(file.read_bytes() for file in files)
    assert all(name in contents for name in (b"step/loss", b"step/lr", b"test/r@1", b"optimizer.lr"))
    assert not (home / "wandb").exists()


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("test/roxford5k+r1m/mP@10 hard", "test/roxford5k_r1m/mP_at_10 hard"), ("test//data/a/r@1", "test/data/a/r_at_1")],
)
def test_names_that_mlflow_does_not_allow(name: str, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, Any] = {}
    monkeypatch.setattr("accelerate.tracking.MLflowTracker.log", lambda self, values, **_: logged.update(values))
    _MLflow("shortlist").log({name: 0.5}, step=1)
    assert logged == {allowed: 0.5}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = f"tracking: {name} needs the package {name}, which is not installed: pip install 'shortlist\\[tracking]'"
    with pytest.raises(MissingExtraError, match=f"^{message}$"):
        train_run(config(tmp_path, f"tracking=[{name}]"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise ConnectionError("no\nserver")

    monkeypatch.setattr("accelerate.tracking.WandBTracker.start", refuse)
    accelerator = Accelerator()
    with pytest.raises(RunError, match=r"^Tracking with wandb cannot be started: no server. .* --resume .*run$"):
        start_trackers(accelerator, config(tmp_path, "tracking=[wandb]"), RunFolder(tmp_path / "run"), 0)
    accelerator.end_training()  # does not finish what was not started
