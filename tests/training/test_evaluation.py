"""Tests of a run on miniatures of the benchmarks: several test sets, distractors, and results of the paper."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from rich.console import Console

from shortlist.config import RunConfig, read_config
from shortlist.data import open_catalog
from shortlist.encoding import embed_images
from shortlist.errors import ConfigError, DataError
from shortlist.evaluation import Estimate, Evaluation, evaluate
from shortlist.model import Embedder, MultiScale
from shortlist.report.terminal_tables import print_evaluations
from shortlist.training import Display, EvalImages, RunFolder, describe_plan, evaluate_run, make_plan, run_evaluation
from shortlist.training import train_run as train
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.datasets import with_absolute_paths
from shortlist.training.folder import ImagesChangedError
from tests.miniatures import miniature
from tests.training.runs import class_folders, config, records, write_config

LANDMARKS = """
name: landmarks
paper:
  roxford5k: {mAP medium: 60.0, mAP hard: 50.0, mP@7 hard: 20}
  roxford5k+r1m: {mAP medium: 40.0}
  rparis6k+r1m: {mAP medium: 30.0}
data: {source: gldv1, root: gldv1, workers: 0, on_missing: skip, validation_source: {source: sfm120k-val, root: sfm}}
images: {size: 32}
model: {backbone: test_vit, backbone_args: {depth: 1}, weights: none, dim: 8}
batch: {size: 6, per_class: 3, chunk_size: 6}
optimizer: {lr: 1e-3}
training: {epochs: 2}
tracking: []
evaluation:
  bootstrap: 20
  tests:
    - {source: roxford5k, root: oxford, distractors: r1m}
    - {source: rparis6k, root: paris}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("benchmarks")
    folders = {"gldv1": "gldv1", "sfm120k-val": "sfm", "roxford5k": "oxford", "rparis6k": "paris", "r1m": "r1m"}
    for name, folder in folders.items():
        miniature(name, root / folder)
    bad = next((root / "r1m").rglob("*.JPG"))
    bad.write_bytes(bad.read_bytes()[:300])  # R1M has truncated files
    return root


def landmarks(home: Path, *overrides: str) -> RunConfig:
    text = LANDMARKS
    for folder in ("gldv1", "sfm", "oxford", "paris", "r1m"):
        text = text.replace(f"root: {folder}", f"root: {home / folder}")
        text = text.replace(f"distractors: {folder}", f"distractors: {home / folder}")
    return read_config(text, "landmarks", overrides)


@pytest.fixture(scope="module")
def tracked() -> dict[str, float]:
    """The values that the run of `trained` has logged to its trackers."""
    return {}


