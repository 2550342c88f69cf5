"""The exact metrics, compared with their definitions, pytorch-metric-learning and scikit-learn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from shortlist.ranking import QueryScores, query_scores, ranker, retrieval_metrics
from shortlist.ranking.ranker import rounding
from tests import reference_metrics as reference
from tests.ranking.losses import LargestTensor


def some_items(number: int, classes: int, seed: int = 0, dimensions: int = 8) -> tuple[Tensor, Tensor]:
    """Unit vectors near the centres of their classes, and labels of classes of different sizes."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dimensions, generator=random)
    labels = torch.randint(classes, (number,), generator=random)
    return normalize(centres[labels] + torch.randn(number, dimensions, generator=random)), labels


def assert_same(found: QueryScores, expected: QueryScores) -> None:
    for name, one, other in zip(QueryScores._fields, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda message, name=name: f"{name}: {message}")


# Against the definitions


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Tensor | None]:
    """Small integers: exact similarities with many ties and duplicates, classes of different sizes, and singletons."""
    width = draw(st.integers(1, 3))

    def items(most: int) -> tuple[Tensor, Tensor]:
        number = draw(st.integers(0, most))
        vectors = draw(
            st.lists(st.lists(st.integers(-2, 2), min_size=width, max_size=width), min_size=number, max_size=number)
        )
        labels = draw(st.lists(st.integers(0, 4), min_size=number, max_size=number))
        return torch.tensor(vectors, dtype=torch.float32).view(number, width), torch.tensor(labels, dtype=torch.long)

    embeddings, labels = items(14)
    gallery, gallery_labels = items(14) if draw(st.booleans()) else (None, None)
    return {"embeddings": embeddings, "labels": labels, "gallery": gallery, "gallery_labels": gallery_labels}


@settings(max_examples=60, deadline=None)
@given(searches(), st.lists(st.integers(1, 16), min_size=1, max_size=4), st.none() | st.integers(1, 16))
def test_every_score_is_its_definition(search, k, tile_size):
    databases = reference.rankings(*(None if each is None else each.tolist() for each in search.values()))
    found = query_scores(**search, k=k, tile_size=tile_size)
    assert found.queries.tolist() == list(databases)
    for row, database in enumerate(databases.values()):
        assert found.r_at_k[row].tolist() == [reference.r_at_k(database, cut) for cut in k]
        assert found.recall_at_k[row].tolist() == pytest.approx([reference.recall_at_k(database, cut) for cut in k])
        assert found.average_precision[row].item() == pytest.approx(reference.average_precision(database))
        assert found.map_at_r[row].item() == pytest.approx(reference.map_at_r(database))
        assert found.r_precision[row].item() == pytest.approx(reference.r_precision(database))


def test_an_example_by_hand():
    """Similarities 9, 7, 7, 5, 3 with the positives at 9, 7 and 3: their ranks are 1, 3 and 5."""
    gallery = torch.tensor([[7.0], [9.0], [3.0], [5.0], [7.0]])
    labels = torch.tensor([1, 1, 1, 0, 0])
    found = retrieval_metrics(torch.ones(1, 1), torch.tensor([1]), (1, 2, 3), gallery, labels)
    expected = {"r@1": 1, "r@2": 1, "r@3": 1, "recall@1": 1 / 3, "recall@2": 1 / 3, "recall@3": 2 / 3}
    expected |= {"mAP": (1 / 1 + 2 / 3 + 3 / 5) / 3, "mAP@R": (1 / 1 + 2 / 3) / 3, "R-precision": 2 / 3}
    assert found == pytest.approx(expected)


# Against the libraries


def by_pytorch_metric_learning(*search: Tensor | None) -> dict[str, float]:
    """Its metrics under our names, with its own nearest neighbours, which need no faiss.

    It casts to float32; we search in float64, so that no two similarities tie. Its precision at 1 is r@1; its other
    definitions are ours as well, including that queries without a positive are left out.
    """
    from pytorch_metric_learning.distances import DotProductSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    names = {
        "r@1": "precision_at_1",
        "mAP": "mean_average_precision",
        "mAP@R": "mean_average_precision_at_r",
        "R-precision": "r_precision",
    }
    nearest = CustomKNN(DotProductSimilarity(normalize_embeddings=False))

    def in_double(queries, k, references, own):
        return nearest(queries.double(), k, references.double(), own)

    calculator = AccuracyCalculator(include=tuple(names.values()), device=torch.device("cpu"), knn_func=in_double)
    found = calculator.get_accuracy(*search)
    return {ours: found[theirs] for ours, theirs in names.items()}


@pytest.mark.parametrize("own", [True, False], ids=["own set", "gallery"])
@pytest.mark.parametrize(("number", "classes"), [(40, 3), (100, 30), (150, 120)])
def test_pytorch_metric_learning_agrees(number, classes, own):
    search = some_items(number, classes) + ((None, None) if own else some_items(80, classes, seed=1))
    embeddings, labels, gallery, gallery_labels = search
    found = retrieval_metrics(
        embeddings.double(), labels, 1, None if gallery is None else gallery.double(), gallery_labels
    )
    expected = by_pytorch_metric_learning(*search)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < expected["mAP@R"] < expected["mAP"] < 1  # neither all wrong nor perfect


