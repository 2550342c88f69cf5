"""The remedies for vanishing gradients in a configuration, and in runs that are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shortlist.config import LossConfig, read_config
from shortlist.errors import ConfigError
from shortlist.ranking import (
    CalibrationLoss,
    CombinedLoss,
    LinearTail,
    MedianRank,
    RecallAtKLoss,
    Schedule,
)
from shortlist.training import loop
from shortlist.training import resume_run as resume
from shortlist.training import train_run as train
from shortlist.training.components import build_loss
from shortlist.training.learner import Learner
from shortlist.training.user_loss import ExternalLoss
from tests.training.runs import FASTEST_MODEL, RECIPE, class_folders, records, same_weights, weights
from tests.training.runs import config as run_config


def settings(*overrides: str) -> LossConfig:
    return read_config(RECIPE, "tiny", overrides).loss


def build(*overrides: str) -> nn.Module:
    return build_loss(settings(*overrides), torch.arange(4), 8)


def test_by_default_nothing_changes() -> None:
    loss = build()
    assert isinstance(loss, RecallAtKLoss)
    assert (loss.rank_temperature, loss.similarity_temperature) == (1.0, 0.01)
    assert (loss.tail, loss.simix) == (None, None)
    assert loss.head.k == (1, 2, 4, 8, 16)


def test_the_temperature_at_the_start() -> None:
    loss = build("loss.start={rank_temperature: 500, until: 0.25}", "loss.rank_temperature=2")
    assert isinstance(loss, RecallAtKLoss)
    assert loss.rank_temperature == Schedule(500, 2, 0.25)
    half = build("loss.start.rank_temperature=500")
    assert isinstance(half, RecallAtKLoss)
    assert half.rank_temperature == Schedule(500, 1, 0.5)


def test_the_other_settings() -> None:
    loss = build("loss.rank_temperature=auto", "loss.tail={slope: 50}")
    assert isinstance(loss, RecallAtKLoss)
    assert loss.rank_temperature == MedianRank()
    assert loss.tail == LinearTail(50.0, 0.05)


def test_losses_that_are_added() -> None:
    added = "loss.plus=[{name: calibration, weight: 2, negatives_below: 0.3}, {name: pml.ProxyNCALoss, weight: 0.1}]"
    loss = build(added, "loss.rank_temperature=auto")
    assert isinstance(loss, CombinedLoss)
    assert isinstance(loss.loss, RecallAtKLoss)
    assert loss.loss.rank_temperature == MedianRank()
    calibration, proxies = loss.added
    assert isinstance(calibration, CalibrationLoss)
    assert str(calibration.list_loss) == "Calibration(positives_above=0.9, negatives_below=0.3)"
    assert isinstance(proxies, ExternalLoss)
    assert loss.weights == [2, 0.1]
    alone = build("loss.name=calibration", "loss.positives_above=0.8")
    assert str(alone.list_loss) == "Calibration(positives_above=0.8, negatives_below=0.6)"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.name=smooth_ap", "loss.start.rank_temperature=9"], "loss: start has no effect with smooth_ap"),
        (
            ["loss.rank_temperature=auto", "loss.start.rank_temperature=9"],
            "start has no effect with rank_temperature: auto",
        ),
        (["loss.name=binned_ap", "loss.start.rank_temperature=9"], "loss: start has no effect with binned_ap"),
        (["loss.name=binned_ap", "loss.tail={}"], "loss: tail has no effect with binned_ap"),
        (
            ["loss.name=binned_ap", "loss.plus=[{name: smooth_ap, bins: 9, weight: 1}]"],
            "bins has no effect with smooth",
        ),
        (["loss.start.until=0"], "loss.start.until: should be greater than 0"),
        (["loss.start.until=0.3"], "loss.start.rank_temperature: is required"),
        (["loss.tail.slop=0"], "loss.tail.slop: unknown key; did you mean 'slope'?"),
        (["loss.rank_temperature=adaptive"], "loss.rank_temperature: should be"),
        (["loss.plus=[{name: calibration}]"], "loss.plus.0.weight: is required"),
        (["loss.plus=[{name: calibration, weight: 0}]"], "loss.plus.0.weight: should be greater than 0"),
        (
            ["loss.plus=[{name: pml.ContrastiveLoss, weight: 1, memory: {size: 5}}]"],
            "memory.size 5 is smaller than batch.size 6",
        ),
    ],
)
def test_what_a_config_refuses(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(*overrides)
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["simix_alphas", "simix_negatives", "start.k_factor", "start.similarity_temperature"])
def test_keys_of_earlier_versions_are_unknown(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"\n  loss\.{key}: unknown key; "):
        settings("loss.start.rank_temperature=9", f"loss.{key}=2")


def test_mistakes_in_an_added_loss_are_found_there() -> None:
    with pytest.raises(ConfigError, match=r"loss\.plus\.0\.name: pytorch-metric-learning has no loss ProxyNCLoss"):
        build("loss.plus=[{name: pml.ProxyNCLoss, weight: 1}]")
    with pytest.raises(ConfigError, match=r"loss\.plus\.0\.args\.alpa: unknown argument"):
        build("loss.plus=[{name: pml.MultiSimilarityLoss, weight: 1, args: {alpa: 2}}]")


def test_every_loss_of_a_sum_learns_the_progress() -> None:
    plus = "loss.plus=[{name: recall_at_k, weight: 1, start: {rank_temperature: 9}}]"
    learner = Learner(read_config(RECIPE, "tiny", [plus]), torch.device("cpu"), torch.arange(4))
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    learner.train_step(0, iter([images]), torch.tensor([0, 0, 0, 1, 1, 1]), 1.0, progress=0.25)
    assert isinstance(learner.loss, CombinedLoss)
    assert [learner.loss.loss.progress, learner.loss.added[0].progress] == [0.25, 0.25]


CHANGING = [
    "loss.start={rank_temperature: 50, until: 0.8}",
    "loss.plus=[{name: recall_at_k, rank_temperature: auto, weight: 0.5}, {name: pml.ProxyNCALoss, weight: 0.1}, "
    "{name: pml.ContrastiveLoss, memory: {size: 12}, weight: 0.1}]",
]


def test_a_resumed_run_continues_its_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the last of 4 steps, after the checkpoint of step 2; the weights are the same bit for bit."""
    images = class_folders(tmp_path / "images", classes=8, images=3)
    short = [FASTEST_MODEL, "data.validation=none", "training.epochs=2"]
    config = run_config(images, *short, *CHANGING)
    whole = train(config, tmp_path / "whole")
    real = loop.learning_rate_factor

    def fails(schedule, step, *sizes):  # type: ignore[no-untyped-def]
        if step == 3:
            raise RuntimeError("power failure")
        return real(schedule, step, *sizes)

    monkeypatch.setattr(loop, "learning_rate_factor", fails)
    with pytest.raises(RuntimeError, match="power failure"):
        train(config, tmp_path / "stopped")
    monkeypatch.undo()
    stopped = resume(tmp_path / "stopped")
    assert same_weights(weights(stopped), weights(whole))
    assert records(stopped) == records(whole)
    constant = train(run_config(images, *short, *CHANGING[1:]), tmp_path / "constant")
    assert records(constant) != records(whole)  # negative control: the schedule matters
