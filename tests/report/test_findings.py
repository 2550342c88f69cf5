"""Chosen queries, confusions, distributions and duplicates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shortlist.data import Catalog
from shortlist.report import findings
from shortlist.report.analysis import Analysis, analyse
from shortlist.report.findings import (
    choose_queries,
    confusions,
    first_rank_histogram,
    identical_pairs,
    near_training_images,
    recall_by_class_size,
    separation,
    similar_pairs_across_classes,
)
from tests.evaluation.test_evaluate import catalog, points
from tests.report.test_analysis import judged


def on_a_circle(degrees: list[float]) -> torch.Tensor:
    radians = torch.tensor(degrees).deg2rad()
    return torch.stack((radians.cos(), radians.sin()), 1)


class TestChoice:
    labels = tuple(number // 4 for number in range(80))

    def analysed(self) -> tuple[Analysis, Catalog]:
        which = catalog(list(self.labels))
        return analyse(points(80, seed=1), which), which

    def test_worst_and_best(self) -> None:
        found, which = self.analysed()
        chosen = choose_queries(found, which, group_size=5)
        assert found.first_rank[chosen["worst"][0]] == found.first_rank.max()
        assert (np.diff(found.first_rank[chosen["worst"]]) <= 0).all()
        assert found.margin[chosen["best"][0]] == found.margin.max()
        assert not set(chosen["worst"]) & set(chosen["best"])

    def test_at_most_two_of_a_class(self) -> None:
        found, which = self.analysed()
        hard = replace(found, first_rank=np.where(which.labels == 3, 70, found.first_rank))
        worst = choose_queries(hard, which, group_size=8)["worst"]
        assert [self.labels[number] for number in worst[:2]] == [3, 3]
        assert max(np.bincount([self.labels[number] for number in worst])) == 2

    def test_one_of_every_class_by_name(self) -> None:
        found, which = self.analysed()
        names = [which.class_names[self.labels[number]] for number in choose_queries(found, which)["every class"]]
        assert names == sorted(which.class_names)
        assert len(choose_queries(found, which, max_classes=7)["every class"]) == 7

    def test_one_of_two_classes(self) -> None:
        which = catalog([0, 0, 0, 1, 1, 1])
        chosen = choose_queries(analyse(points(6), which), which)
        assert [which.labels[number] for number in chosen["every class"]] == [0, 1]
        assert sorted(chosen["worst"]) == list(range(6))

    def test_random_ones_are_repeatable_and_answerable(self) -> None:
        which = catalog([0, 0, 1, 2, 3, 3])  # two have no positive
        found = analyse(points(6), which)
        for group in choose_queries(found, which).values():
            assert set(group) <= {0, 1, 4, 5}
        assert choose_queries(found, which) == choose_queries(found, which)

    def test_judged_queries_have_no_classes(self) -> None:
        found = analyse(points(12), judged())
        assert sorted(choose_queries(found, judged())["every class"]) == [0, 2]


class TestConfusions:
    def test_counted_with_examples(self) -> None:
        # class 0 lies on class 1, whose images are nearer to each other; class 2 is far away
        which = catalog([0, 0, 1, 1, 2, 2])
        (found,) = confusions(analyse(on_a_circle([0, 60, 4, 5, 180, 181]), which), which)
        assert (found.query_label, found.result_label, found.count, found.total) == (0, 1, 2, 2)
        assert found.examples == [0, 1]  # the most negative margin first

    def test_none_if_all_results_are_correct(self) -> None:
        which = catalog([0, 0, 1, 1])
        assert confusions(analyse(on_a_circle([0, 1, 90, 91]), which), which) == []

    def test_none_of_judged_queries(self) -> None:
        assert confusions(analyse(points(12), judged()), judged()) == []


class TestDistributions:
    def test_bins_hold_every_query_once(self) -> None:
        which = catalog([number % 5 for number in range(60)] + [5, 5])
        found = analyse(points(62), which)
        sizes, ranks = recall_by_class_size(found, (1, 4)), first_rank_histogram(found)
        assert sum(each.queries for each in sizes) == sum(each.queries for each in ranks) == 62
        assert [(each.low, each.high) for each in sizes] == [(1, 1), (11, 11)]
        assert [(each.low, each.high) for each in ranks[:4]] == [(1, 1), (2, 2), (3, 4), (5, 8)]
        mean = sum(each.queries * each.r_at_k[0] for each in sizes) / 62
        assert mean == pytest.approx((found.first_rank == 1).mean())

    def test_separation_is_the_area_under_the_roc(self) -> None:
        which = catalog([number % 3 for number in range(40)])
        vectors = points(40)
        scores, labels = (vectors @ vectors.T).numpy(), which.labels
        same, self_pairs = labels[:, None] == labels, np.eye(40, dtype=bool)
        right, wrong = scores[same & ~self_pairs], scores[~same]
        area = (right[:, None] > wrong).mean()  # the probability that a positive pair is more similar
        assert separation(analyse(vectors, which)) == pytest.approx(area, abs=0.01)


class TestIdenticalPairs:
    @pytest.fixture
    def copies(self, tmp_path: Path) -> Catalog:
        """0 and 2 are the same picture in two classes, 1 and 5 in one; 3 has the same vector, but other pixels."""
        for number, grey in enumerate([10, 50, 10, 11, 90, 50]):
            ending = "png" if number != 2 else "bmp"  # other bytes, the same pixels
            Image.new("L", (8, 8), grey).save(tmp_path / f"{number}.{ending}")
        which = catalog([0, 1, 1, 1, 0, 1], root=tmp_path)
        return replace(which, paths=np.array([f"{n}.{'bmp' if n == 2 else 'png'}" for n in range(6)], dtype=object))

    vectors = on_a_circle([0, 90, 0, 0, 180, 90])

    def test_equal_pixels_in_two_classes(self, copies: Catalog) -> None:
        found = identical_pairs(analyse(self.vectors, copies), copies)
        assert (found.pairs, found.num_unchecked) == ([(0, 2)], 0)

    def test_files_that_are_gone_are_no_duplicates(self, copies: Catalog, tmp_path: Path) -> None:
        (tmp_path / "0.png").unlink()
        assert identical_pairs(analyse(self.vectors, copies), copies).pairs == []

    def test_what_is_not_compared_is_counted(self, copies: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(findings, "MAX_COMPARED", 1)
        assert identical_pairs(analyse(torch.ones(6, 1), copies), copies).num_unchecked == 7  # 2 x 4 pairs


def test_training_images_that_are_almost_test_images() -> None:
    trained, tested = on_a_circle([0, 50, 100]), on_a_circle([300, 108, 70, 1, 52])
    assert near_training_images(trained, tested) == [(0, 3), (1, 4), (2, 1)]


def test_almost_equal_vectors_in_two_classes() -> None:
    which = catalog([0, 1, 0, 1, 2])
    found = analyse(on_a_circle([0, 8, 9, 90, 180]), which)
    assert similar_pairs_across_classes(found, which) == [(1, 2), (0, 1)]  # 1 and 8 degrees; 0 and 2 share a label
