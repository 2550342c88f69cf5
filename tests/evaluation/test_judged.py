"""The judged protocol, compared with a literal implementation, on the ground truth of Revisited Oxford and Paris."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from shortlist.data import Judgement
from shortlist.errors import ConfigError, DataError
from shortlist.evaluation import evaluate, judged_scores
from shortlist.evaluation.judged import average_precision
from shortlist.ranking import ranker
from shortlist.search import open_vectors
from tests import reference_metrics as reference
from tests.evaluation.revisited import SETUPS, catalog, descriptors, ground_truth

K = (1, 5, 10)
Queries = list[dict[str, list[int]]]


def expected(queries: Queries, asked: NDArray, known: NDArray, setup: str) -> dict[int, list[float]]:
    """Return AP and precision at K of each query that has a positive, directly from the definitions."""
    right, neither = ([query[key] for query in queries] for key in ("right", "neither")) if setup == "" else (
        [[index for key in SETUPS[setup][part] for index in query[key]] for query in queries] for part in (0, 1)
    )  # fmt: skip
    found = {}
    for number, (positives, junk) in enumerate(zip(right, neither, strict=True)):
        if positives:
            ranks = reference.ranks_of_positives((known @ asked[number]).tolist(), positives, junk)
            found[number] = [reference.trapezoidal_ap(ranks), *(reference.precision_at_k(ranks, k) for k in K)]
    return found


def assert_scores(found, queries: Queries, asked: NDArray, known: NDArray, setup: str) -> None:
    """Compare the scores of every query of a setup."""
    rows = expected(queries, asked, known, setup)
    assert found.queries.tolist() == list(rows)
    for number, row in enumerate(rows.values()):
        assert [found.average_precision[number], *found.precision_at_k[number]] == pytest.approx(row, abs=1e-12)


class TestRealGroundTruth:
    @pytest.mark.parametrize(
        ("name", "noise"), [("roxford5k", 3.0), ("rparis6k", 0.3)], ids=["poor descriptors", "good descriptors"]
    )
    def test_every_query_and_setup(self, name: str, noise: float) -> None:
        queries, number = ground_truth(name)
        asked, known = descriptors(queries, number, noise=noise)
        judgements = catalog(queries, number, last=True).judgements
        found = judged_scores(torch.from_numpy(asked).float(), [torch.from_numpy(known).float()], judgements, K)
        assert list(found) == ["easy", "medium", "hard"]
        for setup, scores in found.items():
            assert_scores(scores, queries, asked, known, setup)
        means = [scores.average_precision.mean() for scores in found.values()]
        assert len({round(mean, 3) for mean in means}) == 3  # the setups differ
        assert 0.01 < means[2] < 0.99

    def test_real_values(self) -> None:
        """In double precision, none of these values are ties."""
        queries, number = ground_truth("rparis6k")
        queries = queries[::5]
        random = np.random.default_rng(1)
        asked, known = (each + random.normal(size=each.shape) for each in descriptors(queries, number, noise=0.5))
        judgements = catalog(queries, number, last=True).judgements
        found = judged_scores(torch.from_numpy(asked), [torch.from_numpy(known)], judgements, K)
        for setup, scores in found.items():
            assert_scores(scores, queries, asked, known, setup)

    def test_distractors_in_half_precision_on_disk(self, tmp_path: Path) -> None:
        queries, number = ground_truth("roxford5k")
        queries = queries[::3]
        asked, known = descriptors(queries, number, noise=0.5)
        random = np.random.default_rng(3)
        more = [random.integers(-9, 10, (size, asked.shape[1])).astype(np.float64) for size in (2001, 1000)]
        files = []
        for index, part in enumerate([np.concatenate((known, asked)), *more]):
            files.append(tmp_path / f"{index}.npy")
            np.save(files[-1], part.astype(np.float16 if index < 2 else np.float32))
        images = catalog(queries, number, last=True)
        own, *others = (open_vectors(file) for file in files)
        assert own.dtype == np.float16
        assert isinstance(own, np.memmap)
        measured = evaluate(own, images, bootstrap=0, distractors=dict(zip("ab", others, strict=True)))
        assert measured.data == "roxford5k+a+b"
        assert measured.gallery == number + 2001 + 1000
        for setup in SETUPS:
            rows = np.array(list(expected(queries, asked, np.concatenate((known, *more)), setup).values())).mean(0)
            values = [measured.metrics[f"{name} {setup}"].value for name in ("mAP", "mP@1", "mP@5", "mP@10")]
            assert values == pytest.approx(rows.tolist(), abs=1e-12)
        alone = evaluate(own, images, bootstrap=0)
        assert alone.metrics["mAP medium"].value > measured.metrics["mAP medium"].value
        assert alone.data == "roxford5k"

    def test_evaluation(self) -> None:
        queries, number = ground_truth("roxford5k")
        asked, known = descriptors(queries, number, noise=0.5)
        found = evaluate(torch.from_numpy(np.concatenate((asked, known))), catalog(queries, number), bootstrap=100)
        assert (found.protocol, found.queries, found.gallery, found.left_out) == ("revisited", 70, 4993, 0)
        assert found.setups == {"easy": 68, "medium": 70, "hard": 70}  # two queries have no easy image
        kinds = ["mAP", "mP@1", "mP@5", "mP@10"]
        assert list(found.metrics) == [
            *(f"mAP {setup}" for setup in SETUPS),
            *(f"{kind} {setup}" for setup in SETUPS for kind in kinds[1:]),
        ]
        assert list(found.headline) == ["mAP easy", "mAP medium", "mAP hard"]
        for estimate in found.metrics.values():
            assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
        assert found.metrics["mAP hard"].low < found.metrics["mAP hard"].high

    def test_keeping_junk_changes_the_result(self) -> None:
        """Negative control: the comparisons above detect whether junk is removed."""
        queries, number = ground_truth("roxford5k")
        asked, known = descriptors(queries, number, noise=0.5)
        judgements = catalog(queries, number, last=True).judgements
        nothing = np.empty(0, dtype=np.int64)
        left_in = {setup: tuple(Judgement(e.positives, nothing) for e in each) for setup, each in judgements.items()}
        found, without = (
            judged_scores(torch.from_numpy(asked), [torch.from_numpy(known)], each, K) for each in (judgements, left_in)
        )
        for setup in ("easy", "hard"):  # whose junk is near the queries
            assert without[setup].average_precision.mean() < found[setup].average_precision.mean() - 0.05


@st.composite
def judged_searches(draw: st.DrawFn) -> tuple[Queries, NDArray, NDArray]:
    """Small integers with many ties, and queries without positives, without junk, or without judgements."""
    width, number = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    vectors = st.lists(st.integers(-2, 2), min_size=width, max_size=width)
    asked = draw(st.lists(vectors, min_size=1, max_size=3))
    known = draw(st.lists(vectors, min_size=number, max_size=number))
    kinds = [draw(st.lists(st.sampled_from("+-?"), min_size=number, max_size=number)) for _ in asked]
    queries = [
        {"right": [i for i, kind in enumerate(each) if kind == "+"],
         "neither": [i for i, kind in enumerate(each) if kind == "?"]}
        for each in kinds
    ]  # fmt: skip
    return queries, np.array(asked, dtype=np.float64), np.array(known, dtype=np.float64)


def unnamed(queries: Queries) -> dict[str, tuple[Judgement, ...]]:
    rows = lambda each: np.array(each, dtype=np.int64)  # noqa: E731
    return {"": tuple(Judgement(rows(query["right"]), rows(query["neither"])) for query in queries)}


@settings(max_examples=50, deadline=None)
@given(judged_searches(), st.integers(1, 12), st.integers(0, 12))
def test_scores_equal_their_definitions(search: tuple[Queries, NDArray, NDArray], block: int, cut: int) -> None:
    """The block size, and the split of the gallery into two parts, are arbitrary."""
    queries, asked, known = search
    parts = [torch.from_numpy(known[:cut]).float(), known[cut:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranker, "TILE", block * max(asked.shape))
        (found,) = judged_scores(torch.from_numpy(asked).float(), parts, unnamed(queries), K).values()
    assert_scores(found, queries, asked, known, "")


class TestByHand:
    def test_trapezoids(self) -> None:
        """Positives at ranks 0, 2 and 3: (1 + 1)/2, (1/2 + 2/3)/2 and (2/3 + 3/4)/2, over 3."""
        assert average_precision(np.array([0, 2, 3])) == pytest.approx((1 + 7 / 12 + 17 / 24) / 3)
        assert average_precision(np.array([0, 1, 2])) == 1
        assert average_precision(np.array([1])) == pytest.approx(1 / 4)  # (0/1 + 1/2) / 2, and not 1/2

    def scores(self, similarities: list[float], right: list[int], junk: list[int]) -> list[float]:
        known = torch.tensor(similarities)[:, None]
        (found,) = judged_scores(torch.ones(1, 1), [known], unnamed([{"right": right, "neither": junk}]), K).values()
        return [found.average_precision[0], *found.precision_at_k[0]]

    def test_precision_stops_at_the_last_positive(self) -> None:
        similarities = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.4, 0.3]
        _, at_1, at_5, at_10 = self.scores(similarities, right=[0, 2], junk=[])
        assert (at_1, at_5, at_10) == pytest.approx((1, 2 / 3, 2 / 3))  # the last is the third of the list
        _, _, at_5, at_10 = self.scores(similarities, right=[0, 11], junk=[])
        assert (at_5, at_10) == pytest.approx((1 / 5, 1 / 10))

    def test_junk_is_removed(self) -> None:
        assert self.scores([9.0, 8.0, 7.0, 6.0], right=[1, 3], junk=[0, 2]) == [1, 1, 1, 1]
        assert self.scores([9.0, 8.0, 7.0, 6.0], right=[1, 3], junk=[])[0] < 0.5

    def test_ties_count_as_ahead(self) -> None:
        assert self.scores([1.0, 1.0, 1.0], right=[0], junk=[]) == self.scores([1.0, 2.0, 2.0], right=[0], junk=[])
        assert self.scores([1.0, 1.0, 1.0], right=[0], junk=[1, 2])[0] == 1  # ties with junk do not count

    @pytest.mark.parametrize("dimensions", [37, 2048])
    def test_copies_are_ties(self, dimensions: int) -> None:
        """Matrix products round copies of one vector differently, depending on their position."""
        point = torch.nn.functional.normalize(torch.randn(1, dimensions, generator=torch.Generator().manual_seed(0)))
        judged = unnamed([{"right": [3, 400], "neither": [5]}] * 7)
        (found,) = judged_scores(point.repeat(7, 1), [point.repeat(500, 1)], judged, K).values()
        assert found.precision_at_k.sum() == 0
        ranks = np.array([497, 498])
        assert found.average_precision == pytest.approx([average_precision(ranks)] * 7)


class TestInsideTheDatabase:
    """As in the validation set of Tolias et al., the image of a query is also in the gallery, and is junk for it."""

    queries = ({"right": [2], "neither": [0]}, {"right": [3], "neither": [1]})
    known = np.array([[4.0, 0.0], [0.0, 4.0], [3.0, 1.0], [1.0, 3.0]])

    def test_the_image_of_a_query_is_junk(self) -> None:
        (found,) = judged_scores(
            torch.from_numpy(self.known[:2]), [self.known], unnamed(list(self.queries)), K
        ).values()
        assert found.average_precision.tolist() == [1, 1]

    def test_without_junk_the_image_of_a_query_is_the_first_result(self) -> None:
        judged = unnamed([{**query, "neither": []} for query in self.queries])
        (found,) = judged_scores(torch.from_numpy(self.known[:2]), [self.known], judged, K).values()
        assert found.average_precision.tolist() == [0.25, 0.25]

    def test_rows_that_are_not_searchable(self) -> None:
        judged = unnamed([{**query, "neither": []} for query in self.queries])
        searchable = np.array([False, False])  # the rows after these are searchable
        (found,) = judged_scores(
            torch.from_numpy(self.known[:2]), [self.known], judged, K, searchable=searchable
        ).values()
        assert found.average_precision.tolist() == [1, 1]


class TestEvaluate:
    truth = ({"easy": [0], "hard": [1], "junk": [2]}, {"easy": [], "hard": [3], "junk": []})

    def vectors(self) -> Tensor:
        return torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 0.0], [4.0, 0.0], [6.0, 0.0], [0.0, 1.0], [0.0, 2.0]])

    def test_a_setup_without_positives_has_no_metrics(self) -> None:
        images = catalog([{**query, "easy": []} for query in self.truth], 5)
        found = evaluate(self.vectors(), images, bootstrap=0)
        assert set(found.setups.items()) == {("easy", 0), ("medium", 2), ("hard", 2)}
        assert not any("easy" in name for name in found.metrics)

    def test_queries_without_a_positive(self) -> None:
        nothing = {"easy": [], "hard": [], "junk": [0]}
        assert evaluate(self.vectors(), catalog([self.truth[0], nothing], 5), bootstrap=0).left_out == 1
        with pytest.raises(DataError, match="roxford5k: no query has a positive in the gallery"):
            evaluate(self.vectors(), catalog([nothing, nothing], 5))

    def test_the_position_of_the_queries_does_not_matter(self) -> None:
        vectors, queries = self.vectors(), list(self.truth)
        first = evaluate(vectors, catalog(queries, 5), bootstrap=0)
        last = evaluate(torch.cat((vectors[2:], vectors[:2])), catalog(queries, 5, last=True), bootstrap=0)
        assert first == last

    def test_one_unnamed_setup(self) -> None:
        images = catalog(list(self.truth), 5)
        object.__setattr__(images, "judgements", {"": images.judgements["medium"]})
        found = evaluate(self.vectors(), images, bootstrap=0, k=(2,))
        assert list(found.metrics) == ["mAP", "mP@2"]
        assert (found.protocol, found.setups) == ("judged", {})

    def test_a_catalog_can_name_its_protocol(self) -> None:
        images = catalog(list(self.truth), 5)
        object.__setattr__(images, "protocol", "custom")
        assert evaluate(self.vectors(), images).protocol == "custom"

    def test_invalid_inputs(self) -> None:
        images, vectors = catalog(list(self.truth), 5), self.vectors()
        with pytest.raises(DataError, match="6 embeddings for the 7 images of roxford5k"):
            evaluate(vectors[1:], images)
        with pytest.raises(DataError, match=r"have 2 dimensions, but the gallery \(4, 3\)"):
            evaluate(vectors, images, distractors={"r1m": np.zeros((4, 3), dtype=np.float16)})
        bad = np.zeros((3, 2), dtype=np.float16)
        bad[1] = np.inf
        with pytest.raises(DataError, match="Row 8 of the gallery"):
            evaluate(vectors, images, distractors={"r1m": bad})
        both = Judgement(np.array([2, 3]), np.array([3]))
        with pytest.raises(DataError, match="hard: row 3 is both positive and junk of query 0"):
            judged_scores(vectors[:1], [vectors], {"hard": (both,)})

    def test_distractors_require_judgements(self) -> None:
        images = catalog(list(self.truth), 5)
        object.__setattr__(images, "judgements", None)
        with pytest.raises(ConfigError, match="roxford5k cannot be tested with distractors"):
            evaluate(self.vectors(), images, distractors={"r1m": self.vectors()})

    def test_progress(self) -> None:
        calls: list[tuple[int, int]] = []
        progress = lambda done, of: calls.append((done, of))  # noqa: E731
        images = catalog(list(self.truth), 5)
        evaluate(self.vectors(), images, distractors={"r1m": np.ones((9, 2))}, progress=progress)
        assert calls == [(7, 16), (16, 16)]