@pytest.fixture(scope="module")
def trained(home: Path, tracked: dict[str, float], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "log", lambda accelerator, values, step: tracked.update(values))
        return train(landmarks(home), tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def finished(trained: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy, because an evaluation writes its vectors to the folder of the run."""
    return RunFolder(Path(shutil.copytree(trained.path, tmp_path / "finished")))


class TestLandmarks:
    """Training images without a test split, other images for tests and validation, and one unreadable distractor."""

    def test_all_test_sets_are_evaluated(self, finished: RunFolder) -> None:
        tested = json.loads(finished.evaluation_file.read_text())
        assert [each["data"] for each in tested] == ["roxford5k", "roxford5k+r1m", "rparis6k"]
        assert {each["protocol"] for each in tested} == {"revisited"}
        assert [each["gallery"] for each in tested] == [30, 30 + 29, 30]
        assert tested[0]["setups"] == {"easy": 5, "medium": 6, "hard": 6}
        assert list(tested[0]["metrics"])[:4] == ["mAP easy", "mAP medium", "mAP hard", "mP@1 easy"]
        assert tested[0]["metrics"]["mAP medium"]["value"] > tested[1]["metrics"]["mAP medium"]["value"]

    def test_before_training_there_are_no_distractors(self, finished: RunFolder) -> None:
        tested = json.loads(finished.before_file.read_text())
        assert [each["data"] for each in tested] == ["roxford5k", "rparis6k"]

    def test_differences_from_the_paper(self, finished: RunFolder) -> None:
        oxford, million, paris = json.loads(finished.evaluation_file.read_text())
        assert oxford["paper"] == {"mAP medium": 60, "mAP hard": 50, "mP@7 hard": 20}
        assert million["paper"] == {"mAP medium": 40}
        both = ("mAP medium", "mAP hard")  # the third is not measured
        points = {name: 100 * oxford["metrics"][name]["value"] - oxford["paper"][name] for name in both}
        assert oxford["difference"] == pytest.approx(points)
        assert paris["paper"] == paris["difference"] == {}

    def test_the_best_epoch_is_chosen_by_the_validation_images(self, finished: RunFolder) -> None:
        validated = records(finished, "validation")
        assert [each["epoch"] for each in validated] == [1, 2]
        assert all("mAP" in each and "r@1" not in each for each in validated)
        embedder = Embedder.load(finished.best)
        config = finished.config()
        images = open_catalog("sfm120k-val", root=config.data.validation_source.root)
        found = evaluate(embed_images(embedder, images, build_transforms(config, embedder)[1]), images, bootstrap=0)
        assert found.metrics["mAP"].value == pytest.approx(max(each["mAP"] for each in validated))

    def test_each_test_is_recorded_and_tracked(self, finished: RunFolder, tracked: dict[str, float]) -> None:
        tested = {each["data"]: each["mAP hard"] for each in records(finished, "test")}
        assert list(tested) == ["roxford5k", "roxford5k+r1m", "rparis6k"]
        assert {f"test/{name}/mAP hard": value for name, value in tested.items()}.items() <= tracked.items()

    def test_evaluate_run_gives_the_same_results(self, finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        """The distractors are not embedded again, and the training images are not opened."""
        kept = finished.vectors / "r1m.npy"
        before = kept.stat().st_mtime_ns
        opened: list[str] = []

        def note(source: str, **options: object) -> object:
            opened.append(source)
            return open_catalog(source, **options)

        monkeypatch.setattr("shortlist.training.datasets.open_catalog", note)
        found = [each.to_dict() for each in evaluate_run(finished.path)]
        assert found == json.loads(finished.evaluation_file.read_text())
        assert kept.stat().st_mtime_ns == before
        assert opened == ["roxford5k", "r1m", "rparis6k"]
        assert len(json.loads((finished.vectors / "r1m.npy.json").read_text())["left_out"]) == 1

    def test_vectors_of_test_images_are_kept(self, finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        config = finished.config()
        images = open_catalog("rparis6k", root=config.evaluation.tests[1].root, on_missing="skip")
        embedder = Embedder.load(finished.path)
        expected = embed_images(embedder, images.split("test"), build_transforms(config, embedder)[1])
        torch.testing.assert_close(torch.from_numpy(np.load(finished.vectors / "rparis6k.npy")), expected)
        monkeypatch.setattr(Embedder, "forward", None)  # is not called
        assert [each.to_dict() for each in evaluate_run(finished.path)] == json.loads(
            finished.evaluation_file.read_text()
        )

    def test_a_folder_that_cannot_be_written_to(
        self, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = RunFolder(Path(shutil.copytree(finished.path, tmp_path / "run")))
        shutil.rmtree(run.vectors)
        monkeypatch.setattr(os, "access", lambda *_: False)
        (measured,) = evaluate_run(run.path, EvalImages("rparis6k"))
        assert measured.to_dict() == json.loads(finished.evaluation_file.read_text())[2]
        assert not run.vectors.exists()

    def test_another_embedder_embeds_the_distractors_again(self, finished: RunFolder, tmp_path: Path) -> None:
        run = RunFolder(Path(shutil.copytree(finished.path, tmp_path / "run")))
        build_embedder(landmarks(Path(), "training.seed=5")).save(run.path)
        before = (run.vectors / "r1m.npy").read_bytes()
        found = [each.to_dict() for each in evaluate_run(run.path)]
        assert found != json.loads(finished.evaluation_file.read_text())
        assert (run.vectors / "r1m.npy").read_bytes() != before

    def test_remarks_on_incomplete_benchmarks(self, finished: RunFolder, home: Path, tmp_path: Path) -> None:
        """Remarks list differences from the complete benchmarks, and images that were left out."""
        oxford, million, paris = json.loads(finished.evaluation_file.read_text())
        assert oxford["remarks"] == [
            "query: the lists have 6 images, but roxford5k has 70 images",
            "gallery: the lists have 30 images, but roxford5k has 4,993 images",
        ]
        assert million["remarks"] == [
            *oxford["remarks"],
            "gallery: the lists have 30 images, but r1m has 1,001,001 images",
            "r1m: left out 1 unreadable images (on_missing=skip; see vectors/r1m.npy.json)",
        ]
        assert len(paris["remarks"]) == 2
        some = Path(shutil.copytree(home / "oxford", tmp_path / "oxford"))
        next(some.rglob("query_000001.jpg")).unlink()
        next(some.rglob("query_000002.jpg")).write_text("no image")
        (fewer,) = evaluate_run(finished.path, EvalImages("roxford5k", root=some))
        assert fewer.queries == 4
        text = "roxford5k: left out 1 missing and 1 unreadable images (on_missing=skip)"
        assert fewer.remarks == (*oxford["remarks"], text)
        assert f"note: {text}" in printed(fewer)[1]

    def test_the_plan_has_these_remarks(self, home: Path) -> None:
        found = make_plan(landmarks(home), Display()).remarks
        assert len(found) == len(set(found))
        assert {remark.rpartition("but ")[2].partition(" ")[0] for remark in found} >= {"gldv1", "roxford5k", "r1m"}

    def test_other_images_with_distractors(self, finished: RunFolder, home: Path) -> None:
        found = evaluate_run(finished.path, EvalImages("rparis6k", root=home / "paris", distractors=home / "r1m"))
        assert [each.data for each in found] == ["rparis6k", "rparis6k+r1m"]
        assert found[1].paper == {"mAP medium": 30}

    def test_unreadable_distractors_are_an_error_unless_skipped(self, finished: RunFolder, tmp_path: Path) -> None:
        run = RunFolder(Path(shutil.copytree(finished.path, tmp_path / "run")))
        shutil.rmtree(run.vectors)
        write_config(run, run.config_file.read_text().replace("on_missing: skip", "on_missing: error"))
        with pytest.raises(DataError, match=r"\.JPG.* Leave such images out with `on_missing=\"skip\"`"):
            evaluate_run(run.path)
        found = [each.to_dict() for each in evaluate_run(run.path, EvalImages(on_missing="skip"))]
        assert found == json.loads(finished.evaluation_file.read_text())
        text = run.config_file.read_text()  # or by the test alone, as the landmark recipes do
        at = text.index("tests:")
        write_config(run, text[:at] + text[at:].replace("on_missing: null", "on_missing: skip"))
        shutil.rmtree(run.vectors)
        assert [each.to_dict() for each in evaluate_run(run.path)] == found
        with pytest.raises(ConfigError, match="`on_missing=\"skp\"`: did you mean 'skip'"):
            evaluate_run(run.path, EvalImages(on_missing="skp"))

    def test_a_test_of_the_run_is_found_by_its_name(self, finished: RunFolder) -> None:
        """It is not in data.root, the folder of the training images."""
        (found,) = evaluate_run(finished.path, EvalImages("rparis6k"))
        assert found.to_dict() == json.loads(finished.evaluation_file.read_text())[2]

    def test_scales(self, finished: RunFolder, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = landmarks(home, "evaluation.scales=[1, 0.5]", "evaluation.tests=[{source: rparis6k, root: paris}]")
        embedder, plan = Embedder.load(finished.path), make_plan(landmarks(home), Display())
        eval_set = plan.eval_sets[1]
        transform = build_transforms(config, embedder)[1]
        (found,) = run_evaluation.evaluate_embedder(embedder, eval_set, config, Display())
        (plain,) = run_evaluation.evaluate_embedder(embedder, eval_set, landmarks(home), Display())
        both = embed_images(MultiScale(embedder, (1.0, 0.5)), eval_set.catalog, transform)
        assert found.metrics == evaluate(both, eval_set.catalog, bootstrap=20, k=eval_set.k).metrics
        assert found.metrics != plain.metrics
        (validated,) = run_evaluation.evaluate_embedder(embedder, eval_set, config, Display(), validation=True)
        assert validated.values == plain.values
        assert validated.metrics["mAP hard"].low is None

    def test_the_plan_lists_test_sets(self, home: Path) -> None:
        config = landmarks(home)
        found = describe_plan(make_plan(config, Display()), build_embedder(config))
        assert found["tests"] == [
            "roxford5k: 36 images, without and with 30 images of r1m, reported at 1, 5, 10",
            "rparis6k: 36 images, reported at 1, 5, 10",
        ]
        assert found["data"]["validation"] == "36 images of 1 class"
        assert "test" not in found["data"]

    def test_relative_paths_are_made_absolute(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(home)
        config = with_absolute_paths(read_config(LANDMARKS, "landmarks"))
        oxford, paris = config.evaluation.tests
        assert (oxford.root, oxford.distractors, paris.root) == (home / "oxford", home / "r1m", home / "paris")
        assert (oxford.source, paris.distractors) == ("roxford5k", None)
        assert config.data.root == home / "gldv1"
        assert config.data.validation_source.root == home / "sfm"

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("data.validation=half", "validation: half and validation_source are mutually exclusive"),
            ("data.validation_source={source: sfm120k-val, distractors: x}", "distractors has no effect"),
            ("evaluation.tests=[{source: roxford5k, roots: x}]", "did you mean 'root'"),
        ],
    )
    def test_refusals(self, override: str, message: str, home: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            landmarks(home, override)

    def test_missing_test_images_are_reported_before_training(self, home: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="roxford5k"):
            train(landmarks(home, f"evaluation.tests=[{{source: roxford5k, root: {home / 'sfm'}}}]"), tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestByClass:
    RECIPE = """
name: cars
paper: {vehicleid-small: {r@1: 95.0}, vehicleid-large: {r@1: 90.0, r@5: 91.0}}
data: {source: vehicleid-small, workers: 0}
images: {size: 32}
model: {backbone: test_vit, backbone_args: {depth: 1}, weights: none, dim: 8}
batch: {size: 6, per_class: 3}
training: {epochs: 1}
tracking: []
evaluation:
  bootstrap: 0
  before: false
  tests: [{source: vehicleid-small}, {source: vehicleid-large}, {source: vehicleid-small-reid}]
"""

    def test_three_lists_of_one_folder(self, tmp_path: Path) -> None:
        root = miniature("vehicleid-small", tmp_path / "cars")
        run = train(read_config(self.RECIPE, "cars", [f"data.root={root}"]), tmp_path / "run")
        small, large, again = json.loads(run.evaluation_file.read_text())
        assert [each["data"] for each in (small, large, again)] == [
            "vehicleid-small", "vehicleid-large", "vehicleid-small-reid",
        ]  # fmt: skip
        assert [each["protocol"] for each in (small, large, again)] == ["leave-one-out"] * 2 + ["re-identification"]
        assert (small["paper"], again["paper"]) == ({"r@1": 95}, {})
        assert list(large["metrics"])[:2] == ["r@1", "r@5"]

    def test_own_images_among_the_tests_are_the_test_classes_only(self, tmp_path: Path) -> None:
        images = class_folders(tmp_path / "images", classes=8)
        text = f"{{source: {json.dumps(str(images))}}}"
        other = class_folders(tmp_path / "others", classes=3, seed=3)
        settings = [
            f"data.source={json.dumps(str(images))}",
            f"evaluation.tests=[{text}, {{source: {json.dumps(str(other))}}}]",
        ]
        plan = make_plan(read_config(self.RECIPE, "x", settings), Display())
        assert [len(eval_set.catalog.classes()) for eval_set in plan.eval_sets] == [4, 3]
        assert not set(plan.eval_sets[0].catalog.classes()) & set(plan.train.classes())

    def test_own_images_given_to_evaluate_run_are_the_test_classes_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = class_folders(tmp_path / "images", classes=8)
        settings = [f"data.source={json.dumps(str(images))}", "evaluation.tests=[]"]
        run = train(read_config(self.RECIPE, "x", settings), tmp_path / "run")
        (own,) = evaluate_run(run.path)
        monkeypatch.chdir(tmp_path)
        for name in (str(images), "images", "./images"):
            assert evaluate_run(run.path, EvalImages(name)) == [own]
        shutil.copytree(images, tmp_path / "others")
        (others,) = evaluate_run(run.path, EvalImages("others"))
        assert others.queries == 2 * own.queries

    def test_distractors_need_judged_queries(self, home: Path, tmp_path: Path) -> None:
        root = miniature("vehicleid-small", tmp_path / "cars")
        tests = f"evaluation.tests=[{{source: vehicleid-small, distractors: {home / 'r1m'}}}]"
        config = read_config(self.RECIPE, "cars", [f"data.root={root}", tests, "data.on_missing=skip"])
        with pytest.raises(ConfigError, match="vehicleid-small cannot be tested with distractors"):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()  # reported before training


def printed(
    *found: Evaluation, paper: tuple[str, ...] = (), ours: dict[str, dict[str, float]] | None = None
) -> tuple[dict[str, list[str]], str]:
    """The cells of the table by metric, and the printed text."""
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    print_evaluations(found, paper, console, ours)
    text = console.export_text()
    console.file.close()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}, text


class TestTables:
    METRICS = {"r@1": Estimate(0.5, 0.4, 0.6), "r@2": Estimate(0.75), "mAP@R": Estimate(0.1)}  # noqa: RUF012

    def measured(self, paper: dict[str, float], **others: object) -> Evaluation:
        return Evaluation("cars196", "test", "leave-one-out", 1200, 1199, 3, self.METRICS, paper=paper, **others)

    def test_names_with_brackets(self) -> None:
        _, text = printed(replace(self.measured({}), data="my[b]images"))
        assert "my[b]images, test" in text

    def test_paper_and_difference(self) -> None:
        rows, text = printed(self.measured({"r@2": 80.7, "r@1": 44.4, "r@8": 91}))
        assert list(rows) == ["r@2", "r@1", "r@8", "mAP@R"]  # the paper's first
        assert rows["r@1"] == ["50.0", "[40.0, 60.0]", "44.4", "+5.6"]
        assert rows["r@2"] == ["75.0", "", "80.7", "-5.7"]
        assert rows["r@8"] == ["-", "not measured", "91.0", ""]
        assert rows["mAP@R"] == ["10.0", "", "", ""]
        assert "cars196, test: leave-one-out" in text
        assert "1,200 queries, each against 1,199 images; excluded (no positive in the gallery): 3" in text

    def test_without_a_paper(self) -> None:
        rows, text = printed(self.measured({}))
        assert rows["r@1"] == ["50.0", "[40.0, 60.0]"]
        assert "paper" not in text

    def test_results_of_the_paper_on_other_images_are_mentioned(self) -> None:
        _, text = printed(self.measured({"r@1": 1}), paper=("cars196", "cars196+r1m"))
        assert "The paper also reports results on cars196+r1m, not tested here." in text

    def test_own_results_of_a_recipe_are_mentioned(self) -> None:
        assert "have not been reproduced with shortlist yet" in printed(self.measured({}), ours={})[1]
        _, text = printed(self.measured({}), ours={"cars196": {"r@1": 48.6}})
        assert "Our own results with this recipe: cars196 r@1 48.6." in text

    def test_setups(self) -> None:
        _, text = printed(self.measured({}, setups={"easy": 68, "hard": 70}))
        assert "easy: 68 queries; hard: 70 queries" in text


def test_images_that_changed_after_training_are_refused(tmp_path: Path) -> None:
    """With another class, the split of the classes changes, and training classes would be tested."""
    images = class_folders(tmp_path / "images", classes=8)
    run = train(config(images, "training.epochs=1", "data.validation=none"), tmp_path / "run")
    evaluate_run(run.path)
    shutil.copytree(images / "class 00", images / "a new class")
    with pytest.raises(ImagesChangedError, match=r"have changed since the start of the run in"):
        evaluate_run(run.path)
