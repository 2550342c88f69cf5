"""The calibration loss, compared with its formula, and sums of losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import CalibrationLoss, CombinedLoss, RecallAtKLoss, calibration_loss
from tests import reference
from tests.ranking.losses import assert_same, unit, value_and_gradient


@settings(max_examples=15, deadline=None)
@given(
    labels=st.lists(st.integers(-3, 3), min_size=1, max_size=9).map(torch.tensor),
    seed=st.integers(0, 10**6),
    margins=st.sampled_from([(0.9, 0.6), (0.5, -0.2), (1.5, 0.0)]),
    tile_size=st.integers(1, 10),
)
def test_it_is_the_literal_formula(labels: Tensor, seed: int, margins: tuple[float, float], tile_size: int) -> None:
    embeddings = unit(len(labels), 3, seed=seed)
    want = value_and_gradient(reference.calibration_loss, embeddings, labels, *margins)
    assert_same(value_and_gradient(calibration_loss, embeddings, labels, *margins, tile_size=tile_size), want)
    got = value_and_gradient(CalibrationLoss(*margins), embeddings.float(), labels)
    assert_same((got[0].double(), got[1].double()), want, 1e-5)


def test_gradcheck_and_defaults() -> None:
    embeddings, labels = unit(9, 4, seed=5), torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
    assert torch.autograd.gradcheck(lambda x: calibration_loss(x, labels, 0.5, 0.1), embeddings.requires_grad_())
    want = value_and_gradient(calibration_loss, embeddings, labels, 0.9, 0.6)
    for loss in (calibration_loss, CalibrationLoss()):
        assert_same(value_and_gradient(loss, embeddings, labels), want, 0)


def test_separated_classes_have_no_loss() -> None:
    apart = torch.eye(2).repeat_interleave(2, dim=0)
    assert calibration_loss(apart, torch.tensor([0, 0, 1, 1])) == 0
    assert calibration_loss(apart, torch.tensor([0, 1, 0, 1])) > 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, True, "0.9", None])
def test_bad_settings(value: Any) -> None:
    for name in ("positives_above", "negatives_below"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number, got"):
            CalibrationLoss(**{name: value})


class Proxies(torch.nn.Module):
    """Cross-entropy with a learned vector per class."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.nn.Parameter(unit(3, 4, seed=8))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(embeddings @ self.vectors.T, labels)


def test_a_sum_of_losses() -> None:
    proxies, embeddings, labels = Proxies(), unit(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    loss = CombinedLoss(RecallAtKLoss(), (CalibrationLoss(), 2.0), (proxies, 0.5))
    parts = [value_and_gradient(each, embeddings, labels) for each in (RecallAtKLoss(), CalibrationLoss(), proxies)]
    alone = proxies.vectors.grad
    proxies.vectors.grad = None
    want = tuple(one + 2 * other + 0.5 * last for one, other, last in zip(*parts, strict=True))
    assert_same(value_and_gradient(loss, embeddings, labels), want, 1e-12)
    assert alone is not None
    torch.testing.assert_close(proxies.vectors.grad, 0.5 * alone)
    assert [name for name, _ in loss.named_parameters()] == ["added.1.vectors"]
    assert "weights=[2.0, 0.5]" in repr(loss)


def test_bad_weights() -> None:
    for weight in (0, -1.0, torch.inf):
        with pytest.raises(ValueError, match="The weight of an added loss must be a finite number above 0"):
            CombinedLoss(RecallAtKLoss(), (CalibrationLoss(), weight))
