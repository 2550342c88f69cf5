"""The learning rate, compared with schedulers of torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from shortlist.config import ScheduleConfig
from shortlist.training.schedule import learning_rate_factor

EPOCHS, STEPS = 7, 5  # STEPS is the number of steps per epoch


def factors(total: int = EPOCHS * STEPS, **settings: Any) -> list[float]:
    return [learning_rate_factor(ScheduleConfig(**settings), step, STEPS, total) for step in range(total)]


def of_torch(kind: Any, *, every: int, **settings: Any) -> list[float]:
    """Factors of a scheduler of torch that is called after every `every` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, found = kind(optimizer, **settings), []
    for step in range(EPOCHS * STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % every == 0:
            scheduler.step()
    return found


def test_multistep() -> None:
    ours = factors(name="multistep", milestones=(2, 5), gamma=0.3)
    assert ours == pytest.approx(of_torch(lr_scheduler.MultiStepLR, every=STEPS, milestones=[2, 5], gamma=0.3))
    assert ours != pytest.approx(of_torch(lr_scheduler.MultiStepLR, every=STEPS, milestones=[2, 4], gamma=0.3))


def test_exponential() -> None:
    ours = factors(name="exponential", gamma=0.8)
    assert ours == pytest.approx(of_torch(lr_scheduler.ExponentialLR, every=STEPS, gamma=0.8))
    assert ours != pytest.approx(of_torch(lr_scheduler.ExponentialLR, every=1, gamma=0.8))


def test_cosine() -> None:
    ours = factors(name="cosine")
    assert ours == pytest.approx(of_torch(lr_scheduler.CosineAnnealingLR, every=1, T_max=EPOCHS * STEPS))
    assert ours != pytest.approx(of_torch(lr_scheduler.CosineAnnealingLR, every=1, T_max=EPOCHS * STEPS - 1))


def test_constant() -> None:
    assert factors() == [1.0] * EPOCHS * STEPS


@pytest.mark.parametrize("warmup", [1, 2.0, 0.5, 1.3])
def test_warm_up_rises_evenly_and_never_jumps(warmup: float) -> None:
    plain, warm = factors(), factors(warmup=warmup)
    rising = math.ceil(warmup * STEPS)
    assert warm[0] == pytest.approx(min(1, 1 / (warmup * STEPS)))
    assert warm[rising:] == plain[rising:]
    assert warm[rising - 1 :][0] == pytest.approx(1)
    differences = [after - before for before, after in itertools.pairwise(warm[: rising - 1])]
    assert differences == pytest.approx([1 / (warmup * STEPS)] * len(differences))


def test_warm_up_with_multistep() -> None:
    warm = factors(name="multistep", milestones=(1,), gamma=0.5, warmup=2)
    assert warm == pytest.approx([min(1, (step + 1) / 10) * (0.5 if step >= 5 else 1) for step in range(35)])


def test_cosine_begins_after_the_warm_up_and_ends_near_0() -> None:
    warm = factors(name="cosine", warmup=2)
    assert warm[9] == pytest.approx(1)
    tail = [(1 + math.cos(math.pi * step / 25)) / 2 for step in range(25)]
    assert warm[10:] == pytest.approx(tail)
    assert 0 < warm[-1] < 0.01


@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_no_rate_is_negative_or_above_1(warmup: float) -> None:
    """The warm-up may also be as long as the run, or longer."""
    for name in ("constant", "cosine", "exponential"):
        assert all(0 < factor <= 1 for factor in factors(name=name, warmup=warmup))


def test_a_run_of_one_step() -> None:
    assert factors(total=1, name="cosine") == [1.0]
