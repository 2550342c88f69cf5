"""Comparison of runs: statistics, printed tables and the page."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shortlist.errors import ConfigError, RunError
from shortlist.evaluation.intervals import paired_differences
from shortlist.report.analysis import analyse
from shortlist.report.comparison import ComparedTest, Comparison, choose_differing, compare_runs, write_comparison
from shortlist.report.terminal_tables import print_comparison
from shortlist.training import RunFolder
from tests.evaluation.test_evaluate import catalog, points
from tests.reference_search import paired_bootstrap
from tests.report.runs import NASTY, CopyRun, change_config, read, remove_class


def test_error_reduction() -> None:
    test = ComparedTest({}, {}, {"first": {"r@1": 0.8, "r@2": 1.0}, "second": {"r@1": 0.85, "r@2": 0.9}}, {})
    assert test.error_reduction("second", "r@1") == pytest.approx(25)
    assert test.error_reduction("second", "r@2") is None  # the first has no error


class TestStatistics:
    def test_against_the_reference(self) -> None:
        random = torch.Generator().manual_seed(3)
        first = (torch.rand(60, generator=random) < 0.5).double()
        second = (torch.rand(60, generator=random) < 0.65).double()
        found = paired_differences(["r@1"], first[:, None], second[:, None], resamples=4000)["r@1"]
        value, low, high, p = paired_bootstrap(first.tolist(), second.tolist(), 4000, seed=5)
        assert found.value == pytest.approx(value)
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)  # other random draws
        assert found.p == pytest.approx(p, abs=0.04)

    def test_pairing_finds_a_small_difference(self) -> None:
        """A small difference on queries of very different difficulty is found only by pairing."""
        base = torch.linspace(0, 1, 200).double()
        second = base + 0.01 + 0.01 * torch.sin(torch.arange(200))
        together = paired_differences(["mAP"], base[:, None], second[:, None])["mAP"]
        shuffled = second[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
        apart = paired_differences(["mAP"], base[:, None], shuffled[:, None])["mAP"]
        assert together.value == pytest.approx(apart.value)
        assert together.significant
        assert not apart.significant

    def test_covers_the_truth(self) -> None:
        """A 95 % interval misses the true value in about one of twenty samples, but not in none of 200."""
        random = torch.Generator().manual_seed(0)
        first = (torch.rand(200, 80, generator=random) < 0.5).double()
        second = torch.where(torch.rand(200, 80, generator=random) < 0.2, 1.0, first)  # 0.1 more
        missed = wrongly = 0
        for one, other in zip(first, second, strict=True):
            found = paired_differences(["r@1"], one[:, None], other[:, None], resamples=400)["r@1"]
            missed += not found.low <= 0.1 <= found.high
            flipped = paired_differences(["r@1"], one[:, None], one.flip(0)[:, None], resamples=400)["r@1"]
            wrongly += flipped.significant
        assert 1 <= missed <= 30
        assert wrongly <= 25

    @settings(max_examples=15)
    @given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30), st.integers(0, 9))
    def test_swapping_the_runs_negates_the_difference(self, pairs: list[tuple[float, float]], seed: int) -> None:
        one, other = torch.tensor(pairs).double().T[..., None]
        there = paired_differences(["x"], one, other, 200, seed)["x"]
        back = paired_differences(["x"], other, one, 200, seed)["x"]
        assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low), abs=1e-9)
        assert there.p == back.p
        assert there.low - 1e-9 <= there.high
        assert 2 / 201 <= there.p <= 1
        assert there.significant == back.significant

    def test_equal_scores_give_no_difference(self) -> None:
        table = torch.rand(20, 2)
        for found in paired_differences(["a", "b"], table, table).values():
            assert (found.value, found.low, found.high, found.p, found.significant) == (0, 0, 0, 1, False)

    def test_tables_of_other_queries(self) -> None:
        with pytest.raises(ValueError, match="must have the same queries"):
            paired_differences(["a"], torch.rand(3, 1), torch.rand(4, 1))


class TestChoice:
    def test_where_they_differ_most(self) -> None:
        which = catalog([number // 4 for number in range(40)])
        analyses = {name: analyse(points(40, seed), which) for seed, name in enumerate(("one", "other"))}
        chosen = choose_differing(analyses, group_size=5)
        ahead = {
            group: [1 / analyses["other"].first_rank[n] - 1 / analyses["one"].first_rank[n] for n in numbers]
            for group, numbers in chosen.items()
        }
        every = 1 / analyses["other"].first_rank - 1 / analyses["one"].first_rank
        assert ahead["other better"][0] == max(every)
        assert ahead["other worse"][0] == min(every)
        assert min(ahead["other better"]) >= 0 >= max(ahead["other worse"])
        assert len(chosen["random"]) == 5

    def test_nothing_differs(self) -> None:
        which = catalog([0, 0, 1, 1])
        same = analyse(points(4), which)
        chosen = choose_differing({"one": same, "other": same})
        assert chosen["other better"] == chosen["other worse"] == []
        assert sorted(chosen["random"]) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def runs(copy_run: CopyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    root = tmp_path_factory.mktemp("runs")
    runs = {
        "one": copy_run(root / "one"),
        "two": copy_run(root / "two", "training.seed=1"),
        "three": copy_run(root / "three", "model.dim=4"),
        "elsewhere": copy_run(root / "elsewhere", "data.split_seed=3"),
    }
    change_config(runs["two"], "evaluation.k", [1, 3])
    return runs


@pytest.fixture(scope="module")
def comparison(runs: dict[str, RunFolder]) -> Comparison:
    return compare_runs([runs["one"].path, runs["two"].path])


class TestRuns:
    def test_means_are_those_of_the_runs(self, comparison: Comparison, runs: dict[str, RunFolder]) -> None:
        (test,) = comparison.tests
        measured = json.loads(runs["one"].evaluation_file.read_text())[0]["metrics"]
        assert test.means["one"] == pytest.approx({name: each["value"] for name, each in measured.items()})
        again = json.loads(runs["two"].evaluation_file.read_text())[0]["metrics"]
        assert test.means["two"]["mAP"] == pytest.approx(again["mAP"]["value"])
        assert test.means["two"].keys() == test.means["one"].keys()  # cut-offs of the first
        assert test.queries["r@1"] == 36

    def test_differences_are_to_the_first(self, runs: dict[str, RunFolder]) -> None:
        (test,) = compare_runs([runs[name].path for name in ("one", "two", "three")]).tests
        assert list(test.differences) == ["two", "three"]
        for run, found in test.differences.items():
            for name, each in found.items():
                assert each.value == pytest.approx(test.means[run][name] - test.means["one"][name])
                assert each.low <= each.value <= each.high

    def test_runs_that_were_tested_on_other_queries(self, runs: dict[str, RunFolder]) -> None:
        with pytest.raises(RunError, match=r"not tested on the same queries.*36 images of images.*data\.split_seed"):
            compare_runs([runs["one"].path, runs["elsewhere"].path])

    def test_images_that_have_changed(self, copy_run: CopyRun, source: Path, tmp_path: Path) -> None:
        moved = Path(shutil.copytree(source.parent, tmp_path / "images")) / source.name
        runs = [copy_run(tmp_path / name, *each) for name, each in (("one", []), ("two", ["training.seed=1"]))]
        for run in runs:
            change_config(run, "data.source", str(moved))
        compare_runs([run.path for run in runs])  # control: images may be moved
        remove_class(moved, "class 00")
        advice = r"\. Galleries can be compared even so: shortlist compare GALLERY NEW-GALLERY --queries IMAGES$"
        with pytest.raises(RunError, match=f"have changed since the start of the run .*{advice}"):
            compare_runs([run.path for run in runs])

    def test_one_run_or_the_same_twice(self, runs: dict[str, RunFolder]) -> None:
        with pytest.raises(ConfigError, match="at least two"):
            compare_runs([runs["one"].path])
        with pytest.raises(ConfigError, match="given twice"):
            compare_runs([runs["one"].path, runs["one"].path / ".." / "one"])

    def test_verdicts(self, comparison: Comparison) -> None:
        (verdict,) = comparison.verdicts()
        (test,) = comparison.tests
        real = test.differences["two"]["r@1"].significant
        assert ("is better than" in verdict or "is worse than" in verdict) == real
        assert ("no significant difference between two and one" in verdict) == (not real)


class TestOutput:
    def test_json(self, comparison: Comparison) -> None:
        found = json.loads(json.dumps(comparison.to_dict()))
        assert list(found["runs"]) == ["one", "two"]
        each = found["tests"][0]["differences"]["two"]["r@1"]
        assert each.keys() == {"value", "low", "high", "p", "significant"}

    def test_table(self, comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
        print_comparison(comparison)
        out = capsys.readouterr().out
        rows = [line.replace("│", " ").split() for line in out.splitlines()]
        found = {row[0]: row[1:3] for row in rows if len(row) > 2}
        (test,) = comparison.tests
        assert f"{comparison.verdicts()[0]}." in out.splitlines()  # not wrapped: the terminal does that
        for name in test.means["one"]:
            assert found[name] == [f"{100 * test.means[run][name]:.1f}" for run in ("one", "two")]

    def test_names_with_brackets(
        self, runs: dict[str, RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        named = Path(shutil.copytree(runs["one"].path, tmp_path / "one[b]"))
        print_comparison(compare_runs([named, runs["two"].path]))
        assert "one[b], %" in capsys.readouterr().out

    def test_few_queries(self, comparison: Comparison) -> None:
        (test,) = comparison.tests
        (verdict,) = comparison.verdicts()
        assert "too few" not in verdict
        (verdict,) = replace(comparison, tests=[replace(test, queries=dict.fromkeys(test.queries, 3))]).verdicts()
        assert "but 3 queries are too few for a reliable interval" in verdict

    def test_page(self, comparison: Comparison, tmp_path: Path) -> None:
        text, found = read(write_comparison(comparison, tmp_path / "sub" / "page.html"))
        (test,) = comparison.tests
        for each in test.differences["two"].values():
            value, _, interval = str(each).partition(" ")
            assert value in text
            assert interval in text
        cards = [each for name, each in found.elements if name == "article"]
        rankings = [each for name, each in found.elements if name == "ol"]
        assert cards
        assert len(rankings) == 2 * len(cards)
        assert NASTY in text
        assert [name for name, _ in found.elements].count("script") == 2
        assert str(comparison.runs["two"]) in text

    def test_vectors_of_different_lengths(self, runs: dict[str, RunFolder], tmp_path: Path) -> None:
        found = compare_runs([runs["two"].path, runs["three"].path])
        assert write_comparison(found, tmp_path / "page.html").stat().st_size > 1000
        assert np.isfinite([each.p for each in found.tests[0].differences["three"].values()]).all()
