"""Training a run: its folder, the choice of the best embedder, settings, errors, and evaluation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from shortlist.data import Catalog, ImageDataset, image_chunks
from shortlist.errors import ConfigError, DataError, ModelError, RunError
from shortlist.evaluation import Estimate, Evaluation
from shortlist.files import read_json, write_json
from shortlist.training import (
    Display,
    EvalImages,
    RunFolder,
    datasets,
    evaluate_run,
    loop,
    make_plan,
    run_evaluation,
)
from shortlist.training import (
    resume_run as resume,
)
from shortlist.training import (
    train_run as train,
)
from shortlist.training.checkpoint import save_state
from tests.training.runs import (
    CLASSES,
    IMAGES,
    STEPS_PER_EPOCH,
    class_folders,
    config,
    fast_config,
    records,
    same_weights,
    weights,
    write_config,
)

ONE_EPOCH = ("data.validation=none", "training.epochs=1")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 classes of 3 images: 4 for tests, 2 for validation and 2 for training; without validation, 4 for training."""
    return class_folders(tmp_path_factory.mktemp("data") / "few", classes=8, images=3)


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run. Tests must not change it; see `copy_of`."""
    settings = ["evaluation.before=true", "tracking=[tensorboard]"]
    return train(config(images, *settings), tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture(scope="module")
def last_weights(few: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights after one epoch on all training classes of `few`."""
    return weights(train(fast_config(few, *ONE_EPOCH), tmp_path_factory.mktemp("runs") / "last"))


def weights_after(step: int, run: RunFolder) -> dict[str, Tensor]:
    """The weights of the model in a checkpoint."""
    tensors = load_file(run.checkpoints / f"step-{step:08}.safetensors")
    return {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}


def copy_of(run: RunFolder, path: Path, *, unfinished: bool = True) -> RunFolder:
    """A copy of a run; if unfinished, `resume` only has to test it."""
    shutil.copytree(run.path, path)
    if unfinished:
        (path / "evaluation.json").unlink()
    return RunFolder(path)


