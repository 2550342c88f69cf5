"""Sweeps: trials without test images, interrupted and shared studies, and the recipe of the best trial."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import yaml

from shortlist.config import RunConfig
from shortlist.data import open_catalog
from shortlist.errors import ConfigError, DataError, Interrupted, RunError
from shortlist.files import exclusive_lock, exclusive_write, read_json
from shortlist.progress import Display
from shortlist.recipes import open_recipe
from shortlist.training import (
    EvalImages,
    RunFolder,
    SweepResult,
    evaluate_run,
    make_plan,
    sweep,
    sweeps,
    write_best_recipe,
)
from shortlist.training import train_run as train
from shortlist.training.loop import Validation
from shortlist.training.sweep_study import open_study
from tests.processes import Commands
from tests.training.runs import (
    FASTEST_MODEL,
    STEP_BEGINS,
    class_folders,
    config,
    interrupt_where,
    kill_where,
    records,
    same_weights,
    wait_where,
    weights,
)
from tests.training.test_ablation import Heard

SMALL = (
    *(FASTEST_MODEL, "data.validation=none", "batch.per_class=2", "batch.size=4", "training.epochs=1"),
    "evaluation.before=true",
)
GRID = {"optimizer.lr": [1e-3, 1e-2], "training.epochs": [1, 2]}
RATES = {"optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """8 classes: 4 for tests, 2 for validation and 2 for training."""
    return config(class_folders(tmp_path_factory.mktemp("images"), classes=8, images=4), *SMALL)


@pytest.fixture(scope="module")
def finished(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """A grid of 4 trials."""
    return sweep(base, GRID, tmp_path_factory.mktemp("sweeps") / "study")


def run_of(result: SweepResult, number: int) -> RunFolder:
    return RunFolder(result.path / "trials" / f"{number:04}")


class TestTrials:
    def test_a_grid_has_every_combination_once(self, finished: SweepResult) -> None:
        assert [trial.number for trial in finished.trials] == [0, 1, 2, 3]
        values = sorted((trial.values["optimizer.lr"], trial.values["training.epochs"]) for trial in finished.trials)
        assert values == [(1e-3, 1), (1e-3, 2), (1e-2, 1), (1e-2, 2)]
        for trial in finished.trials:
            trained = run_of(finished, trial.number).config()
            assert (trained.optimizer.lr, trained.training.epochs) == tuple(trial.values.values())

    def test_the_result_is_that_of_the_last_validation(self, finished: SweepResult) -> None:
        assert finished.metric == "r@1"
        for trial in finished.trials:
            validations = records(run_of(finished, trial.number), "validation")
            assert trial.validations == {each["epoch"]: each["r@1"] for each in validations}
            assert len(validations) == trial.values["training.epochs"]
            assert trial.value == validations[-1]["r@1"]
        assert finished.best is not None
        assert finished.best.value == max(trial.value or 0 for trial in finished.trials)

    def test_results_json(self, finished: SweepResult) -> None:
        found = read_json(finished.path / "results.json")
        assert found == json.loads(json.dumps(finished.to_dict()))
        assert found["best"] == (finished.best and finished.best.number)

    def test_checkpoints_of_finished_trials_are_deleted(self, finished: SweepResult) -> None:
        assert not list(finished.path.glob("trials/*/checkpoints"))

    def test_finished_trials_are_not_trained_again(
        self, finished: SweepResult, base: RunConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeps, "train_run", lambda *_, **__: pytest.fail("trained"))
        left = run_of(finished, 0).checkpoints  # behind, by a worker that was killed
        left.mkdir()
        (left / "step-00000001.safetensors").touch()
        assert sweep(base, GRID, finished.path) == finished
        assert not left.exists()

    def test_another_sweep_in_the_folder(self, finished: SweepResult, base: RunConfig, tmp_path: Path) -> None:
        for space, settings, message in (
            ({"optimizer.lr": [1e-3]}, {}, "space"),
            (GRID, {"sampler": "random"}, "sampler"),
            (GRID, {"seed": 1}, "seed"),
        ):
            with pytest.raises(RunError, match=rf"contains a sweep with other settings \({message}\)"):
                sweep(base, space, finished.path, **settings)
        others = config(class_folders(tmp_path / "others", classes=8, images=5), *SMALL)
        with pytest.raises(RunError, match=r"other settings \(images\)"):
            sweep(others, GRID, finished.path)

    def test_paths_and_threads_may_differ(self, finished: SweepResult, base: RunConfig, tmp_path: Path) -> None:
        moved = Path(shutil.copytree(base.data.source, tmp_path / "moved"))
        study = Path(shutil.copytree(finished.path, tmp_path / "study"))  # it will record where the images are now
        assert sweep(config(moved, *SMALL, "training.threads=1"), GRID, study).done == 4


class TestTestImages:
    def test_a_trial_has_no_test_images(self, finished: SweepResult) -> None:
        for trial in finished.trials:
            plan = make_plan(run_of(finished, trial.number).config(), Display())
            assert set(plan.catalog.splits) == {"train", "validation"}
            assert plan.eval_sets == ()
            assert sorted(plan.train.classes()) == [0, 1]
            assert plan.validation is not None
            assert sorted(plan.validation.catalog.classes()) == [2, 3]
            assert json.loads(run_of(finished, trial.number).evaluation_file.read_text()) == []

    def test_unreadable_test_images_do_not_disturb_a_sweep(self, base: RunConfig, tmp_path: Path) -> None:
        source = Path(shutil.copytree(base.data.source, tmp_path / "images"))
        tests = open_catalog(str(source)).split("test")
        for row in range(len(tests)):
            tests.file(row).write_bytes(b"not an image")
        unreadable = config(source, *SMALL, f"evaluation.tests=[{{source: {json.dumps(str(source))}}}]")
        with pytest.raises(DataError):
            train(unreadable, tmp_path / "run")
        result = sweep(unreadable, {"optimizer.lr": [1e-3]}, tmp_path / "study")
        assert result.best is not None
        for on_missing in (None, "skip"):
            with pytest.raises(DataError, match="has no test images"):
                evaluate_run(run_of(result, 0).path, EvalImages(on_missing=on_missing))

    def test_the_best_recipe_is_tested_once_after_training_on_all_classes(
        self, finished: SweepResult, base: RunConfig, tmp_path: Path
    ) -> None:
        recipe = open_recipe(str(write_best_recipe(finished.path, tmp_path / "new" / "best.yaml")))
        assert finished.best is not None
        assert {key: getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) for key in GRID} == (
            finished.best.values
        )
        assert (recipe.name, recipe.data, recipe.evaluation) == ("tiny-best", base.data, base.evaluation)
        assert f"trial {finished.best.number}." in recipe.about
        run = train(recipe, tmp_path / "run")
        assert sorted(make_plan(recipe, Display()).train.classes()) == [0, 1, 2, 3]
        assert len(json.loads(run.evaluation_file.read_text())) == 1

    def test_the_validation_setting_of_the_recipe_has_no_effect(
        self, base: RunConfig, finished: SweepResult, tmp_path: Path
    ) -> None:
        half = base.model_copy(update={"data": base.data.model_copy(update={"validation": "half"})})
        assert sweep(half, GRID, finished.path).done == 4  # the same study
        assert open_recipe(str(write_best_recipe(finished.path))).data.validation == "none"

    def test_a_validation_source(
        self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        """Test images are refused, also under the name of another folder; other images are accepted."""
        trained = pretend(lambda *_: [0.5])
        source = Path(base.data.source)
        tests = {Path(path).parent.name for path in open_catalog(str(source)).split("test").paths}
        others = tmp_path / "others"
        for folder in source.iterdir():
            if folder.name not in tests:
                shutil.copytree(folder, others / folder.name)

        def chosen(validation: Path, *settings: str) -> RunConfig:
            where = json.dumps(str(validation))
            return config(
                source, *SMALL, "data.validation=none", f"data.validation_source={{source: {where}}}", *settings
            )

        space = {"optimizer.lr": [1e-3]}
        with pytest.raises(ConfigError, match=r"contains test images of this recipe .*, such as .*Use other images"):
            sweep(chosen(source), space, tmp_path / "study")
        as_test = f"evaluation.tests=[{{source: {json.dumps(str(others))}}}]"
        with pytest.raises(ConfigError, match="contains test images of this recipe"):
            sweep(chosen(others, as_test), space, tmp_path / "study")
        assert not trained
        assert sweep(chosen(others), space, tmp_path / "study").done == 1

    def test_a_validation_split_of_the_images(self, base: RunConfig, tmp_path: Path) -> None:
        rows = [
            f"{image},{image.parent.name},{split}"
            for number, folder in enumerate(sorted(Path(base.data.source).iterdir()))
            for image in sorted(folder.iterdir())
            for split in [("train", "train", "train", "validation", "validation")[number] if number < 5 else "test"]
        ]
        (tmp_path / "images.csv").write_text("\n".join(["path,label,split", *rows]))
        result = sweep(config(tmp_path / "images.csv", *SMALL), {"optimizer.lr": [1e-3]}, tmp_path / "study")
        plan = make_plan(run_of(result, 0).config(), Display())
        assert len(plan.train.classes()) == 3
        assert plan.validation is not None
        assert len(plan.validation.catalog.classes()) == 2


Scores = Callable[[int, RunConfig], list[float]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scores], list[RunConfig]]:
    """Replace the training: trial n has the given validation results, one per epoch. Return the trained configs."""

    def replaced(scores: Scores) -> list[RunConfig]:
        trained: list[RunConfig] = []

        def pretended(config: RunConfig, path: Path, display: Display, *, on_validation: Any) -> None:
            run = RunFolder(path)
            run.begin(config)
            trained.append(config)
            values = scores(int(path.name), config)
            for step, score in enumerate(values, 1):
                epoch = step if config.training.validate_every_steps is None else 1
                run.log({"kind": "validation", "step": step, "epoch": epoch, "r@1": score})
                on_validation(Validation(epoch, step, {"r@1": score}, last=step == len(values)))

        monkeypatch.setattr(sweeps, "train_run", pretended)
        return trained

    return replaced


class TestSampling:
    @pytest.mark.parametrize(("sampler", "total"), [("random", 4), ("tpe", 12)])  # the first 10 of TPE are random
    def test_values_do_not_depend_on_interruptions(
        self, sampler: str, total: int, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        trained = pretend(lambda _, one: [one.optimizer.lr])
        whole = sweep(base, RATES, tmp_path / "whole", sampler=sampler, trials=total)
        for trials in (1, 3, total):
            parts = sweep(base, RATES, tmp_path / "parts", sampler=sampler, trials=trials)
            assert parts.done == trials
        assert [each.values for each in parts.trials] == [each.values for each in whole.trials]
        assert len({one.optimizer.lr for one in trained}) == total
        assert all(1e-4 <= one.optimizer.lr <= 1e-1 for one in trained)
        other = sweep(base, RATES, tmp_path / "other", sampler=sampler, trials=1, seed=1)
        assert other.trials[0].values != whole.trials[0].values

    def test_tpe_finds_better_values_than_random(
        self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        pretend(lambda _, one: [1 - abs(one.optimizer.lr - 0.05)])
        means = {}
        for sampler in ("random", "tpe"):
            result = sweep(base, RATES, tmp_path / sampler, sampler=sampler, trials=20)
            means[sampler] = sum(each.value or 0 for each in result.trials[10:]) / 10
        assert means["tpe"] > means["random"]

    def test_defaults(self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]) -> None:
        pretend(lambda *_: [0.5])
        results: list[SweepResult] = []

        def stop_after_two(result: SweepResult) -> None:
            results.append(result)
            if result.done == 2:
                raise Interrupted("stopped")

        space = {**RATES, "training.epochs": {"low": 1, "high": 3}}
        with pytest.raises(Interrupted):
            sweep(base, space, tmp_path / "ranges", on_trial=stop_after_two)
        assert (results[-1].sampler, results[-1].total, results[-1].done) == ("tpe", 20, 2)
        assert {type(each.values["training.epochs"]) for each in results[-1].trials} == {int}
        assert sweep(base, GRID, tmp_path / "grid", trials=9).total == 4

    @pytest.mark.parametrize(
        ("space", "settings", "message"),
        [
            (RATES, {"sampler": "grid"}, "A grid needs lists, but optimizer.lr is a range"),
            (GRID, {"sampler": "gird"}, "Unknown sampler 'gird'; did you mean 'grid'"),
            (GRID, {"pruner": "mean"}, "Unknown pruner 'mean'; did you mean 'median'"),
            (GRID, {"trials": 0}, "`trials` is the number of trials, at least 1, not 0"),
            (GRID, {"storage": "nowhere"}, "`storage` is not the URL of a database"),
            ({"optimizer.lrr": [1]}, {}, "did you mean 'lr'"),
            ({"batch.size": [4, 400]}, {}, "A batch of batch.size=400 images cannot be filled"),
            ({"loss": [{"name": "pml.TripletMarginLoss", "args": {"margn": 1}}]}, {}, "margn"),
        ],
    )
    def test_mistakes_are_reported_before_the_first_trial(
        self, space: dict[str, Any], settings: dict[str, Any], message: str, base: RunConfig, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            sweep(base, space, tmp_path / "study", **settings)
        assert not (tmp_path / "study").exists()


class TestPruning:
    @pytest.mark.parametrize(("pruner", "good"), [("median", 5), ("halving", 1)])
    def test_a_bad_trial_is_pruned(
        self, pruner: str, good: int, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        pretend(lambda number, _: [0.5, 0.9, 0.8] if number < good else [0.1, 0.95, 0.99])
        result = sweep(base, RATES, tmp_path / "study", trials=good + 1, pruner=pruner)
        assert [trial.state for trial in result.trials] == ["complete"] * good + ["pruned"]
        assert result.trials[-1].validations == {1: 0.1}
        assert result.best is not None
        assert result.best.value == 0.8
        without = sweep(base, RATES, tmp_path / "without", trials=good + 1)
        assert [trial.state for trial in without.trials] == ["complete"] * (good + 1)

    def test_a_trial_is_not_pruned_at_its_end(
        self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        pretend(lambda number, _: [0.5, 0.9] if number < 5 else [0.1])
        result = sweep(base, RATES, tmp_path / "study", pruner="median", trials=6)
        assert [trial.state for trial in result.trials] == ["complete"] * 6
        assert result.trials[-1].value == 0.1

    def test_validations_within_an_epoch(
        self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        pretend(lambda *_: [0.5, 0.9, 0.8])
        often = base.with_changes(training={"validate_every_steps": 1})
        result = sweep(often, RATES, tmp_path / "study", trials=1)
        assert result.trials[0].validations == {1: 0.5, 2: 0.9, 3: 0.8}
        assert (result.unit, sweep(base, RATES, tmp_path / "epochs", trials=1).unit) == ("steps", "epochs")

    def test_a_pruned_training_stops(self, base: RunConfig, tmp_path: Path) -> None:
        """An exception of `on_validation` ends an actual training."""
        from shortlist.training.sweep_study import TrialPruned

        settings = ("training.epochs=2", "optimizer.lr=1e-3")
        one = base.model_copy(update={"training": config(Path("x"), *settings).training})
        seen: list[Validation] = []

        def stop(validation: Validation) -> None:
            seen.append(validation)
            raise TrialPruned

        half = one.model_copy(update={"data": one.data.model_copy(update={"validation": "half"})})
        with pytest.raises(TrialPruned):
            train(half, tmp_path / "run", on_validation=stop)
        assert [(each.epoch, each.last) for each in seen] == [(1, False)]
        assert records(tmp_path / "run", "validation")[0].items() >= {"step": seen[0].step, **seen[0].metrics}.items()
        assert {each["epoch"] for each in records(tmp_path / "run")} == {1}


class TestInterruptions:
    def test_a_run_that_diverges_is_a_result(
        self, base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def diverges(one: RunConfig, path: Path, *_: object, **__: object) -> None:
            (path / "failed").mkdir(parents=True)
            raise RunError("not finite")

        monkeypatch.setattr(sweeps, "train_run", diverges)
        result = sweep(base, GRID, tmp_path / "study", trials=2)
        assert [trial.state for trial in result.trials] == ["failed", "failed"]
        assert result.best is None
        with pytest.raises(RunError, match=r"No trial of the sweep in .* is complete yet"):
            write_best_recipe(result.path)

    def test_a_trial_with_another_error_is_continued(
        self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        trained = pretend(lambda *_: [][1])  # an IndexError
        with pytest.raises(IndexError):
            sweep(base, GRID, tmp_path / "study")
        (tmp_path / "study" / "trials" / "0000" / "config.yaml").unlink()  # as if it had not been set up
        pretend(lambda *_: [0.5])
        result = sweep(base, GRID, tmp_path / "study")
        assert [trial.number for trial in result.trials] == [0, 1, 2, 3]
        assert (trained[0].optimizer.lr, trained[0].training.epochs) == tuple(result.trials[0].values.values())

    def test_a_trial_of_another_worker_is_skipped(
        self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        pretend(lambda *_: [][1])
        with pytest.raises(IndexError):
            sweep(base, GRID, tmp_path / "study")
        pretend(lambda *_: [0.5])
        heard, folder = Heard(), tmp_path / "study" / "trials" / "0000"
        with exclusive_lock(folder / ".worker.lock", RunError("in use")):
            result = sweep(base, GRID, tmp_path / "study", display=heard)
        assert [trial.state for trial in result.trials] == ["running", "complete", "complete", "complete"]
        assert heard.messages[-1] == "Other workers are still training trials 0."

    def test_trials_of_a_lost_machine_are_taken_over(
        self, base: RunConfig, tmp_path: Path, pretend: Callable[[Scores], list[RunConfig]]
    ) -> None:
        """Two machines with one database, each with its own folder."""
        storage = f"sqlite:///{tmp_path / 'study.db'}"
        trained = pretend(lambda *_: [][1])
        with pytest.raises(IndexError):
            sweep(base, GRID, tmp_path / "lost" / "study", storage=storage)
        pretend(lambda *_: [0.5])
        here = tmp_path / "here" / "study"
        result = sweep(base, GRID, here, storage=storage)
        assert [trial.state for trial in result.trials] == ["running", "complete", "complete", "complete"]
        assert "The best of 3 of 4 trials" in open_recipe(str(write_best_recipe(here))).about
        result = sweep(base, GRID, here, storage=storage, take_over=True)
        assert [trial.state for trial in result.trials] == ["complete"] * 4
        assert (trained[0].optimizer.lr, trained[0].training.epochs) == tuple(result.trials[0].values.values())
        assert not (here / "journal.log").exists()
        assert write_best_recipe(here).is_file()  # finds the database
        with pytest.raises(RunError, match=r"Study renamed not found in sqlite:.*study\.db"):
            write_best_recipe(here.rename(here.with_name("renamed")))

    def test_ctrl_c(self, base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stopped(*_: object, **__: object) -> None:
            raise Interrupted("stopped")

        monkeypatch.setattr(sweeps, "train_run", stopped)
        with pytest.raises(Interrupted, match=r"Stopped in trial 0\. Run the same command again to resume\."):
            sweep(base, GRID, tmp_path / "study")

    def test_a_damaged_journal(self, finished: SweepResult, base: RunConfig, tmp_path: Path) -> None:
        study = Path(shutil.copytree(finished.path, tmp_path / "study"))
        journal = study / "journal.log"
        journal.write_text("nonsense\n" + journal.read_text())
        with pytest.raises(RunError, match=r"journal.log is damaged"):
            sweep(base, GRID, study)

    def test_a_full_disk_does_not_damage_the_journal(
        self, finished: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        study = Path(shutil.copytree(finished.path, tmp_path / "study"))
        before = (study / "journal.log").read_bytes()

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with (
            open_study(study, None) as opened,
            pytest.raises(OSError, match=r"No space left on device: .*journal\.log"),
        ):
            opened.set_user_attr("note", "written in part")
        assert (study / "journal.log").read_bytes() == before

    def test_a_worker_waits_for_the_journal(self, finished: SweepResult, tmp_path: Path) -> None:
        study = Path(shutil.copytree(finished.path, tmp_path / "study"))
        with open_study(study, None) as opened, ThreadPoolExecutor(1) as other:
            with exclusive_write(study / "journal.log"):
                written = other.submit(opened.set_user_attr, "note", "later")
                assert not wait([written], timeout=0.2).done  # an error would be raised at once
            written.result()
            assert opened.user_attrs["note"] == "later"


@pytest.fixture
def here(base: RunConfig, tmp_path: Path) -> Path:
    """The folder in which commands run, with a recipe of 2 epochs of 2 steps, and a grid of 3 trials."""
    settings = {"training": base.training.model_copy(update={"epochs": 2})}
    recipe = base.model_copy(update=settings).model_dump(mode="json")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "space.yaml").write_text("optimizer.lr: [1e-3, 2e-3, 3e-3]\n")
    return tmp_path


def first_line(file: Path) -> str:
    return file.read_text().partition("\n")[0]


SWEEP = ("sweep", "tiny.yaml", "--space", "space.yaml", "--out")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed processes are forked")
class TestProcesses:
    def test_a_killed_and_interrupted_sweep_continues_its_trial(self, here: Path, commands: Commands) -> None:
        """It is killed and interrupted in the second of 3 trials, after the checkpoint of step 2."""
        sweep(open_recipe(here / "tiny.yaml"), here / "space.yaml", here / "whole")
        trial = here / "killed" / "trials" / "0001"
        waits = wait_where(f"args[1] == 2 and pathlib.Path({str(trial)!r}).exists()", *STEP_BEGINS)
        kill_where(waits, commands, here, *SWEEP, "killed")
        before = first_line(trial / "metrics.jsonl")
        assert not (trial / "evaluation.json").exists()
        assert interrupt_where(waits, commands, here, *SWEEP, "killed").wait() == 130
        code, out, error = commands.run(*SWEEP, "killed", cwd=here)
        assert code == 0, error
        assert "trial 0:" not in out
        assert "Resuming after step 3" in out
        assert first_line(trial / "metrics.jsonl") == before  # its speed would differ if step 1 were trained again
        whole, killed = (json.loads((here / name / "results.json").read_text()) for name in ("whole", "killed"))
        for one, other in zip(whole["trials"], killed["trials"], strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        assert same_weights(weights(here / "whole" / "trials" / "0001"), weights(trial))

    def test_two_workers_share_a_study(self, here: Path, commands: Commands) -> None:
        self.share(here, commands, *SWEEP, "study")

    def share(self, here: Path, commands: Commands, *command: str, folders: tuple[str, str] = ("", "")) -> None:
        """Start two workers; every trial is trained by exactly one of them."""
        workers = [commands.start(*command, cwd=here / folder) for folder in folders]
        assert [worker.wait() for worker in workers] == [0, 0], [worker.err for worker in workers]
        trained = [
            [line.partition(":")[0] for line in worker.out.splitlines() if line.startswith("trial ") and "=" in line]
            for worker in workers
        ]
        assert sorted(trained[0] + trained[1]) == ["trial 0", "trial 1", "trial 2"]

    def test_machines_share_a_postgresql_server(self, postgres: str, here: Path, commands: Commands) -> None:
        for machine in ("one", "other"):
            (here / machine).mkdir()
            for name in ("tiny.yaml", "space.yaml"):
                shutil.copy(here / name, here / machine / name)
        storage = ("--storage", postgres)
        self.share(here, commands, *SWEEP, "study", *storage, folders=("one", "other"))
        code, _, error = commands.run("sweep", "best", "study", *storage, cwd=here / "one")
        assert code == 0, error
        assert (here / "one" / "study" / "best.yaml").is_file()
        recipe, space, study = (here / "other" / name for name in ("tiny.yaml", "space.yaml", "study"))
        with pytest.raises(RunError, match=r"contains a sweep with other settings \(seed\)"):
            sweep(open_recipe(recipe), space, study, seed=1, storage=postgres)


@pytest.fixture
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL database: SHORTLIST_TEST_POSTGRES, or that of a server that is started if it is installed."""
    if given := os.environ.get("SHORTLIST_TEST_POSTGRES"):
        yield given
        return
    programs = [Path(each).parent for each in [shutil.which("initdb")] if each]
    programs += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if not programs:
        pytest.skip("PostgreSQL is not installed, and SHORTLIST_TEST_POSTGRES is not set")
    user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    if user is not None and user not in {each.pw_name for each in pwd.getpwall()}:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short, as the path of a socket must be; others may enter it
    if user is not None:
        shutil.chown(folder, user)

    def run(program: str, *args: str) -> None:
        command = [programs[0] / program, "-D", folder / "data", *args]
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    run("initdb", "--auth=trust", "--username=tester", "--no-sync")
    run("pg_ctl", "start", "--wait", "--log", str(folder / "log"), "--options", f"-k {folder} -h '' -F")
    try:
        yield f"postgresql://tester@/postgres?host={folder}"
    finally:
        run("pg_ctl", "stop", "--wait", "--mode", "immediate")
        shutil.rmtree(folder)


