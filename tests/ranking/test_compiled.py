"""Losses with torch.compile: fused step functions inside the engine, and whole losses that a user compiles.

All of it is in this file, so that one process of pytest starts the compiler, which takes longer than the tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shortlist.ranking import Engine, LinearTail, RecallAtKLoss, SmoothAPLoss, counting, recall_at_k_loss
from tests.ranking.losses import assert_same, clusters, unit, value_and_gradient
from tests.ranking.test_batch_warnings import LABELS, NORMS, new_process
from tests.ranking.test_engine import STAGES

__all__ = ["new_process"]  # a fixture

pytestmark = pytest.mark.long


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> counting._Compiled:
    torch._dynamo.reset()
    compiled = counting._Compiled()
    monkeypatch.setattr("shortlist.ranking.tiles.compiled_steps", compiled)
    return compiled


def test_compiled_equals_eager(fresh_compiler: counting._Compiled) -> None:
    """Computed in float32, and with a tail in float64. Both losses call the same compiled function."""
    tail = LinearTail(slope=30.0, start=0.1)
    exact = clusters(30, 4, 0.9)
    cases: list[tuple[RecallAtKLoss | SmoothAPLoss, Tensor, float]] = [
        *((RecallAtKLoss(), clusters(75, 4, spread, dtype=torch.float32), 1e-6) for spread in STAGES.values()),
        (RecallAtKLoss(rank_temperature=30.0, tail=tail), exact, 1e-12),
        (SmoothAPLoss(tail=tail), exact, 1e-12),
    ]
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        for loss, embeddings, tolerance in cases:
            labels, found = torch.arange(len(embeddings)) // 4, []
            for fused in (True, False):
                loss.engine = Engine(prune=False, compile=fused)
                found.append(value_and_gradient(loss, embeddings, labels))
            assert_same(found[0], found[1], tolerance)
    assert fresh_compiler._steps is not counting.soft_steps  # the controls: it did compile
    assert graphs["unique_graphs"] == 2  # with and without the tail


def test_without_a_compiler_there_is_one_warning(
    fresh_compiler: counting._Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Callable[..., None]:
        def call(*_: object) -> None:
            raise RuntimeError("no C++ compiler\nand a long story")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    embeddings, labels = unit(16, 4), torch.arange(16) // 4
    want = value_and_gradient(recall_at_k_loss, embeddings, labels, engine=Engine(compile=False))
    engine = Engine(compile=True, prune=False)
    with pytest.warns(UserWarning, match=r"continuing without it: no C\+\+ compiler$"):
        assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, engine=engine), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, engine=engine), want)


@pytest.mark.parametrize("worked", [False, True])
def test_other_errors_of_compiled_steps_are_raised(
    fresh_compiler: counting._Compiled, worked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an out-of-memory error nor an error after a successful call means that there is no compiler."""
    failing: list[Exception] = []

    def steps(*given: Any) -> tuple[Tensor, Tensor]:
        if failing:
            raise failing[0]
        return counting.soft_steps(*given)

    monkeypatch.setattr(torch, "compile", lambda *_, **__: steps)
    loss = partial(recall_at_k_loss, unit(16, 4), torch.arange(16) // 4, engine=Engine(compile=True, prune=False))
    if worked:
        loss()
    failing.append(RuntimeError("of another kind") if worked else torch.OutOfMemoryError("no room"))
    with pytest.raises(RuntimeError, match="of another kind" if worked else "no room"):
        loss()
    failing.clear()
    assert loss() > 0


def test_no_warning_in_a_compiled_loss() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        warnings.filterwarnings("error", f".*{NORMS}")
        found = torch.compile(RecallAtKLoss(), backend="eager")(2 * unit(12, 5), LABELS)
    with pytest.warns(UserWarning, match=NORMS):
        torch.testing.assert_close(found, RecallAtKLoss()(2 * unit(12, 5), LABELS))
