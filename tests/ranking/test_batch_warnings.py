"""Batches that the losses accept but learn little from: one warning per process, which points to the user's line."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shortlist.ranking import (
    BinnedAPLoss,
    BlackboxAPLoss,
    RecallAtKLoss,
    SiMix,
    SmoothAPLoss,
    batch_warnings,
    recall_at_k_loss,
    smooth_ap_loss,
)
from shortlist.training import train_run as train
from tests.ranking.losses import unit
from tests.training.runs import class_folders, config

LABELS = torch.arange(12) // 3
LOSSES: dict[str, Callable[..., Tensor]] = {
    "recall": recall_at_k_loss,
    "smooth AP": smooth_ap_loss,
    "recall module": RecallAtKLoss(),
    "recall and SiMix": RecallAtKLoss(simix=SiMix()),
    "smooth AP module": SmoothAPLoss(),
    "binned AP": BinnedAPLoss(),
    "blackbox AP": BlackboxAPLoss(),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
NORMS, POSITIVES = "The embeddings are not L2-normalised: row", "No item of the batch has a positive"


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget earlier calls and warnings, and turn unexpected warnings into errors."""
    monkeypatch.setattr(batch_warnings, "_calls", itertools.count())
    monkeypatch.setattr(batch_warnings, "_shown", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@each_loss
def test_vectors_that_are_not_normalised(loss: Callable[..., Tensor]) -> None:
    vectors = unit(12, 5)
    vectors[2] *= 1.02
    with pytest.warns(UserWarning, match=rf"{NORMS} 2 has the norm 1.02\. ") as shown:
        loss(vectors, LABELS)
    assert [each.filename for each in shown] == [__file__]
    loss(3 * vectors, LABELS)  # once


@each_loss
def test_a_batch_without_positives(loss: Callable[..., Tensor]) -> None:
    with pytest.warns(UserWarning, match=POSITIVES) as shown:
        assert loss(unit(12, 5), torch.arange(12)) == 0
    assert [each.filename for each in shown] == [__file__]
    loss(unit(12, 5), torch.arange(12))  # once


def test_each_kind_of_warning_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(3):
            recall_at_k_loss(torch.ones(4, 3), torch.arange(4))
    first, second = (str(each.message) for each in shown)
    assert NORMS in first
    assert POSITIVES in second


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@each_loss
def test_no_warning_for_valid_batches(loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
    vectors = unit(12, 500).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss(vectors, LABELS).backward()


def test_a_warning_that_is_an_error_is_raised_once() -> None:
    with pytest.raises(UserWarning, match=NORMS):
        recall_at_k_loss(torch.ones(12, 3), LABELS)
    recall_at_k_loss(torch.ones(12, 3), LABELS)


def test_only_the_first_calls_compute_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, read = unit(12, 5), []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda rows, **options: read.append(len(rows)) or norm(rows, **options)
    )
    for _ in range(10):
        recall_at_k_loss(vectors, LABELS)
    assert read == [8, 8, 8, 8]  # rows
    recall_at_k_loss(torch.ones(12, 3), LABELS)  # too late


def test_positives_in_a_database() -> None:
    loss = partial(RecallAtKLoss(), unit(2, 5), torch.tensor([0, 1]), ref_emb=unit(3, 5))
    loss(ref_labels=torch.tensor([2, 1, 2]))
    with pytest.warns(UserWarning, match=POSITIVES):
        loss(ref_labels=torch.tensor([2, 2, 2]))


def test_no_warning_if_a_miner_finds_nothing() -> None:
    assert RecallAtKLoss()(unit(12, 5), LABELS, (torch.empty(0, dtype=torch.long),) * 4) == 0


def test_an_empty_batch_is_a_batch_without_positives() -> None:
    with pytest.warns(UserWarning, match=POSITIVES):
        recall_at_k_loss(torch.empty(0, 5), torch.empty(0, dtype=torch.long))


def test_no_warning_in_training(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for message in (NORMS, POSITIVES):
            warnings.filterwarnings("error", f".*{message}")
        short = ("training.steps=2", "training.epochs=null", "data.validation=none")
        train(config(class_folders(tmp_path / "images"), *short), tmp_path / "run")
    assert next(batch_warnings._calls) == 2  # the control: they were counted