@pytest.mark.parametrize("own", [True, False], ids=["own set", "gallery"])
@pytest.mark.parametrize("ties", [True, False], ids=["ties", "no ties"])
def test_scikit_learn_agrees_on_average_precision(ties, own):
    from sklearn.metrics import average_precision_score

    embeddings, labels = some_items(60, 9)
    embeddings = (embeddings * 2).round() if ties else embeddings.double()
    gallery, gallery_labels = (None, None) if own else (embeddings[20:], labels[20:])
    found = query_scores(embeddings, labels, 1, gallery, gallery_labels)
    similarities = embeddings @ (embeddings if own else gallery).T
    relevant = labels[:, None] == (labels if own else gallery_labels)
    tied = 0
    for query, value in zip(found.queries.tolist(), found.average_precision.tolist(), strict=True):
        database = torch.arange(similarities.shape[1]) != (query if own else -1)
        scores = similarities[query, database]
        tied += len(scores) - len(scores.unique())
        assert value == pytest.approx(average_precision_score(relevant[query, database], scores))
    assert len(found.queries) > 50
    assert (tied > 0) == ties


# Ties


POINTS = {  # where all terms of a product are equal, their rounding errors add up
    "random": lambda dimensions: normalize(torch.randn(1, dimensions, generator=torch.Generator().manual_seed(0))),
    "even": lambda dimensions: normalize(torch.ones(1, dimensions)),
    "even, not of length 1": lambda dimensions: torch.full((1, dimensions), 0.7),
}


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS.keys())
@pytest.mark.parametrize("dimensions", [37, 128, 768, 2048])
def test_collapsed_embeddings_score_badly(dimensions, point):
    """Matrix products round copies of a vector differently, and more for longer vectors. They still count as ties.

    The rounding depends on the shapes of the products, and so on the number of copies and on the tile size.
    """
    for number, positives, tile_size in ((6, 1, 1), (6, 1, 2), (34, 1, 1), (34, 1, None), (100, 3, 7), (100, 3, None)):
        negatives = number - 1 - positives
        copies, labels = point(dimensions).repeat(number, 1), torch.arange(number) // (positives + 1)
        found = query_scores(copies, labels, (1, negatives, negatives + 1), tile_size=tile_size)
        where = f"{number} copies, tiles of {tile_size}"
        assert found.r_at_k.mean(0).tolist() == [0, 0, 1], where
        assert found.recall_at_k[:, :2].sum() == 0, where
        assert found.average_precision.tolist() == pytest.approx([positives / (number - 1)] * number), where
        assert found.map_at_r.sum() == found.r_precision.sum() == 0, where


@pytest.mark.parametrize("dimensions", [1, 2048])
@pytest.mark.parametrize("ahead", ["positive", "negative"])
def test_similarities_that_clearly_differ_are_not_ties(ahead, dimensions):
    gallery = torch.zeros(2, dimensions)
    gallery[:, 0] = torch.tensor([1, 1 - 1e-4])
    labels = torch.tensor([1, 0] if ahead == "positive" else [0, 1])
    found = retrieval_metrics(gallery[:1], torch.tensor([1]), 1, gallery, labels)
    assert found["r@1"] == (1 if ahead == "positive" else 0)


