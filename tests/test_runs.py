"""`shortlist.train`, `resume` and `evaluate`: recipes, settings by keyword, and parts passed in Python."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import shortlist
from shortlist import Embedder, Encoder, evaluate, resume, train
from shortlist.config import RunConfig, read_config
from shortlist.data import Catalog, open_catalog
from shortlist.data.given_images import as_catalog
from shortlist.errors import ConfigError, DataError, Interrupted, ModelError, RunError
from shortlist.runs import Run
from shortlist.training import loop
from tests.processes import Commands
from tests.training.runs import FASTEST_MODEL, RECIPE, class_folders, fast_config, records, same_weights, weights
from tests.user_parts import Net, Proxies, ReciprocalRank, pull

TINY: dict[str, Any] = {"report": False, "validation": "none", "epochs": 1}
NAMES = [f"{index:08}.png" for index in range(24)]  # of the images of a dataset in memory


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 classes of 3 images; 4 of the classes are for training, with two steps per epoch."""
    return class_folders(tmp_path_factory.mktemp("data") / "images", classes=8, images=3)


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on the folder of images. Tests must not change it."""
    return train(fast_config(images), output=tmp_path_factory.mktemp("runs") / "run", **TINY)


@pytest.fixture(scope="module")
def expected(trained: Run) -> dict[str, Tensor]:
    """The weights of `trained`."""
    return weights(trained.path)


@pytest.fixture(scope="module")
def files(images: Path) -> list[Path]:
    return sorted(images.glob("*/*.png"))


def net() -> Net:
    """A module that always has the same initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net()


