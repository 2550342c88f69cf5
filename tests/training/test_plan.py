"""The plan of a run: its steps and their images."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from shortlist.errors import ConfigError
from shortlist.recipes import open_recipe
from shortlist.training import Display, Plan, describe_plan, make_plan
from shortlist.training.components import build_embedder
from shortlist.training.datasets import reported_k
from shortlist.training.plan import run_workers
from shortlist.training.plan_description import describe_data
from tests import miniatures
from tests.training.runs import STEPS_PER_EPOCH, class_folders, config


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("plan") / "images")


@pytest.fixture(scope="module")
def plan(images: Path) -> Plan:
    return make_plan(config(images), Display())


def write_empty(file: Path, *_: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


class TestBatches:
    def test_are_those_of_the_sampler(self, plan: Plan) -> None:
        found = list(plan.batches(0))
        assert [epoch for epoch, _ in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        for epoch in range(3):
            batches = torch.stack([batch for each, batch in found if each == epoch])
            assert torch.equal(batches, plan.sampler.batches(epoch))
            assert len(batches.unique()) == batches.numel()  # no image twice in an epoch
        assert not torch.equal(plan.sampler.batches(0), plan.sampler.batches(1))

    @pytest.mark.parametrize("first", [1, 3, 5, 8, 9])
    def test_start_at_any_step(self, first: int, plan: Plan) -> None:
        whole, rest = list(plan.batches(0))[first:], list(plan.batches(first))
        assert [epoch for epoch, _ in rest] == [epoch for epoch, _ in whole]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(whole, rest, strict=True))

    def test_number_of_steps(self, images: Path, plan: Plan) -> None:
        assert (plan.steps_per_epoch, plan.total_steps) == (STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH)
        steps = make_plan(config(images, "training.epochs=null", "training.steps=4"), Display())
        assert len(list(steps.batches(0))) == steps.total_steps == 4

    def test_depend_on_the_seed(self, images: Path, plan: Plan) -> None:
        other = make_plan(config(images, "training.seed=1"), Display())
        assert not torch.equal(next(other.batches(0))[1], next(plan.batches(0))[1])


class TestBatchSize:
    """12 classes of 6 images: 6 for tests and, with `data.validation=half`, 3 of the others for validation."""

    def test_is_reduced_where_half_of_the_classes_validates(self, images: Path) -> None:
        for size in (9, 12, 15, 18):
            plan = make_plan(config(images, f"batch.size={size}"), Display())
            assert plan.sampler.batch_size == 9
            note = f"batch.size={size} is reduced to 9: data.validation=half leaves 3 classes with at least 3 training"
            *remarks, few = plan.remarks
            assert remarks == ([] if size == 9 else [f"{note} images"])
            assert few.startswith("Only 3 training classes")
            described = describe_plan(plan, build_embedder(plan.config, weights=False))
            assert described["data"].get("remarks", []) == list(plan.remarks)

    @pytest.mark.parametrize(
        ("overrides", "largest"),
        [(["batch.size=21"], 9), (["batch.size=21", "data.validation=none"], 18), (["batch.per_class=7"], None)],
    )
    def test_is_refused_if_training_classes_do_not_suffice(
        self, overrides: list[str], largest: int | None, images: Path
    ) -> None:
        message = f"The largest batch possible is {largest}" if largest else "No class has 7 images"
        with pytest.raises(ConfigError, match=message):
            make_plan(config(images, "batch.size=14", *overrides), Display())

    def test_of_cars196(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The recipe with its own batch size, 392, which needs all 98 training classes."""
        monkeypatch.setattr(miniatures, "image", write_empty)  # nothing is decoded
        root = miniatures.miniature("cars196", tmp_path, classes=98, images=4)
        plan = make_plan(open_recipe("cars196-resnet50-rsk", [f"data.root={root}", "data.validation=half"]), Display())
        assert (plan.sampler.batch_size, plan.steps_per_epoch) == (196, 1)


def test_the_epoch_is_that_of_the_configuration(tmp_path: Path) -> None:
    """A class with 7 groups and four with one: batches of two classes."""
    images = class_folders(tmp_path, classes=5, images=21)
    for folder in sorted(images.iterdir())[1:]:
        for image in sorted(folder.iterdir())[3:]:
            image.unlink()
    overrides = ("data.validation=none", "data.train_share=1", "batch.size=6")
    full, release = (
        make_plan(config(images, *overrides, f"batch.epoch={epoch}"), Display()) for epoch in ("full", "release")
    )
    assert (full.steps_per_epoch, release.steps_per_epoch) == (4, 3)
    assert release.total_steps == 3 * 3


def test_what_is_reported() -> None:
    assert reported_k(config(Path("x")), "x") == (1, 2, 4, 8)
    assert reported_k(config(Path("x"), "evaluation.k=[3]"), "x") == (3,)
    assert reported_k(config(Path("x")), "sop") == (1, 10, 100, 1000)
    assert reported_k(config(Path("x")), "r1m") == (1, 2, 4, 8)  # of which nothing is reported


@pytest.mark.parametrize(("cores", "workers"), [(None, 0), (1, 0), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_workers(cores: int | None, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert run_workers(config(Path("x"), "data.workers=auto")) == workers
    assert run_workers(config(Path("x"), "data.workers=3")) == 3


def test_the_command_that_lists_the_classes(images: Path, tmp_path: Path) -> None:
    rows = [f"{file.relative_to(images)},{file.parent.name}|x{i % 2}" for i, file in enumerate(images.rglob("*.png"))]
    splits = ["train" if row < "class 06" else "test" for row in rows]
    table = tmp_path / "images.csv"
    lines = [f"{row},{split}" for row, split in zip(rows, splits, strict=True)]
    table.write_text("\n".join(["path,label,split", *lines]))
    given = (f"data.root={images}", "data.label_separator=|", "data.split_seed=3", "data.validation=none")
    lines = list(describe_data(make_plan(config(table, *given), Display()), tmp_path))
    expected = f"{shlex.quote(str(table))} --classes --root={images} --split-seed=3 '--label-separator=|'"
    assert f"Names of the classes: shortlist data show {expected}" in lines


def test_a_trial_of_a_sweep_is_not_advised_to_train_on_all_classes(images: Path) -> None:
    advice = "for the best number of epochs: shortlist train --final 'runs/my run'"
    for withheld in (False, True):
        chosen = config(images, "data.validation=half", f"data.withhold_test={str(withheld).lower()}")
        lines = list(describe_data(make_plan(chosen, Display()), Path("runs/my run")))
        assert any(advice in line for line in lines) is not withheld
