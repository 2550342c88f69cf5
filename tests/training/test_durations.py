"""The remaining time of a run, computed with a clock that the tests control."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from shortlist.training import Display, Plan, RunFolder, durations, find_requirements, make_plan
from shortlist.training.components import Given, build_embedder
from shortlist.training.durations import Durations, RemainingTime, measure_durations
from shortlist.training.loop import Trainer
from tests.training.runs import FASTEST_MODEL, class_folders, config, fast_config

STEPS, VALIDATION, TEST = 9, 18, 36  # steps of a run, and images of its validation and test


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("durations") / "images")


def plan_of(images: Path, *overrides: str) -> Plan:
    return make_plan(config(images, FASTEST_MODEL, *overrides), Display())


class TestEvaluations:
    @pytest.mark.parametrize(
        ("overrides", "validated", "tested"),
        [
            ([], [3, 6, 9], []),
            (["training.validate_every=2"], [6, 9], []),
            (["training.validate_every_steps=4"], [4, 8, 9], []),
            (["data.validation=none"], [], []),
            (["evaluation.test_every=2"], [3, 6, 9], [3, 9]),
        ],
    )
    def test_when(self, overrides: list[str], validated: list[int], tested: list[int], images: Path) -> None:
        plan = plan_of(
            images, *overrides, *(["training.steps=9", "training.epochs=null"] if "none" in str(overrides) else [])
        )
        steps = range(1, STEPS + 1)
        assert [step for step in steps if plan.validates(step)] == validated
        assert [step for step in steps if plan.tests(step)] == tested
        left = [sum(VALIDATION for each in validated if each > step) + TEST for step in range(STEPS + 1)]
        left = [number + sum(TEST for each in tested if each > step) for step, number in enumerate(left)]
        assert [plan.images_evaluated_after(step) for step in range(STEPS + 1)] == left


class TestDurations:
    def test_of_a_run(self, images: Path) -> None:
        found = Durations(step=2.0, image=0.5).of(plan_of(images, "evaluation.before=true"))
        evaluations = (3 * VALIDATION + 2 * TEST) * 0.5
        assert found["steps"] == STEPS * 2.0
        assert found["evaluations"] == evaluations
        assert found["until the end"] == STEPS * 2.0 + evaluations
        assert found["per epoch"] == found["until the end"] / 3

    def test_of_a_run_that_is_shorter_than_an_epoch(self, images: Path) -> None:
        plan = plan_of(images, "training.epochs=null", "training.steps=1")
        assert plan.steps_per_epoch > 1
        found = Durations(step=2.0, image=0.5).of(plan)
        assert found["per epoch"] == found["until the end"]

    def test_of_a_frozen_backbone(self, images: Path) -> None:
        plan = plan_of(images, "model.freeze=backbone", "data.views=5")
        found = Durations(step=2.0, image=0.5).of(plan)
        assert found["encoding"] == (5 * len(plan.train) + VALIDATION + TEST) * 0.5
        assert found["until the end"] == found["encoding"] + STEPS * 2.0

    def test_in_one_line(self, images: Path) -> None:
        frozen = plan_of(images, "model.freeze=backbone", "data.views=5")
        measured = Durations(step=2.0, image=0.5)
        assert measured.estimate(frozen) == "about 1 min 30 s: encoding about 1 min 12 s, 9 steps about 18 s"
        assert measured.estimate(plan_of(images)) == "about 1 min 03 s: 9 steps about 18 s, evaluations about 45 s"


class TestRemainingTime:
    def test_counts_steps_and_evaluations_apart(self, images: Path) -> None:
        clock = iter([0.0, 60.0, 100.0, 102.0, 200.0, 204.0, 300.0, 309.0])
        remaining = RemainingTime(plan_of(images), lambda: next(clock))
        with remaining.step():
            pass
        assert remaining.after(1) == 8 * 60.0
        for _ in range(2):
            with remaining.step():
                pass
        assert remaining.after(3) == 6 * 3.0  # the first step includes preparations
        with remaining.evaluation(VALIDATION):
            pass
        assert remaining.after(3) == 6 * 3.0 + (2 * VALIDATION + TEST) * 0.5

    def test_counts_the_test_before_training(
        self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = [0.0]
        monkeypatch.setattr(Trainer, "_test", lambda *_, **__: times.append(18.0) or [])
        chosen, run = fast_config(images, "evaluation.before=true"), RunFolder(tmp_path)
        run.begin(chosen)
        trainer = Trainer(chosen, run, Display(), Given())
        trainer.remaining = RemainingTime(trainer.plan, lambda: times[-1])
        trainer._begin()
        with trainer.remaining.step():
            pass  # in no time
        assert trainer.remaining.after(0) == (3 * VALIDATION + TEST) * (18.0 / TEST)


class TestMeasuring:
    @pytest.mark.parametrize("overrides", [(), ("model.freeze=backbone", "batch.chunk_size=auto")])
    def test_uses_the_images_of_the_run(
        self, overrides: tuple[str, ...], images: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(durations, "MEASURED_STEPS", 1)
        plan = plan_of(images, *overrides)
        embedder = build_embedder(plan.config, weights=False)
        before = {name: each.clone() for name, each in embedder.state_dict().items()}
        clock = itertools.count(0, 10)  # seconds per look at the clock
        found = measure_durations(plan, embedder, find_requirements(plan, embedder), lambda: float(next(clock)))
        assert found.step >= 10  # a step with a frozen backbone is measured by the same clock
        assert found.image > 0
        assert all(torch.equal(each, before[name]) for name, each in embedder.state_dict().items())