def test_a_database_that_does_not_answer(base: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"The study in postgresql://me@127.0.0.1:9/x cannot be read") as error:
        sweep(base, GRID, tmp_path / "study", storage="postgresql://me:secret@127.0.0.1:9/x")
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_passwords_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shortlist.training.sweep_study import address_without_password

    url = "postgresql://me:se/cr:et@host:5/x?a=b"
    assert address_without_password(url) == "postgresql://me@host:5/x?a=b"
    monkeypatch.setattr(sys, "argv", ["shortlist", "sweep", "--storage", url])
    run = RunFolder(tmp_path)
    run.config_file.touch()
    run.record_facts("images")
    assert json.loads(run.facts_file.read_text())["command"].endswith("'postgresql://me:***@host:5/x?a=b'")


def test_importances() -> None:
    """The key that determines the result is the most important; too few or equal results have no importances."""
    from shortlist.training.sweep_study import importances, optuna

    space = optuna.distributions.FloatDistribution(0, 1)
    study = optuna.create_study(direction="maximize")
    for number in range(40):
        values = {"a": (number % 8) / 8, "b": (number * 7 % 40) / 40}
        study.add_trial(optuna.create_trial(params=values, distributions={"a": space, "b": space}, value=values["b"]))
        if number == 5:
            assert importances(study, ["a", "b"], 8) is None
    found = importances(study, ["a", "b"], 8)
    assert found is not None
    assert list(found) == ["b", "a"]
    assert sum(found.values()) == pytest.approx(1)
    equal = optuna.create_study(direction="maximize")
    for number in range(8):
        trial = optuna.create_trial(params={"a": 0.5}, distributions={"a": space}, value=float(number == 7))
        equal.add_trial(trial)
    assert importances(equal, ["a"], 8) is None
    grid = optuna.create_study(direction="maximize")
    kinds = optuna.distributions.CategoricalDistribution((0, 1))
    for first, second, third in itertools.product((0, 1), repeat=3):  # the best two have every value as often as all
        params, best = {"a": first, "b": second, "c": third}, first == second == third
        grid.add_trial(optuna.create_trial(params=params, distributions=dict.fromkeys("abc", kinds), value=float(best)))
    assert importances(grid, ["a", "b", "c"], 8) is None
