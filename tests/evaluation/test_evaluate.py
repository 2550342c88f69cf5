"""Evaluations, compared with literal metrics and with known confidence intervals."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shortlist.data import Catalog, TestTransform
from shortlist.encoding import embed_images
from shortlist.errors import DataError
from shortlist.evaluation import evaluate
from shortlist.ranking.metrics import retrieval_metrics
from tests import reference_metrics as reference
from tests.data.pictures import picture, pixels, write


def catalog(labels: list[int], roles: list[str] | None = None, root: Path = Path()) -> Catalog:
    return Catalog(
        name="points",
        root=root,
        paths=np.array([f"{index}.png" for index in range(len(labels))], dtype=object),
        labels=np.array(labels),
        class_names=tuple(f"class {label}" for label in range(max(labels) + 1)),
        splits=np.array(["test"] * len(labels)),
        roles=None if roles is None else np.array(roles),
    )


def with_several_labels(which: Catalog, further: dict[int, tuple[int, ...]]) -> Catalog:
    """Give images further labels, by row."""
    label_sets = np.empty(len(which), dtype=object)
    label_sets[:] = [(label, *further.get(row, ())) for row, label in enumerate(which.labels.tolist())]
    return replace(which, label_sets=label_sets)


def points(number: int, seed: int = 0) -> Tensor:
    return nn.functional.normalize(torch.randn(number, 5, generator=torch.Generator().manual_seed(seed)))


def expected(rankings: list[list[reference.Item]], k: tuple[int, ...]) -> dict[str, float]:
    """Return the means over the queries that have a positive, directly from the definitions."""
    rankings = [ranking for ranking in rankings if reference.positives(ranking)]

    def mean(metric: object, *args: int) -> float:
        return sum(metric(ranking, *args) for ranking in rankings) / len(rankings)  # type: ignore[operator]

    return {
        **{f"r@{cut}": mean(reference.r_at_k, cut) for cut in k},
        **{f"recall@{cut}": mean(reference.recall_at_k, cut) for cut in k},
        "mAP": mean(reference.average_precision),
        "mAP@R": mean(reference.map_at_r),
        "R-precision": mean(reference.r_precision),
    }


class TestProtocols:
    def test_leave_one_out(self) -> None:
        labels = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
        vectors, k = points(len(labels)), (1, 2, 5)
        found = evaluate(vectors, catalog(labels), k=k, bootstrap=0)
        similarities = (vectors @ vectors.T).tolist()
        rankings = [
            [
                reference.Item(similarities[query][other], labels[query] == labels[other])
                for other in range(len(labels))
                if other != query
            ]
            for query in range(len(labels))
        ]
        values = {name: estimate.value for name, estimate in found.metrics.items()}
        assert values == pytest.approx(expected(rankings, k))
        assert list(values) == [*(f"r@{c}" for c in k), *(f"recall@{c}" for c in k), "mAP", "mAP@R", "R-precision"]
        assert (found.protocol, found.queries, found.gallery, found.left_out) == ("leave-one-out", 10, 9, 1)
        assert (found.data, found.split) == ("points", "test")

    def test_queries_against_a_gallery(self) -> None:
        labels = [0, 1, 2, 0, 1, 1, 3, 2, 0, 5]
        roles = ["query", "query", "query", "gallery", "gallery", "gallery", "gallery", "", "gallery", "query"]
        vectors = points(len(labels))
        found = evaluate(vectors, catalog(labels, roles), k=(1, 2), bootstrap=0)
        similarities = (vectors @ vectors.T).tolist()
        queries, gallery = ([i for i, role in enumerate(roles) if role == name] for name in ("query", "gallery"))
        rankings = [
            [reference.Item(similarities[query][other], labels[query] == labels[other]) for other in gallery]
            for query in queries
        ]
        values = {name: estimate.value for name, estimate in found.metrics.items()}
        assert values == pytest.approx(expected(rankings, (1, 2)))
        assert (found.protocol, found.queries, found.gallery, found.left_out) == ("query/gallery", 4, 5, 2)
        without = evaluate(vectors, catalog(labels), k=(1, 2), bootstrap=0)
        assert without.metrics != found.metrics

    def test_empty_roles_mean_leave_one_out(self) -> None:
        """The training images of a benchmark whose test images have roles."""
        labels, vectors = [0, 0, 1, 1, 1], points(5)
        found = evaluate(vectors, catalog(labels, [""] * 5), bootstrap=0)
        assert found == evaluate(vectors, catalog(labels), bootstrap=0)
        assert found.protocol == "leave-one-out"

    def test_arrays_are_accepted(self) -> None:
        labels, vectors = [0, 0, 1, 1, 1], points(5)
        assert evaluate(vectors.numpy(), catalog(labels)) == evaluate(vectors, catalog(labels))

    def test_equals_retrieval_metrics(self) -> None:
        labels, vectors = [index // 4 for index in range(80)], points(80, seed=3)
        found = evaluate(vectors, catalog(labels))
        values = {name: estimate.value for name, estimate in found.metrics.items()}
        assert values == pytest.approx(retrieval_metrics(vectors, torch.tensor(labels)))

    def test_no_query_has_a_positive(self) -> None:
        with pytest.raises(DataError, match="points: no query has another image of its class"):
            evaluate(points(3), catalog([0, 1, 2]))
        for roles in (["query", "query", "query"], ["gallery", "gallery", "gallery"], ["query", "", ""]):
            with pytest.raises(DataError, match="points: no query has another image of its class"):
                evaluate(points(3), catalog([0, 0, 0], roles))

    def test_to_dict(self) -> None:
        found = evaluate(points(8), catalog([0, 0, 1, 1, 2, 2, 3, 3]), k=(1,), bootstrap=10).to_dict()
        assert found["protocol"] == "leave-one-out"
        assert found["metrics"]["r@1"].keys() == {"value", "low", "high"}


def coins(heads: int, tails: int) -> tuple[Tensor, Catalog]:
    """Return query/gallery data with r@1 = heads / (heads + tails)."""
    number = heads + tails
    vectors = torch.tensor([[1.0, 0.0]] * heads + [[0.0, 1.0]] * tails + [[1.0, 0.0], [0.0, 1.0]])
    labels = [0] * number + [0, 1]
    return vectors, catalog(labels, ["query"] * number + ["gallery"] * 2)


class TestIntervals:
    @pytest.mark.parametrize(("heads", "tails"), [(120, 280), (350, 50)])
    def test_of_a_proportion(self, heads: int, tails: int) -> None:
        """The interval of a proportion is known. Intervals of 90 % and 99 % are distinguished from it."""
        estimate = evaluate(*coins(heads, tails), k=(1,), bootstrap=4000).metrics["r@1"]
        share, number = heads / (heads + tails), heads + tails
        assert estimate.value == pytest.approx(share)
        error = math.sqrt(share * (1 - share) / number)
        half = NormalDist().inv_cdf(0.975) * error
        assert estimate.low == pytest.approx(share - half, abs=0.1 * half)
        assert estimate.high == pytest.approx(share + half, abs=0.1 * half)
        for level in (0.95, 0.995):
            assert estimate.low != pytest.approx(share - NormalDist().inv_cdf(level) * error, abs=0.1 * half)

    def test_constant_values(self) -> None:
        estimate = evaluate(*coins(30, 0), k=(1,), bootstrap=50).metrics["r@1"]
        assert (estimate.low, estimate.value, estimate.high) == (1, 1, 1)

    def test_more_queries_narrow_the_interval(self) -> None:
        few, many = (evaluate(*coins(n, n), k=(1,), bootstrap=500).metrics["r@1"] for n in (20, 500))
        assert many.high - many.low < (few.high - few.low) / 3

    def test_the_same_for_the_same_seed(self) -> None:
        labels, vectors = [index // 3 for index in range(90)], points(90)
        one, again, other = (evaluate(vectors, catalog(labels), bootstrap=100, seed=seed) for seed in (0, 0, 1))
        assert one == again
        assert one != other
        assert {name: each.value for name, each in one.metrics.items()} == {
            name: each.value for name, each in other.metrics.items()
        }

    def test_block_size_does_not_change_the_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        labels, vectors = [index // 3 for index in range(30)], points(30)
        whole = evaluate(vectors, catalog(labels), bootstrap=100)
        monkeypatch.setattr(sys.modules["shortlist.evaluation.intervals"], "_DRAWS_PER_BLOCK", 70)
        assert evaluate(vectors, catalog(labels), bootstrap=100) == whole

    def test_intervals_contain_the_mean(self) -> None:
        for estimate in evaluate(
            points(60), catalog([index // 3 for index in range(60)]), bootstrap=200
        ).metrics.values():
            assert estimate.low <= estimate.value <= estimate.high
            assert estimate.low < estimate.high

    def test_no_bootstrap(self) -> None:
        estimate = evaluate(points(6), catalog([0, 0, 1, 1, 2, 2]), bootstrap=0).metrics["r@1"]
        assert (estimate.low, estimate.high) == (None, None)
        assert "[" not in str(estimate)

    def test_str(self) -> None:
        estimate = evaluate(*coins(1, 3), k=(1,), bootstrap=10).metrics["r@1"]
        assert str(estimate).startswith("25.0 [")


class Mean(nn.Module):
    """Returns the mean colour of an image, and fails in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        assert images.dtype == torch.uint8
        return images.float().mean((2, 3)) * self.scale


