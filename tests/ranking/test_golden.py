"""Loss and gradient, compared with values of the paper's equations that were computed independently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shortlist.ranking import Engine, VirtualBatch, recall_at_k_loss, smooth_ap_loss

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.json"))
LOSSES = ("rs", "rs_query_counted", "smooth_ap")
ENGINES = (Engine(), Engine(prune=True, tile_size=7), Engine(prune=False, tile_size=5))


def measure(
    path: Path, loss: str, dtype: torch.dtype, engine: Engine = ENGINES[0], **changed: float
) -> tuple[Tensor, Tensor]:
    """Loss and gradient, with some of the file's parameters changed on request."""
    case = json.loads(path.read_text()) | changed
    embeddings = torch.tensor(case["embeddings"], dtype=dtype, requires_grad=True)
    labels = torch.tensor(case["labels"])
    virtual = None
    if "pairs" in case:
        virtual = VirtualBatch(torch.tensor(case["pairs"]), torch.tensor(case["alphas"], dtype=torch.float64))
    if loss == "smooth_ap":
        value = smooth_ap_loss(embeddings, labels, case["tau2"], virtual=virtual, engine=engine)
    else:
        counted = loss == "rs_query_counted"
        value = recall_at_k_loss(
            embeddings, labels, case["k"], case["tau1"], case["tau2"], virtual, count_query=counted, engine=engine
        )
    value.backward()
    assert embeddings.grad is not None
    return value.detach(), embeddings.grad


def expected(path: Path, loss: str) -> tuple[Tensor, Tensor]:
    case = json.loads(path.read_text())[loss]
    return torch.tensor(case["loss"], dtype=torch.float64), torch.tensor(case["grad"], dtype=torch.float64)


def test_no_file_is_missing() -> None:
    assert len(GOLDEN) == 8


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_float64_to_nine_digits(path: Path, loss: str, engine: Engine) -> None:
    for got, want in zip(measure(path, loss, torch.float64, engine), expected(path, loss), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_float32_to_its_rounding_error(path: Path, loss: str) -> None:
    """A float32 similarity of about 1 is off by up to 1e-7, 1e-5 temperatures: a gradient of about 0.1 by 1e-6."""
    value, gradient = measure(path, loss, torch.float32)
    want, want_gradient = expected(path, loss)
    torch.testing.assert_close(value.double(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=5e-6)


@pytest.mark.parametrize("path", [path for path in GOLDEN if path.stem != "perfect"], ids=lambda path: path.stem)
def test_other_settings_give_other_values(path: Path) -> None:
    """Negative control of the tests above."""
    want = expected(path, "rs")[0]
    assert (measure(path, "rs", torch.float64, tau1=0.9)[0] - want).abs() > 1e-4
    assert (measure(path, "rs", torch.float64, tau2=0.02)[0] - want).abs() > 1e-5
    assert (measure(path, "rs_query_counted", torch.float64)[0] - want).abs() > 1e-2