class Listener(Display):
    """Records messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.facts: dict[str, Any] = {}

    def message(self, text: str, **facts: Any) -> None:
        self.messages.append(text)
        self.facts.update(facts)


class TestFolder:
    def test_files(self, finished: RunFolder) -> None:
        names = {file.name for file in finished.path.iterdir() if not file.name.startswith(".")}
        assert names == {
            "config.yaml",
            "facts.json",
            "metrics.jsonl",
            "tensorboard",
            "checkpoints",
            "best",
            "embedder.json",
            "embedder.safetensors",
            "encoder.json",
            "evaluation-before.json",
            "evaluation.json",
            "vectors",
        }
        assert list((finished.path / "tensorboard").glob("events.*"))
        assert sorted(file.name for file in finished.checkpoints.iterdir()) == [
            "step-00000006.safetensors",
            "step-00000009.safetensors",
        ]

    def test_facts(self, finished: RunFolder, images: Path) -> None:
        facts = json.loads(finished.facts_file.read_text())
        assert facts["catalog"] == make_plan(config(images), Display()).catalog.fingerprint()
        assert facts["catalog"] != make_plan(config(images, "data.split_seed=1"), Display()).catalog.fingerprint()
        assert facts["seed"] == 0
        assert facts["threads"] == torch.get_num_threads()
        assert facts["versions"]["torch"] == torch.__version__.partition("+")[0]
        assert facts["missing"] == facts["classes_too_small"] == []

    @pytest.mark.parametrize("program", ["/usr/bin/shortlist", "/usr/lib/shortlist/__main__.py"])
    def test_the_command(self, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", [program, "train", "my recipe.yaml"])
        folder = RunFolder(tmp_path)
        folder.config_file.touch()
        folder.record_facts("fingerprint", missing=[], classes_too_small=[])
        assert folder.facts().model_dump()["command"] == "shortlist train 'my recipe.yaml'"

    def test_metrics(self, finished: RunFolder) -> None:
        steps = records(finished)
        assert [each["step"] for each in steps] == list(range(1, 3 * STEPS_PER_EPOCH + 1))
        assert [each["epoch"] for each in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert all(0 < each["loss"] < 1 and each["lr"] == 1e-3 and each["gradient_norm"] > 0 for each in steps)
        assert len({each["loss"] for each in steps}) > 6
        assert [each["step"] for each in records(finished, "validation")] == [3, 6, 9]
        assert [each["step"] for each in records(finished, "before training")] == [0]
        (evaluation,) = json.loads(finished.evaluation_file.read_text())
        (test,) = records(finished, "test")
        assert test["r@1"] == evaluation["metrics"]["r@1"]["value"]
        assert test["r@1"] != records(finished, "before training")[0]["r@1"]  # it learned, or forgot

    def test_evaluation(self, finished: RunFolder) -> None:
        (evaluation,) = json.loads(finished.evaluation_file.read_text())
        assert evaluation["split"] == "test"
        assert evaluation["queries"] == CLASSES // 2 * IMAGES
        assert list(evaluation["metrics"])[:4] == ["r@1", "r@2", "r@4", "r@8"]
        for estimate in evaluation["metrics"].values():
            assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1

    def test_tensorboard_has_the_same_numbers(self, finished: RunFolder) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(finished.path / "tensorboard"))
        events.Reload()
        found = [(event.step, event.value) for event in events.Scalars("step/loss")]
        assert found == [(each["step"], pytest.approx(each["loss"])) for each in records(finished)]
        assert {"validation/r@1", "test/mAP@R", "step/lr"} <= set(events.Tags()["scalars"])

    def test_training_its_config_again_gives_the_same_weights(self, finished: RunFolder, tmp_path: Path) -> None:
        again = train(finished.config(), tmp_path / "again")
        assert same_weights(weights(again), weights(finished))
        assert records(again) == records(finished)  # test_resume.py has the negative control, another seed

    def test_it_can_be_evaluated_from_another_folder(
        self, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(few.parent)
        run = train(fast_config(Path(few.name), "training.epochs=1"), tmp_path / "run")
        monkeypatch.chdir(tmp_path)
        assert Path(yaml.safe_load(run.config_file.read_text())["data"]["source"]) == few
        assert [each.queries for each in evaluate_run("run")] == [4 * 3]

    def test_a_folder_with_a_run_is_not_overwritten(self, finished: RunFolder, images: Path) -> None:
        before = {file: file.stat().st_mtime_ns for file in finished.path.rglob("*") if file.name != ".lock"}
        with pytest.raises(RunError, match=r"already contains a run.*shortlist train --resume"):
            train(config(images), finished.path)
        display = Listener()
        resume(finished.path, display)
        assert display.messages == ["This run is already finished."]
        assert before == {file: file.stat().st_mtime_ns for file in finished.path.rglob("*") if file.name != ".lock"}

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=r"No run found in .*: it contains no config\.yaml"):
            resume(tmp_path)
        with pytest.raises(RunError, match="No run found in"):
            evaluate_run(tmp_path / "nothing")

    def test_a_folder_that_cannot_be_written_to(
        self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(RunError, match="cannot be written to: Not a directory"):
            train(config(images), tmp_path / "file" / "run")

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(RunError, match="cannot be written to: Permission denied"):
            train(config(images), tmp_path / "run")


class TestLock:
    HOLD = (
        "import filelock, sys; a = filelock.FileLock(sys.argv[1]); a.acquire(); print(1, flush=True); sys.stdin.read()"
    )

    def test_two_trainings_in_one_folder(self, images: Path, finished: RunFolder, tmp_path: Path) -> None:
        run, new = copy_of(finished, tmp_path / "run"), tmp_path / "new"
        new.mkdir()
        command = [sys.executable, "-c", self.HOLD]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        holders = [subprocess.Popen([*command, str(path / ".lock")], **pipes) for path in (run.path, new)]
        for holder in holders:
            assert holder.stdout.readline() == b"1\n"
        with pytest.raises(RunError, match="Another process is training in"):
            resume(run.path)
        with pytest.raises(RunError, match="Another process is training in"):
            train(config(images), new)
        assert list(new.iterdir()) == [new / ".lock"]
        for holder in holders:
            holder.kill()  # the lock of a killed process is released
            holder.communicate()
        resume(run.path)
        assert run.evaluation_file.exists()


class TestSetUp:
    """Invalid settings are refused before the first step, and leave no files behind."""

    @pytest.mark.parametrize(
        ("override", "kind", "message"),
        [
            ("model.backbone=resnet_50", ModelError, "resnet50"),
            ("data.source=glyps", DataError, "did you mean 'glyphs'"),
            ("batch.size=24", ConfigError, "The largest batch possible is 9: 3 classes"),
            ("batch.per_class=7", ConfigError, "7 images"),
            ("model.pooling=token", ModelError, "class token"),
            ("training.precision=float16", ConfigError, "requires a GPU"),
            ("model.weights=no/such/file.safetensors", ModelError, "no/such/file"),
        ],
    )
    def test_refusals(self, override: str, kind: type[Exception], message: str, images: Path, tmp_path: Path) -> None:
        settings = ["batch.size=14"] if "per_class" in override else []
        with pytest.raises(kind, match=message):
            train(config(images, override, *settings), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_other_files_in_the_folder_are_kept(self, images: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ModelError, match="no backbone 'nothing'"):
            train(config(images, "model.backbone=nothing"), tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_misspelt_backbone_is_reported_before_images_are_opened(
        self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(datasets, "open_catalog", lambda *_, **__: pytest.fail("the images were opened"))
        with pytest.raises(ModelError, match="no backbone 'resnet_50'"):
            train(config(images, "model.backbone=resnet_50"), tmp_path / "run")
        with pytest.raises(pytest.fail.Exception, match="the images were opened"):  # the control
            train(config(images), tmp_path / "run")


class TestBest:
    """The embedder is chosen by the validation classes."""

    def measured(self, monkeypatch: pytest.MonkeyPatch, validation: list[float], test: list[float]) -> list[str]:
        """Let evaluations return these values of r@1 in turn; return a list of the evaluated splits."""
        splits: list[str] = []
        values = {"validation": iter(validation), "test": iter(test)}

        def evaluate(vectors: Tensor, catalog: Catalog, *, k: tuple[int, ...], **_: object) -> Evaluation:
            (split,) = set(catalog.splits.tolist())
            splits.append(split)
            value = next(values[split])
            return Evaluation("x", split, "x", 1, 1, 0, {f"r@{cut}": Estimate(value) for cut in k})

        monkeypatch.setattr(run_evaluation, "evaluate", evaluate)
        return splits

    def test_by_validation_and_never_by_test(self, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        splits = self.measured(monkeypatch, validation=[0.2, 0.9, 0.5], test=[0.1])
        run = train(fast_config(few), tmp_path / "run")
        assert splits == ["validation", "validation", "validation", "test"]  # the test once, at the end
        assert same_weights(weights(run), weights_after(2, run))
        assert same_weights(weights(run), weights(run.best))
        assert not same_weights(weights(run), weights_after(3, run))

    def test_validation_every_few_epochs_and_at_the_end_keeps_the_first_of_equals(
        self, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        splits = self.measured(monkeypatch, validation=[0.5, 0.5], test=[0.5])
        run = train(fast_config(few, "training.validate_every=2"), tmp_path / "run")
        assert splits == ["validation", "validation", "test"]
        assert [each["epoch"] for each in records(run, "validation")] == [2, 3]
        assert same_weights(weights(run), weights_after(2, run))
        assert not same_weights(weights(run), weights_after(3, run))

    def test_validation_every_few_steps_and_at_the_end(
        self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.measured(monkeypatch, validation=[0.1, 0.5, 0.3], test=[0.5])
        display = Listener()
        settings = ["training.validate_every_steps=4", "training.checkpoint_every=4"]
        run = train(config(images, *settings), tmp_path / "run", display)
        validated = records(run, "validation")
        assert [(each["step"], each["epoch"], each["r@1"]) for each in validated] == [
            (4, 2, 0.1),
            (8, 3, 0.5),
            (9, 3, 0.3),
        ]
        told = [text for text in display.messages if text.startswith(("epoch", "step"))]
        assert [text.partition(":")[0] for text in told] == ["epoch 1", "step 4", "epoch 2", "step 8", "epoch 3"]
        assert told[3] == "step 8: validation r@1 50.0, the best so far"
        assert same_weights(weights(run), weights_after(8, run))
        assert not same_weights(weights(run), weights_after(9, run))

    def test_tests_during_training_select_nothing(
        self, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tests after the first epoch, every second after it, and the last, as in the authors' release."""
        settings = ["data.validation=none", "training.epochs=4"]
        self.measured(monkeypatch, validation=[], test=[0.5])
        plain = train(fast_config(few, *settings), tmp_path / "plain")
        splits = self.measured(monkeypatch, validation=[], test=[0.2, 0.9, 0.5])
        display = Listener()
        run = train(fast_config(few, *settings, "evaluation.test_every=2"), tmp_path / "run", display)
        assert splits == ["test"] * 3
        assert same_weights(weights(run), weights(plain))
        assert not run.best.exists()
        assert [(each["epoch"], each["r@1"]) for each in records(run, "test during training")] == [(1, 0.2), (3, 0.9)]
        (evaluation,) = json.loads(run.evaluation_file.read_text())
        assert evaluation["metrics"]["r@1"]["value"] == 0.5
        (remark,) = evaluation["remarks"]
        values = {value: f"r@1 {value}, r@2 {value}, r@4 {value}, r@8 {value}" for value in (50.0, 90.0)}
        assert remark.startswith(
            f"last of 3 tests during training: {values[50]} (epoch 4); best by r@1: {values[90]} (epoch 3). The best is"
        )
        assert f"x: {remark}" in display.messages
        self.measured(monkeypatch, validation=[], test=[0.4, 0.5])
        resumed = resume(copy_of(run, tmp_path / "resumed").path)
        assert records(resumed, "test during training") == records(run, "test during training")
        (again,) = evaluate_run(run.path)
        assert again.remarks == (remark,)

    def test_tests_during_a_training_with_validation(
        self, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The best embedder is not the last one, which is tested as well."""
        self.measured(monkeypatch, validation=[0.2, 0.9, 0.5], test=[0.7, 0.3, 0.6])
        run = train(fast_config(few, "evaluation.test_every=5"), tmp_path / "run")
        assert [(each["epoch"], each["r@1"]) for each in records(run, "test during training")] == [(1, 0.7), (3, 0.3)]
        (evaluation,) = json.loads(run.evaluation_file.read_text())
        assert evaluation["metrics"]["r@1"]["value"] == 0.6
        assert re.match(r"last of 2 tests .*: r@1 30.0.* \(epoch 3\); best by r@1: r@1 70.0", evaluation["remarks"][0])

    def test_without_validation_the_last_is_kept(
        self, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_weights: dict[str, Tensor]
    ) -> None:
        splits = self.measured(monkeypatch, validation=[], test=[0.9, 0.1])
        run = train(fast_config(few, *ONE_EPOCH, "evaluation.before=true"), tmp_path / "run")
        assert splits == ["test", "test"]
        assert not run.best.exists()
        assert same_weights(weights(run), last_weights)
        assert len(records(run)) == 2  # all training classes

    def test_half_of_the_training_classes_validates(self, images: Path) -> None:
        halves = make_plan(config(images), Display())
        assert halves.train.classes().tolist() == [0, 1, 2]
        assert halves.validation is not None
        assert halves.validation.catalog.classes().tolist() == [3, 4, 5]
        (eval_set,) = halves.eval_sets
        assert eval_set.catalog.classes().tolist() == [6, 7, 8, 9, 10, 11]
        whole = make_plan(config(images, "data.validation=none"), Display())
        assert whole.train.classes().tolist() == [0, 1, 2, 3, 4, 5]
        assert whole.validation is None

    def test_without_test_classes(self, few: Path, tmp_path: Path) -> None:
        display = Listener()
        run = train(fast_config(few, "data.train_share=1", "training.epochs=1"), tmp_path / "run", display)
        assert "The data contain no test classes, so the embedder was not tested." in display.messages
        assert json.loads(run.evaluation_file.read_text()) == []
        assert records(run, "test") == []
        resume(run.path)
        with pytest.raises(DataError, match="no test images"):
            evaluate_run(run.path)


class TestSettings:
    @pytest.mark.parametrize(
        "override",
        [
            "loss.simix=true",
            "loss.name=smooth_ap",
            "training.precision=bfloat16",
            "training.ema=0.5",
            "images.flip=0",
            "schedule.name=cosine",
            "optimizer.name=sgd",
        ],
    )
    def test_each_is_used(self, override: str, few: Path, tmp_path: Path, last_weights: dict[str, Tensor]) -> None:
        chosen = fast_config(few, *ONE_EPOCH, override)
        run = train(chosen, tmp_path / "run")
        assert all(tensor.isfinite().all() for tensor in weights(run).values())
        assert not same_weights(weights(run), last_weights)
        assert RunFolder.open(run.path).config() == chosen  # reads back

    @pytest.mark.parametrize("keep", ["true", "false", "0.001"])
    def test_kept_graphs_change_no_bit(
        self, keep: str, few: Path, tmp_path: Path, last_weights: dict[str, Tensor]
    ) -> None:
        run = train(fast_config(few, *ONE_EPOCH, f"batch.keep_graphs={keep}"), tmp_path / "run")
        assert same_weights(weights(run), last_weights)

    def test_workers_decode_images_for_training_and_tests(
        self, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """tests/data/test_loader.py checks that workers do not change pixels."""
        used: list[int] = []

        def chunks(dataset: ImageDataset, keys: Iterable[Any], workers: int = 0, **options: Any) -> Iterator[Any]:
            used.append(workers)
            return image_chunks(dataset, keys, 0, **options)

        monkeypatch.setattr(loop, "image_chunks", chunks)
        monkeypatch.setattr("shortlist.encoding.embed.image_chunks", chunks)
        train(fast_config(few, *ONE_EPOCH, "data.workers=3"), tmp_path / "run")
        assert used == [3, 3]

    def test_steps_instead_of_epochs_and_checkpoints_every_few_steps(
        self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = ["training.epochs=null", "training.steps=5", "training.checkpoint_every=2"]
        written: list[int] = []
        monkeypatch.setattr(
            loop, "save_state", lambda path, state: written.append(state.step) or save_state(path, state)
        )
        run = train(config(images, *settings), tmp_path / "run")
        assert [each["step"] for each in records(run)] == [1, 2, 3, 4, 5]
        assert [each["step"] for each in records(run, "validation")] == [3, 5]
        assert written == [2, 3, 4, 5]  # and the ends of epochs
        assert [file.name for file in sorted(run.checkpoints.iterdir())] == [
            "step-00000004.safetensors",
            "step-00000005.safetensors",
        ]


class TestNotFinite:
    def test_a_loss_that_is_not_finite(self, images: Path, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=r"Step 2 has loss nan .*failed\. A smaller optimizer\.lr"):
            train(config(images, "optimizer.lr=1e30"), tmp_path / "run")
        run = RunFolder(tmp_path / "run")
        assert [each["step"] for each in records(run)] == [1]
        facts = json.loads((run.failed / "step.json").read_text())
        assert facts["step"] == 2
        assert facts["loss"] == "nan"
        assert len(facts["images"]) == 6
        assert all((images / path).is_file() for path in facts["images"])
        with safe_open(run.failed / "step-00000001.safetensors", framework="pt") as file:
            assert file.get_tensor("batch.embeddings").shape == (6, 8)
            assert not file.get_tensor("batch.embeddings").isfinite().all()
            assert file.get_tensor("batch.labels").tolist() == sorted(file.get_tensor("batch.labels").tolist())
            assert any(name.startswith("model.") for name in file.keys())  # noqa: SIM118
        with pytest.raises(RunError, match="Step 2 has loss"):  # again after every resume
            resume(run.path)

    def test_weights_that_are_not_finite_after_the_last_step(self, images: Path, tmp_path: Path) -> None:
        settings = ["optimizer.lr=1e30", "training.epochs=null", "training.steps=1"]
        with pytest.raises(RunError, match=r"The embeddings are not finite after step 1"):
            train(config(images, *settings), tmp_path / "run")
        assert (tmp_path / "run" / "failed" / "step-00000001.safetensors").is_file()

    def test_a_gradient_that_is_not_finite_changes_no_weights(
        self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = torch.nn.utils.clip_grad_norm_
        calls: list[int] = []

        def third_is_infinite(parameters: list[Tensor], most: float) -> Tensor:
            calls.append(1)
            return real(parameters, most) if len(calls) < 3 else torch.tensor(torch.inf)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", third_is_infinite)
        with pytest.raises(RunError, match=r"Step 3 has loss 0.* and gradient norm inf"):
            train(config(images, "training.checkpoint_every=1"), tmp_path / "run")
        failed = load_file(tmp_path / "run" / "failed" / "step-00000002.safetensors")
        before, two = (weights_after(step, RunFolder(tmp_path / "run")) for step in (1, 2))
        assert same_weights({name: failed[f"model.{name}"] for name in two}, two)
        assert not same_weights(before, two)


class TestImages:
    @pytest.fixture
    def broken(self, images: Path, tmp_path: Path) -> Path:
        """Images with a truncated file, a text file, and a class that is too small, all in training classes."""
        root = tmp_path / "broken images ü"
        shutil.copytree(images, root)
        file = root / "class 01" / "2.png"
        file.write_bytes(file.read_bytes()[:60])
        (root / "class 04" / "text.jpg").write_text("I am not an image")
        for number in range(4):
            (root / "class 05" / f"{number}.png").unlink()
        return root

    def test_a_broken_image_stops_a_training_with_its_path(self, broken: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"broken images ü/class 0(1/2.png|4/text.jpg)"):
            train(config(broken, "data.validation=none"), tmp_path / "run")

    def test_broken_images_are_skipped_and_counted_on_request(
        self, broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = ["data.validation=none", "data.on_missing=skip", "training.epochs=1"]
        display = Listener()
        run = train(config(broken, *settings), tmp_path / "run", display)
        assert (display.facts["missing"], display.facts["unreadable"]) == (0, 2)
        assert any("1 of 6 classes left out" in message for message in display.messages)
        reasons = [message for message in display.messages if message.startswith("unreadable: class ")]
        assert [reason.count(": ") for reason in reasons] == [2, 2]  # the paths and the reasons
        assert [path for path, _ in run.unreadable()] == ["class 01/2.png", "class 04/text.jpg"]
        assert json.loads(run.facts_file.read_text())["classes_too_small"] == ["class 05"]
        monkeypatch.setattr(datasets, "find_unreadable", lambda *_, **__: pytest.fail("searched again"))
        run.evaluation_file.unlink()
        again = Listener()
        resume(run.path, again)
        assert again.facts["unreadable"] == 2

    def test_missing_files_of_a_table(self, few: Path, tmp_path: Path) -> None:
        paths = sorted(path.relative_to(few).as_posix() for path in few.rglob("*.png"))
        rows = [f"{path},{path.split('/')[0]}" for path in [*paths, "class 00/none.png"]]
        table = tmp_path / "images.csv"
        table.write_text("\n".join(["path,label", *rows]))
        settings = [f"data.root={few}", "training.epochs=1"]
        with pytest.raises(DataError, match=r"class 00/none\.png.*data\.on_missing=skip"):
            train(fast_config(table, *settings), tmp_path / "run")
        run = train(fast_config(table, *settings, "data.on_missing=skip"), tmp_path / "run")
        assert json.loads(run.facts_file.read_text())["missing"] == ["class 00/none.png"]

    def test_a_run_does_not_resume_with_other_images(self, images: Path, finished: RunFolder, tmp_path: Path) -> None:
        run = copy_of(finished, tmp_path / "run")
        new = images / "class 03" / "new.png"
        shutil.copy(images / "class 03" / "0.png", new)
        try:
            with pytest.raises(RunError, match="The images, classes or splits have changed since"):
                resume(run.path)
        finally:
            new.unlink()
        resume(run.path)
        assert run.evaluation_file.read_text() == finished.evaluation_file.read_text()

    def test_resuming_with_another_number_of_threads_warns(self, finished: RunFolder, tmp_path: Path) -> None:
        run = copy_of(finished, tmp_path / "run")
        write_json(run.facts_file, {**read_json(run.facts_file), "threads": 99})
        with pytest.warns(UserWarning, match=r"started with threads 99, now 1: the last digits"):
            resume(run.path)


class TestEvaluateRun:
    def test_its_own_test_classes(self, finished: RunFolder) -> None:
        found = [each.to_dict() for each in evaluate_run(finished.path)]
        assert found == json.loads(finished.evaluation_file.read_text())

    def test_other_images(self, finished: RunFolder, tmp_path: Path) -> None:
        other = class_folders(tmp_path / "others", classes=4, seed=9)
        (measured,) = evaluate_run(finished.path, EvalImages(str(other)))
        assert measured.data == "others"
        assert measured.queries == 4 * IMAGES  # all images, because they have no splits
        assert measured.metrics != evaluate_run(finished.path)[0].metrics

    def test_other_images_that_cannot_be_read(self, finished: RunFolder, tmp_path: Path) -> None:
        other = class_folders(tmp_path / "others", classes=3)
        (other / "class 00" / "0.png").write_text("text")
        with pytest.raises(DataError, match=r"class 00/0\.png"):
            evaluate_run(finished.path, EvalImages(str(other)))
        run = copy_of(finished, tmp_path / "run", unfinished=False)
        write_config(run, run.config_file.read_text().replace("on_missing: error", "on_missing: skip"))
        assert evaluate_run(run.path, EvalImages(str(other)))[0].queries == 3 * IMAGES - 1
        assert not run.unreadable_file.exists()  # those are not the run's images

    def test_an_unfinished_run(self, finished: RunFolder, tmp_path: Path) -> None:
        run = copy_of(finished, tmp_path / "run with spaces")
        (run.path / "embedder.json").unlink()
        with pytest.raises(RunError, match=r"is not finished.*--resume '.*run with spaces'"):
            evaluate_run(run.path)


def test_an_incomplete_last_line_of_the_metrics_is_ignored(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.metrics() == []
    for step in range(3):
        run.log({"kind": "step", "step": step, "epoch": 0, "loss": 1.0, "lr": 1.0, "images_per_second": 1.0})
    with run.metrics_file.open("a") as file:
        file.write('{"kind": "step", "st')
    assert [record["step"] for record in run.metrics()] == [0, 1, 2]
    run.discard_records_after(1)
    run.log({"kind": "test", "step": 1, "epoch": 0})
    assert [record["step"] for record in run.metrics()] == [0, 1, 1]
    run.discard_records_after(1)
    assert [record["step"] for record in run.metrics()] == [0, 1]


def test_missing_records_of_a_finished_run(finished: RunFolder, tmp_path: Path) -> None:
    run = copy_of(finished, tmp_path / "run", unfinished=False)
    assert run.metrics() == finished.metrics()
    text = run.metrics_file.read_text()
    *lines, last = text.splitlines(keepends=True)
    for shorter in ("", text[:-1], text[:-9], "".join(lines)):
        run.metrics_file.write_text(shorter)
        with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: its last records are missing"):
            run.metrics()
    run.metrics_file.write_text("".join([*lines[:-1], lines[-1].replace("1", "2", 1), last]))
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: its contents differ"):
        run.metrics()


def test_a_configuration_that_was_edited(finished: RunFolder, tmp_path: Path) -> None:
    run = copy_of(finished, tmp_path / "run")
    text = run.config_file.read_text()
    run.config_file.write_text(text.replace("lr: 0.001", "lr: 0.002"))
    for use in (resume, evaluate_run):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            use(run.path)
        assert any("config.yaml has changed since the start of the run" in str(each.message) for each in warned)
    run.config_file.write_text(text)
    run.config()  # without a warning
    run.facts_file.unlink()  # as if the run had not started
    run.config_file.write_text(text.replace("lr: 0.001", "lr: 0.002"))
    assert run.config().optimizer.lr == 0.002


@pytest.mark.parametrize("content", ["{}", "[]", '{"min_score": NaN}', '{"min_score": 7}', '{"min_score": "high"}'])
def test_a_damaged_minimum_score(content: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.recommend_min_score((0.25, 0.01))
    assert run.recommended_min_score() == 0.25
    run.min_score_file.write_text(run.min_score_file.read_text().replace("0.25", "0.75"))
    with pytest.raises(RunError, match=r"min-score\.json is damaged: its contents differ"):
        run.recommended_min_score()
    run.min_score_file.write_text(content)
    with pytest.raises(RunError, match=r"min-score\.json is damaged"):
        run.recommended_min_score()