def test_images_in_an_object_store(
    images: Path, expected: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of the same images on disk."""
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.put(str(images), "/images", recursive=True)
    try:
        run = train(fast_config("memory://images"), output=tmp_path / "run", **TINY)
        assert same_weights(weights(run.path), expected)
    finally:
        store.rm("/images", recursive=True)


class TestRecipes:
    def test_a_recipe_with_settings_of_both_kinds(self, images: Path, tmp_path: Path) -> None:
        run = train(
            "folder",
            "model={backbone: test_efficientnet, weights: none, dim: 8}",
            "schedule.warmup=0",
            source=images,
            images_size=32,
            batch_size=6,
            per_class=3,
            workers=0,
            epochs=2,
            bootstrap=20,
            output=tmp_path / "run",
        )
        assert run.path == tmp_path / "run"
        assert (run.config.name, run.config.training.epochs, run.config.batch.size) == ("folder", 2, 6)
        assert run.config.data.source == str(images)
        assert (run.path / "report.html").is_file()
        (found,) = json.loads((run.path / "evaluation.json").read_text())
        assert run.metrics["r@1"] == found["metrics"]["r@1"]["value"] == run.evaluations[0].metrics["r@1"].value
        assert "config" not in repr(run)

    def test_a_file_and_a_configuration_give_the_same_run(self, images: Path, tmp_path: Path, trained: Run) -> None:
        recipe = tmp_path / "tiny.yaml"
        recipe.write_text(RECIPE)
        one = train(recipe, FASTEST_MODEL, source=images, output=tmp_path / "one", **TINY)
        assert same_weights(weights(one.path), weights(trained.path))
        assert one.config == trained.config
        different = train(
            recipe, FASTEST_MODEL, "optimizer.lr=0.1", source=images, output=tmp_path / "different", **TINY
        )
        assert not same_weights(weights(one.path), weights(different.path))

    def test_runs_are_numbered(self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        runs = [train(fast_config(images), name="twice", **TINY) for _ in range(2)]
        assert [str(run.path) for run in runs] == ["runs/twice", "runs/twice-2"]

    def test_a_run_without_test_images_has_no_metrics(self, images: Path, tmp_path: Path) -> None:
        run = train(fast_config(images), train_share=1, output=tmp_path / "run", **TINY)
        assert run.metrics == {}
        assert run.evaluations == ()

    @pytest.mark.parametrize(
        ("keywords", "message"),
        [
            ({"epohcs": 3}, r"Unknown setting 'epohcs'; did you mean 'epochs'\?"),
            ({"batchsize": 3}, r"Unknown setting 'batchsize'; did you mean 'batch_size'\?"),
            (
                {"size": 3},
                r"'size' is the name of several settings: images.size, batch.size. Write images_size=... ",
            ),
            ({"k": 3}, r"several settings: loss.k, evaluation.k. Write loss_k=... or evaluation_k=..."),
            ({"epochs": 0}, r"training.epochs: should be greater than or equal to 1"),
            ({"loss": "recal_at_k"}, r"loss.name: unknown loss; did you mean 'recall_at_k'"),
            ({"optimizer": {"rate": 1}}, r"optimizer.rate: unknown key"),
        ],
    )
    def test_mistakes(self, keywords: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            train("folder", output=tmp_path / "run", **keywords)
        with pytest.raises(ConfigError, match="No recipe or file found for 'foldr'; did you mean 'folder'"):
            train("foldr")
        assert not (tmp_path / "run").exists()

    def test_parts_by_name(self, images: Path, tmp_path: Path) -> None:
        run = train(
            read_config(RECIPE, "tiny"),
            model={"backbone": "test_resnet", "weights": "none", "dim": 4},
            loss="smooth_ap",
            data=images,
            output=tmp_path / "run",
            **TINY,
        )
        assert run.config.model.backbone == "test_resnet"
        assert run.config.model.dim == 4
        assert run.config.loss.name == "smooth_ap"
        assert run.config.data.source == str(images)


class TestModel:
    def test_a_module_is_trained_in_place_and_its_results_are_those_of_its_vectors(
        self, images: Path, tmp_path: Path
    ) -> None:
        model = net()
        before = {name: each.clone() for name, each in model.state_dict().items()}
        run = train(fast_config(images), model=model, output=tmp_path / "run", **{**TINY, "report": True})
        assert (run.path / "report.html").is_file()
        assert run.config.model.backbone == "given in Python: Net"
        assert not torch.equal(model.linear.weight, before["linear.weight"])
        assert torch.equal(model.norm.running_mean, before["norm.running_mean"])  # BatchNorm is frozen
        encoder = Encoder.from_run(run.path, model=net())
        test = open_catalog(images).split("test")
        vectors = encoder.encode([test.file(index) for index in range(len(test))])
        assert vectors.shape == (len(test), 6)
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(test)))
        expected = shortlist.retrieval_metrics(vectors, torch.from_numpy(test.labels.copy()), k=(1,))
        assert run.metrics["r@1"] == pytest.approx(float(expected["r@1"]))
        (again,) = evaluate(run, model=net())
        assert again.values == run.metrics

    def test_the_best_epoch_is_kept(self, images: Path, tmp_path: Path) -> None:
        run = train(fast_config(images), model=net(), output=tmp_path / "run", report=False, epochs=2)
        assert same_weights(weights(run.path), weights(run.path / "best"))

    def test_errors_ask_for_a_model_and_a_loss_that_were_given_in_python(
        self, images: Path, tmp_path: Path, commands: Commands
    ) -> None:
        run = train(fast_config(images), model=net(), loss=pull, output=tmp_path / "run", **TINY)
        with pytest.raises(ModelError, match=r"The model Net was given in Python and .* give it again"):
            evaluate(run)
        with pytest.raises(ModelError, match="has the weights of Net, not of Linear"):
            evaluate(run, model=nn.Linear(3, 3))
        calls = (["evaluate", run.path], ["index", run.path, images, "-o", "gallery"], ["report", run.path])
        for command in (*calls, ["export", run.path, "--onnx", "model.onnx"]):
            code, _, error = commands.run(*command, cwd=tmp_path)
            assert code == 1
            assert error.splitlines()[-1].startswith("Error: The model Net was given in Python and cannot be stored")
            assert "Traceback" not in error
        (run.path / "evaluation.json").unlink()
        for command in (["train", "--resume", run.path], ["train", run.path / "config.yaml"]):
            code, _, error = commands.run(*command, cwd=tmp_path)
            message = "Error: The model Net of this run was given in Python: give it again, with model= of the Python"
            assert (code, error.startswith(message)) == (1, True), error
        with pytest.raises(ConfigError, match=r"The loss pull of this run was given in Python: .*loss.name=MODULE"):
            resume(run.path, model=net())
        with pytest.raises(ConfigError, match=r"The loss of this run is pull, not ReciprocalRank"):
            resume(run.path, model=net(), loss=ReciprocalRank())

    def test_a_resumed_run_is_the_same(self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The module has other initial weights, and the loss has its own weights and state."""
        settings = {**TINY, "epochs": 2}

        def loss() -> Proxies:
            torch.manual_seed(0)
            return Proxies(4, 6)

        whole = train(fast_config(images), model=net(), loss=loss(), output=tmp_path / "whole", **settings)
        step = loop.Trainer._train_step
        with monkeypatch.context() as patch:

            def interrupt(self: loop.Trainer, *batch: Any) -> dict[str, Any]:
                if self.step == 3:  # in the second epoch
                    raise KeyboardInterrupt
                return step(self, *batch)

            patch.setattr(loop.Trainer, "_train_step", interrupt)
            with pytest.raises(Interrupted):
                train(fast_config(images), model=net(), loss=loss(), output=tmp_path / "run", **settings)
        torch.manual_seed(9)
        again = resume(tmp_path / "run", model=Net(), loss=Proxies(4, 6), report=False)
        assert same_weights(weights(again.path), weights(whole.path))
        assert records(again.path) == records(whole.path)

    def test_another_architecture_does_not_resume(self, images: Path, tmp_path: Path) -> None:
        run = train(fast_config(images), model=net(), output=tmp_path / "run", **TINY)
        (run.path / "evaluation.json").unlink()
        with pytest.raises(RunError, match="does not fit the architecture"):
            resume(run.path, model=Net(dim=7))

    def test_a_run_of_a_given_embedder_can_be_evaluated_by_the_command_line(
        self, images: Path, tmp_path: Path, commands: Commands
    ) -> None:
        model = Embedder("test_resnet", dim=4)
        run = train(fast_config(images), model=model, output=tmp_path / "run", **TINY)
        assert run.config.model.backbone == "given in Python: Embedder"
        assert Embedder.load(run.path).config.backbone == "test_resnet"
        code, out, error = commands.run("evaluate", run.path, "--json", cwd=tmp_path)
        assert code == 0, error
        assert json.loads(out)[0]["metrics"]["r@1"]["value"] == run.metrics["r@1"]

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.Conv2d(3, 2, 3), r"Conv2d must map images \(B, 3, H, W\) to vectors .* it returns \(2, 2, 30, 30\)"),
            (nn.Linear(7, 2), r"Linear fails for images of 32 x 32 pixels with RuntimeError: "),
            (nn.Flatten(0), r"Flatten must map images .* it returns \(6144,\)"),
        ],
    )
    def test_modules_that_do_not_fit(self, model: nn.Module, message: str, images: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=message):
            train(fast_config(images), model=model, output=tmp_path / "run", **TINY)
        assert not (tmp_path / "run").exists()

    def test_a_setting_of_the_head_is_refused(self, images: Path) -> None:
        with pytest.raises(ConfigError, match="dim has no effect with given in Python: Net, which returns vectors"):
            train(fast_config(images), model=net(), dim=3)


