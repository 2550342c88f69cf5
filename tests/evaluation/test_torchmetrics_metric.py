"""The torchmetrics metric equals `retrieval_metrics`, in one process and in several.

Tests import torchmetrics where they need it, since it would slow down the start of every test process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shortlist import retrieval_metrics


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.randint(4, (6,), generator=generator)) for _ in range(5)]


def expected() -> dict[str, float]:
    vectors, labels = (torch.cat(each) for each in zip(*batches(), strict=True))
    return retrieval_metrics(vectors, labels, k=(1, 3))


def test_batches_together_are_one_evaluation() -> None:
    from shortlist.evaluation.torchmetrics_metric import RetrievalMetrics

    metric = RetrievalMetrics(k=(1, 3))
    for vectors, labels in batches():
        metric.update(vectors.requires_grad_(), labels)
    found = metric.compute()
    assert {name: value.item() for name, value in found.items()} == expected()
    assert 0 < found["r@1"] < 1


def test_reset_forgets_everything() -> None:
    from shortlist.evaluation.torchmetrics_metric import RetrievalMetrics

    metric = RetrievalMetrics(k=1)
    metric.update(torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 1, 0]))
    assert metric.compute()["r@1"] == 0
    metric.reset()
    metric.update(torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 0, 1]))
    assert metric.compute()["r@1"] == 1


def test_a_batch_with_too_few_labels_is_refused() -> None:
    from shortlist.evaluation.torchmetrics_metric import RetrievalMetrics

    with pytest.raises(ValueError, match="3 embeddings but 2 labels"):
        RetrievalMetrics().update(torch.eye(3), torch.tensor([0, 1]))


def _measure(rank: int, folder: Path) -> None:
    from shortlist.evaluation.torchmetrics_metric import RetrievalMetrics

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    metric = RetrievalMetrics(k=(1, 3))
    for vectors, labels in batches()[rank::2]:  # three batches, and two
        metric.update(vectors, labels)
    torch.save(metric.compute(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_several_processes_give_the_result_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(_measure, (tmp_path,), nprocs=2, start_method="fork")
    for rank in range(2):
        found = {name: value.item() for name, value in torch.load(tmp_path / f"{rank}.pt").items()}
        assert found == pytest.approx(expected(), abs=1e-6)