class TestEmbedImages:
    @pytest.fixture
    def images(self, tmp_path: Path) -> Catalog:
        for index in range(11):
            write(tmp_path / f"{index}.png", picture(20, 20, seed=index))
        return catalog([0] * 11, root=tmp_path)

    def test_in_the_order_of_the_catalog(self, images: Catalog) -> None:
        calls: list[tuple[int, int]] = []
        progress = lambda done, of: calls.append((done, of))  # noqa: E731
        vectors = embed_images(Mean(), images, TestTransform(20, 20), batch_size=4, progress=progress)
        means = [pixels(picture(20, 20, seed=index)).mean((0, 1)) for index in range(11)]
        assert torch.allclose(vectors, torch.tensor(np.array(means)).float(), atol=0.01)
        assert len({tuple(vector) for vector in vectors.tolist()}) == 11
        assert calls == [(4, 11), (8, 11), (11, 11)]
        backwards = images.subset(list(range(10, -1, -1)))
        assert torch.allclose(embed_images(Mean(), backwards, TestTransform(20, 20)), vectors.flip(0))

    @pytest.mark.parametrize("training", [True, False])
    def test_the_training_mode_is_restored(self, training: bool, images: Catalog) -> None:
        embedder = Mean().train(training)
        embed_images(embedder, images, TestTransform(8, 8))
        assert embedder.training is training
        (images.root / "3.png").write_text("broken")
        with pytest.raises(DataError, match=r"3\.png"):
            embed_images(embedder, images, TestTransform(8, 8))
        assert embedder.training is training

    def test_autograd_can_use_the_embeddings(self, images: Catalog) -> None:
        vectors = embed_images(Mean(), images, TestTransform(8, 8))
        assert not vectors.requires_grad
        assert not vectors.is_inference()
        weight = torch.ones(3, requires_grad=True)
        (vectors @ weight).sum().backward()
        assert torch.allclose(weight.grad, vectors.sum(0))
