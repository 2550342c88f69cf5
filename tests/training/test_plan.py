"""What a run will do: its steps and their images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shortlist.training import Display, Plan, describe, make_plan
from shortlist.training.components import build_embedder
from shortlist.training.datasets import reported_k
from shortlist.training.plan import decoding_workers
from tests.training.runs import STEPS_AN_EPOCH, class_folders, config


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("plan") / "images")


@pytest.fixture(scope="module")
def plan(images: Path) -> Plan:
    return make_plan(config(images), Display())


class TestBatches:
    def test_are_the_samplers(self, plan: Plan) -> None:
        found = list(plan.batches(0))
        assert [epoch for epoch, _ in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        for epoch in range(3):
            batches = torch.stack([batch for each, batch in found if each == epoch])
            assert torch.equal(batches, plan.sampler.batches(epoch))
            assert len(batches.unique()) == batches.numel()  # no image twice in an epoch
        assert not torch.equal(plan.sampler.batches(0), plan.sampler.batches(1))

    @pytest.mark.parametrize("first", [1, 3, 5, 8, 9])
    def test_go_on_in_the_middle(self, first: int, plan: Plan) -> None:
        whole, rest = list(plan.batches(0))[first:], list(plan.batches(first))
        assert [epoch for epoch, _ in rest] == [epoch for epoch, _ in whole]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(whole, rest, strict=True))

    def test_as_many_as_asked_for(self, images: Path, plan: Plan) -> None:
        assert (plan.steps_per_epoch, plan.total_steps) == (STEPS_AN_EPOCH, 3 * STEPS_AN_EPOCH)
        steps = make_plan(config(images, "training.epochs=null", "training.steps=4"), Display())
        assert len(list(steps.batches(0))) == steps.total_steps == 4

    def test_follow_from_the_seed(self, images: Path, plan: Plan) -> None:
        other = make_plan(config(images, "training.seed=1"), Display())
        assert not torch.equal(next(other.batches(0))[1], next(plan.batches(0))[1])


def test_what_is_reported() -> None:
    assert reported_k(config(Path("x")), "x") == (1, 2, 4, 8)
    assert reported_k(config(Path("x"), "evaluation.k=[3]"), "x") == (3,)
    assert reported_k(config(Path("x")), "sop") == (1, 10, 100, 1000)
    assert reported_k(config(Path("x")), "r1m") == (1, 2, 4, 8)  # of which nothing is reported


@pytest.mark.parametrize(("cores", "workers"), [(None, 0), (1, 0), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_workers(cores: int | None, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert decoding_workers(config(Path("x"), "data.workers=auto")) == workers
    assert decoding_workers(config(Path("x"), "data.workers=3")) == 3


def test_memory_grows_as_it_should(images: Path) -> None:
    """Double the chunk, double its graph; Adam keeps twice what SGD does beside weights and gradients."""

    def memory(*overrides: str) -> dict[str, float]:
        chosen = config(images, "model.backbone=test_resnet", "images.size=64", *overrides)
        found = describe(make_plan(chosen, Display()), build_embedder(chosen, weights=False))["memory"]
        return {name: float(size.removesuffix(" MB").replace(",", "")) for name, size in found.items()}

    small, large = memory("batch.chunk_size=500"), memory("batch.chunk_size=1000")
    assert small["graph of a chunk of 500"] > 10
    assert large["graph of a chunk of 1000"] == pytest.approx(2 * small["graph of a chunk of 500"], rel=0.05)
    kept = {name: memory(f"optimizer.name={name}")["weights, gradient, optimizer"] for name in ("adam", "sgd")}
    assert kept["adam"] == pytest.approx(kept["sgd"] * 4 / 3, abs=1)
    assert kept["adam"] > kept["sgd"]
