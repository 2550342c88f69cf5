"""The analysis of queries, compared with a literal reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.data import Catalog, Judgement
from shortlist.errors import DataError
from shortlist.evaluation import evaluate
from shortlist.ranking import ranker
from shortlist.report.analysis import NUM_BINS, analyse
from tests.evaluation.test_evaluate import catalog, points, with_several_labels
from tests.ranking.losses import LargestTensor
from tests.reference_search import ranking


def judged() -> Catalog:
    """Nine gallery images and three queries, the second of which has no positive."""
    rows = np.array

    def judgement(positives: list[int], junk: list[int]) -> Judgement:
        return Judgement(rows(positives, dtype=np.int64), rows(junk, dtype=np.int64))

    return Catalog(
        name="judged",
        root=Path(),
        paths=np.array([f"{row}.png" for row in range(12)], dtype=object),
        labels=np.zeros(12, dtype=np.int64),
        class_names=("unlabelled",),
        splits=np.array(["test"] * 12),
        roles=np.array(["gallery"] * 9 + ["query"] * 3),
        judgements={
            "easy": (judgement([0, 1], [2, 3]), judgement([], [5]), judgement([8], [])),
            "hard": (judgement([2], [0, 1, 3]), judgement([], [5]), judgement([4, 7], [8])),
        },
    )


ROLES = ["query", "gallery", "gallery", "query", "gallery", "gallery", "gallery", "query", "gallery", "gallery"]
CATALOGS = {
    "leave-one-out": catalog([0, 0, 1, 1, 1, 2, 3, 3, 0, 1]),  # class 2 has one image
    "query/gallery": catalog([0, 0, 1, 1, 1, 2, 3, 4, 0, 1], ROLES),
    "judged": judged(),
    "several labels": with_several_labels(catalog([0, 0, 1, 1, 1, 2, 3, 3, 0, 1]), {0: (2, 3), 4: (0,), 9: (2,)}),
    "several labels, query/gallery": with_several_labels(
        catalog([0, 0, 1, 1, 1, 2, 3, 4, 0, 1], ROLES), {0: (2,), 7: (3, 1), 9: (2,)}
    ),
}


def check(vectors: Tensor, which: Catalog) -> None:
    """Compare every field of an analysis with the reference."""
    found = analyse(vectors, which)
    right, wrong = [], []
    for number, query in enumerate(found.queries.tolist()):
        expected = ranking(vectors, which, query)
        shown = [row for row in found.results[number].tolist() if row >= 0]
        assert len(shown) == min(10, len(expected))
        assert found.correct[number, : len(shown)].tolist() == [each[1] for each in expected[:10]]
        np.testing.assert_allclose(
            found.similarities[number, : len(shown)], [each[0] for each in expected[:10]], atol=1e-5
        )
        places = [place for place, each in enumerate(expected, 1) if each[1]]
        assert found.num_positives[number] == len(places)
        assert found.first_rank[number] == (places[0] if places else 0)
        best = {kind: [each[0] for each in expected if each[1] is kind][:1] for kind in (True, False)}
        margin = best[True][0] - best[False][0] if best[True] and best[False] else 0
        assert found.margin[number] == pytest.approx(margin, abs=1e-5)
        right += [each[0] for each in expected if each[1]]
        wrong += [each[0] for each in expected if not each[1]]
    assert (found.positive_pairs.sum(), found.negative_pairs.sum()) == (len(right), len(wrong))
    middles = np.linspace(-1, 1, NUM_BINS + 1)[:-1] + 1 / NUM_BINS
    assert found.positive_pairs @ middles == pytest.approx(sum(right), abs=len(right) / NUM_BINS)
    assert found.negative_pairs @ middles == pytest.approx(sum(wrong), abs=len(wrong) / NUM_BINS)


@pytest.mark.parametrize("which", CATALOGS.values(), ids=CATALOGS)
class TestAgainstTheReference:
    @pytest.mark.parametrize("seed", range(3))
    def test_each_query(self, which: Catalog, seed: int) -> None:
        check(points(len(which), seed), which)

    def test_tiles_of_any_size_give_the_same(self, which: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        vectors = points(len(which))
        whole = analyse(vectors, which)
        for tile in (1, 2 * len(which)):
            monkeypatch.setattr(ranker, "TILE", tile)
            for name, values in vars(analyse(vectors, which)).items():
                np.testing.assert_allclose(values, vars(whole)[name], atol=1e-6, err_msg=name)

    def test_progress_ends_with_all_queries(self, which: Catalog) -> None:
        seen: list[tuple[int, int]] = []
        found = analyse(points(len(which)), which, lambda *each: seen.append(each))
        assert seen[-1] == (len(found.queries), len(found.queries))


@settings(max_examples=25)
@given(labels=st.lists(st.integers(0, 4), min_size=3, max_size=24), seed=st.integers(0, 99), copies=st.booleans())
def test_first_ranks_are_those_of_the_metrics(labels: list[int], seed: int, copies: bool) -> None:
    labels = [*labels, labels[0]]  # at least one query has a positive
    vectors = points(len(labels), seed)
    if copies:
        vectors[1::2] = vectors[0]
    found = analyse(vectors, catalog(labels))
    measured = evaluate(vectors, catalog(labels), k=(1, 2, 4), bootstrap=0).values
    first = found.first_rank[found.answerable]
    for cut in (1, 2, 4):
        assert (first <= cut).mean() == pytest.approx(measured[f"r@{cut}"])
    shown = found.correct[found.answerable]
    for cut in (1, 2, 4):  # the shown results agree with the ranks
        assert ((first <= cut) == shown[:, :cut].any(1)).all()


@pytest.mark.parametrize("name", ["several labels", "several labels, query/gallery"])
def test_metrics_of_several_labels(name: str) -> None:
    """The metrics agree with the analysis, which is compared with the reference above."""
    which, vectors = CATALOGS[name], points(10, 4)
    found, measured = analyse(vectors, which), evaluate(vectors, which, k=(1, 2), bootstrap=0)
    assert measured.left_out == len(found.queries) - len(found.answerable)
    for cut in (1, 2):
        assert (found.first_rank[found.answerable] <= cut).mean() == pytest.approx(measured.values[f"r@{cut}"])


def test_a_copy_with_another_label_counts_against() -> None:
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = analyse(vectors, catalog([0, 0, 1, 1]))
    assert found.first_rank[:2].tolist() == [2, 2]
    assert found.results[0].tolist()[0] == 2


def test_opposite_vectors_are_counted() -> None:
    vectors = points(40, seed=0)
    vectors[20:] = -vectors[:20] * (1 + 1e-6)  # a rounding error below -1
    found = analyse(vectors, catalog([0] * 20 + [1] * 20))
    assert found.positive_pairs.sum() == 2 * 20 * 19
    assert found.negative_pairs.sum() == 2 * 20 * 20


def test_vectors_of_other_images_are_refused() -> None:
    with pytest.raises(DataError, match="3 embeddings for the 4 images"):
        analyse(points(3), catalog([0, 0, 1, 1]))


@pytest.mark.parametrize("rows", [10, 400], ids=["tiles", "one tile"])
def test_no_tensor_is_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(ranker, "TILE", rows * 400)
    with LargestTensor() as largest:
        analyse(points(400), catalog([number // 4 for number in range(400)]))
    assert largest.elements == rows * 400