class TestLoss:
    @pytest.mark.parametrize("loss", [pull, lambda embeddings, labels: embeddings.sum() * 0, Proxies(4, 8)])
    def test_any_callable(self, loss: Any, images: Path, tmp_path: Path) -> None:
        run = train(fast_config(images), loss=loss, output=tmp_path / "run", **TINY)
        assert run.config.loss.name.startswith("given in Python: ")
        assert len(records(run.path)) == 2

    def test_it_is_called_with_embeddings_and_labels_from_0_on(self, images: Path, tmp_path: Path) -> None:
        seen: list[tuple[Tensor, Tensor]] = []

        def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
            seen.append((embeddings.detach(), labels))
            return pull(embeddings, labels)

        run = train(fast_config(images), "data.split_seed=1", loss=loss, output=tmp_path / "run", **TINY)
        labels = torch.cat([each for _, each in seen]).unique()
        assert labels.tolist() == [0, 1, 2, 3]  # any four of the eight classes are trained on
        assert all(embeddings.shape == (6, 8) for embeddings, _ in seen)
        values = [pull(*each).item() for each in seen]
        assert [each["loss"] for each in records(run.path)] == pytest.approx(values)

    def test_pytorch_metric_learning(self, images: Path, tmp_path: Path) -> None:
        from pytorch_metric_learning.losses import MultiSimilarityLoss

        given = train(fast_config(images), loss=MultiSimilarityLoss(alpha=3), output=tmp_path / "given", **TINY)
        named = train(
            fast_config(images),
            loss={"name": "pml.MultiSimilarityLoss", "args": {"alpha": 3}},
            output=tmp_path / "named",
            **TINY,
        )
        assert same_weights(weights(given.path), weights(named.path))

    def test_a_head(self, images: Path, tmp_path: Path) -> None:
        settings = ["loss.simix=true", "loss.similarity_temperature=0.1"]
        given = train(fast_config(images), *settings, loss=ReciprocalRank(), output=tmp_path / "given", **TINY)
        assert given.config.loss.simix
        plain = train(fast_config(images), loss=ReciprocalRank(), output=tmp_path / "plain", **TINY)
        assert not same_weights(weights(given.path), weights(plain.path))
        losses = [each["loss"] for each in records(plain.path)]
        assert all(0 < each < 1 for each in losses)
        with pytest.raises(ConfigError, match=r"loss.simix has no effect: .* is not a head of the engine"):
            train(fast_config(images), "loss.simix=true", loss=pull, output=tmp_path / "run", **TINY)

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda embeddings, labels: embeddings.mean(1), r"one number per batch, a tensor, not \(6,\)"),
            (lambda embeddings, labels: 3.0, r"one number per batch, a tensor, not float"),
        ],
    )
    def test_losses_that_return_something_else(self, loss: Any, message: str, images: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            train(fast_config(images), loss=loss, output=tmp_path / "run", **TINY)


class Memory(Dataset[tuple[Any, int]]):
    """Images in memory, of one kind."""

    def __init__(self, files: list[Path], kind: str) -> None:
        self.pictures = [Image.open(file).convert("RGB") for file in files]
        self.labels = [int(file.parent.name.split()[1]) for file in files]
        self.kind = kind

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        array = np.asarray(self.pictures[index])
        tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
        made = {"pil": self.pictures[index], "array": array, "uint8": tensor, "float": tensor / 255}
        return made[self.kind], self.labels[index]


class TestData:
    def test_paths_and_labels(
        self, images: Path, files: list[Path], tmp_path: Path, expected: dict[str, Tensor], commands: Commands
    ) -> None:
        data = (files, [file.parent.name for file in files])
        run = train(fast_config(Path("nothing")), data=data, output=tmp_path / "run", **TINY)
        assert same_weights(weights(run.path), expected)  # as from the folder
        moved = Path(shutil.move(run.path, tmp_path / "moved"))  # its list of images moves with it
        code, out, error = commands.run("evaluate", moved, "--json", cwd=tmp_path)
        assert code == 0, error
        assert json.loads(out)[0]["metrics"]["r@1"]["value"] == run.metrics["r@1"]

    def test_relative_paths(
        self, files: list[Path], tmp_path: Path, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(files[0].parents[1])
        data = ([str(file.relative_to(Path.cwd())) for file in files], [file.parent.name for file in files])
        run = train(fast_config(Path("nothing")), data=data, output=tmp_path / "run", **TINY)
        monkeypatch.chdir(tmp_path)
        assert same_weights(weights(run.path), expected)
        assert evaluate(run)[0].values == run.metrics

    def test_a_catalog_keeps_its_splits(self, images: Path, tmp_path: Path) -> None:
        catalog = open_catalog(images, split_seed=5)
        run = train(fast_config(Path("nothing")), data=catalog, output=tmp_path / "run", **TINY)
        direct = train(fast_config(images), split_seed=5, output=tmp_path / "direct", **TINY)
        assert same_weights(weights(run.path), weights(direct.path))
        assert run.metrics == direct.metrics

    def test_a_dataset_in_memory(self, files: list[Path], tmp_path: Path, expected: dict[str, Tensor]) -> None:
        run = train(fast_config(Path("nothing")), data=Memory(files, "pil"), output=tmp_path / "run", **TINY)
        assert same_weights(weights(run.path), expected)
        moved = Path(shutil.move(run.path, tmp_path / "moved"))
        assert evaluate(moved)[0].values == run.metrics
        for kind in ("array", "uint8", "float"):
            as_catalog(Memory(files, kind), tmp_path / kind)  # writes the same files
            assert filecmp.cmpfiles(moved / "given-images", tmp_path / kind, NAMES, shallow=False) == (NAMES, [], [])

    def test_a_dataset_of_files(self, images: Path, tmp_path: Path, expected: dict[str, Tensor]) -> None:
        from torchvision.datasets import ImageFolder

        run = train(fast_config(Path("nothing")), data=ImageFolder(str(images)), output=tmp_path / "run", **TINY)
        assert same_weights(weights(run.path), expected)
        assert not (run.path / "given-images").exists()

    def test_a_run_resumes_without_the_data(
        self, files: list[Path], tmp_path: Path, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "_finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(Interrupted):
                train(fast_config(Path("nothing")), data=Memory(files, "pil"), output=tmp_path / "run", **TINY)
        assert same_weights(weights(resume(tmp_path / "run", report=False).path), expected)

    def test_what_cannot_be_used_leaves_nothing_behind(self, files: list[Path], tmp_path: Path) -> None:
        class Words(Memory):
            def __getitem__(self, index: int) -> Any:
                return "words" if index == 3 else super().__getitem__(index)

        for data, message in (
            (Words(files, "pil"), r"must be pairs \(image, label\), not str"),
            (([tmp_path / "missing.png", *files], ["a"] * 25), r"missing.png"),
            ((files, ["a"]), r"24 paths but 1 labels"),
            (([], []), "No images: the list of paths is empty"),
            ((files, [None] * 24), "A label must be a string or an integer, not None"),
            (files, r"must be a Catalog, a pair \(paths, labels\) or a torch Dataset, not list of 24"),
        ):
            with pytest.raises(DataError, match=message):
                train(fast_config(Path("nothing")), data=data, output=tmp_path / "run", **TINY)
            assert not (tmp_path / "run").exists()

    def test_a_table_cannot_hold_boxes(self, images: Path, tmp_path: Path) -> None:
        catalog = open_catalog(images)
        boxed = Catalog(
            "boxed", catalog.root, catalog.paths, catalog.labels, catalog.class_names, catalog.splits,
            boxes=np.zeros((len(catalog), 4)),
        )  # fmt: skip
        with pytest.raises(DataError, match="cannot store the boxes and judgements of boxed: give the source by name"):
            train(fast_config(images), data=boxed, output=tmp_path / "run", **TINY)


class TestEvaluate:
    def test_a_run_on_its_own_and_on_other_images(self, images: Path, tmp_path: Path, trained: Run) -> None:
        run = trained
        assert [each.values for each in evaluate(run)] == [each.values for each in evaluate(run.path)] == [run.metrics]
        other = class_folders(tmp_path / "other", classes=3, images=4, seed=4)
        by_name, by_catalog = evaluate(run, other), evaluate(run, open_catalog(other, train_share=0))
        assert by_name[0].values == by_catalog[0].values
        assert by_name[0].queries == 12
        encoder = Encoder.from_run(run.path)
        assert evaluate(encoder, other)[0].values == by_name[0].values
        assert evaluate(encoder, open_catalog(images))[0].values == run.metrics  # only the test images

    def test_an_encoder_needs_images(self) -> None:
        encoder = Encoder.from_pretrained("test_resnet", pretrained=False)
        with pytest.raises(ConfigError, match="give `data`"):
            evaluate(encoder)
        with pytest.raises(ConfigError, match="`distractors`, `model` and `parts` are for runs"):
            evaluate(encoder, "images", distractors="r1m")

    def test_arguments_without_effect(self, images: Path, trained: Run) -> None:
        with pytest.raises(ConfigError, match="`root` has no effect on a catalog"):
            evaluate(trained, open_catalog(images), root=images)


def test_all_keywords_of_settings_are_unambiguous_with_their_section() -> None:
    from shortlist.config import dotted_key

    for section, field in RunConfig.model_fields.items():
        assert dotted_key(section) == section
        for name in getattr(field.annotation, "model_fields", {}):
            if section not in ("name", "about"):
                assert dotted_key(f"{section}_{name}") == f"{section}.{name}"