def test_one_long_vector_does_not_turn_the_others_into_ties():
    gallery = torch.tensor([[1.0, 0.0], [0.9, 0.0], [-1e7, 0.0]])  # the long one is as far away as can be
    assert retrieval_metrics(torch.eye(2)[:1], torch.tensor([1]), 1, gallery, torch.tensor([1, 0, 0]))["r@1"] == 1
    queries = torch.tensor([[1.0, 0.0], [1e7, 0.0]])
    assert retrieval_metrics(queries, torch.tensor([1, 1]), 1, gallery, torch.tensor([1, 0, 0]))["r@1"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tolerance_of_ties(dtype):
    assert [rounding(size, dtype) / torch.finfo(dtype).eps for size in (1, 128, 160, 2048)] == [8, 8, 10, 128]


def test_products_that_overflow_are_not_a_perfect_score():
    embeddings, labels = some_items(20, 5)
    with pytest.raises(ValueError, match="overflow"):
        retrieval_metrics(embeddings * 1e30, labels)


TWINS = torch.tensor([[4.0, 3.0], [4.0, 3.0], [3.0, 4.0], [3.0, 4.0]])  # two points, twice each: 25 to a twin, else 24


@pytest.mark.parametrize(("labels", "right"), [([0, 1, 0, 1], 0.0), ([0, 0, 1, 1], 1.0)], ids=["rivals", "positives"])
def test_a_duplicate_of_the_query_is_an_item_like_any_other(labels, right):
    assert retrieval_metrics(TWINS, torch.tensor(labels), 1)["r@1"] == right


def test_dropping_the_first_neighbour_is_not_leaving_out_the_query():
    """Negative control of the test above: the first neighbour may be the twin, and the second the query itself."""
    labels = torch.tensor([0, 1, 0, 1])
    neighbours = (TWINS @ TWINS.T).argsort(dim=1, descending=True, stable=True)[:, 1:]
    assert (labels[neighbours[:, 0]] == labels).float().mean() == 0.5


# Which queries


def test_queries_without_a_positive_are_left_out():
    embeddings, _ = some_items(6, 2)
    labels = torch.tensor([7, 5, 0, 5, 7, 9])
    assert query_scores(embeddings, labels).queries.tolist() == [0, 1, 3, 4]
    assert query_scores(embeddings, labels, 1, embeddings[:2], labels[:2]).queries.tolist() == [0, 1, 3, 4]
    assert query_scores(embeddings, labels, 1, embeddings[2:3], labels[2:3]).queries.tolist() == [2]


@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("gallery", [None, 0, 4])
def test_nothing_to_measure(number, gallery):
    embeddings, labels = torch.randn(number, 3), torch.arange(number)
    search = {"embeddings": embeddings, "labels": labels, "k": (1, 2)}
    if gallery is not None:
        search |= {"gallery": torch.randn(gallery, 3), "gallery_labels": torch.full((gallery,), -1)}
    shapes = [tuple(column.shape) for column in query_scores(**search)]
    assert shapes == [(0,), (0, 2), (0, 2), (0,), (0,), (0,)]
    with pytest.raises(ValueError, match="No query has a positive"):
        retrieval_metrics(**search)


# How it is computed


def test_means_by_name_in_the_order_of_k():
    embeddings, labels = some_items(50, 8)
    scores = query_scores(embeddings, labels, k=(8, 1, 3))
    found = retrieval_metrics(embeddings, labels, k=(8, 1, 3))
    cuts = ["r@8", "r@1", "r@3", "recall@8", "recall@1", "recall@3"]
    assert list(found) == [*cuts, "mAP", "mAP@R", "R-precision"]
    assert list(found.values()) == pytest.approx(
        [mean for column in scores[1:] for mean in column.mean(0).view(-1).tolist()]
    )
    for column, cut in enumerate((8, 1, 3)):
        alone = query_scores(embeddings, labels, k=cut)
        assert torch.equal(alone.r_at_k, scores.r_at_k[:, column : column + 1])
        assert torch.equal(alone.recall_at_k, scores.recall_at_k[:, column : column + 1])
    assert found["r@1"] < found["r@3"] < found["r@8"]
    assert retrieval_metrics(embeddings, labels) == retrieval_metrics(embeddings, labels, k=(1, 2, 4, 8))
    assert_same(query_scores(embeddings, labels), query_scores(embeddings, labels, k=(1, 2, 4, 8)))


def test_progress_is_reported_for_every_tile():
    embeddings, labels = some_items(50, 8)
    labels[49], told = 99, []  # which has no positive
    query_scores(embeddings, labels, tile_size=20, progress=lambda *numbers: told.append(numbers))
    assert told == [(20, 49), (40, 49), (49, 49)]


@pytest.mark.parametrize("tile_size", [1, 2, 7, 49, 50, 1000])
def test_the_tile_size_does_not_change_the_result(tile_size):
    embeddings, labels = some_items(50, 8)
    embeddings = (embeddings * 100).round()  # whole numbers: sums come out the same in any order
    assert_same(query_scores(embeddings, labels, tile_size=tile_size), query_scores(embeddings, labels))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_searched_in_single(dtype):
    embeddings, labels = some_items(300, 20)
    half = embeddings.to(dtype)
    expected = query_scores(half.float(), labels)
    assert_same(query_scores(half, labels), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(query_scores(half.float(), labels), expected)


def test_metrics_make_no_graph():
    embeddings, labels = some_items(20, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda index: index):
        scores = query_scores(embeddings.requires_grad_(), labels)
        assert not kept
        embeddings @ embeddings.T  # a graph, seen by the hook
        assert kept
    assert not any(column.requires_grad for column in scores)


@pytest.mark.parametrize("own", [True, False], ids=["own set", "gallery"])
def test_memory_is_a_tile(own):
    embeddings, labels = some_items(300, 1)[0], torch.arange(300) // 5
    gallery = () if own else (embeddings.clone(), labels)
    with LargestTensor() as tiles:
        query_scores(embeddings, labels, 1, *gallery, tile_size=16)
    assert tiles.elements == 16 * 300
    with LargestTensor() as one_tile:
        query_scores(embeddings, labels, 1, *gallery, tile_size=300)
    assert one_tile.elements == 300 * 300  # the control: a larger tile is detected


def test_the_default_keeps_a_tile_small(monkeypatch):
    monkeypatch.setattr(ranker, "TILE", 1000)
    embeddings, labels = some_items(200, 1, dimensions=2)[0], torch.arange(200) // 5
    with LargestTensor() as tiles:
        query_scores(embeddings, labels, 1)
    assert tiles.elements == 5 * 200
