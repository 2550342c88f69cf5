"""Comparison of groups of runs over seeds: statistics, what is refused, and what is printed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shortlist.errors import ConfigError, RunError
from shortlist.evaluation.intervals import group_differences, paired_differences
from shortlist.report import compare_groups, compare_runs, write_comparison
from shortlist.report.comparison import Comparison
from shortlist.report.group_comparison import name_groups
from shortlist.report.terminal_tables import print_comparison
from tests.reference_search import group_bootstrap
from tests.report.runs import CopyRun, change_config, read


def simulated(
    seeds: int, generator: torch.Generator, seed_effect: float, class_effect: float, noise: float
) -> torch.Tensor:
    """Differences of 40 classes with 5 queries each, whose true mean is 0.02, (seeds, 200, 1)."""
    parts = [
        seed_effect * torch.randn(seeds, 1, 1, generator=generator),
        class_effect * torch.randn(1, 40, 1, generator=generator),
        noise * torch.randn(seeds, 40, 5, generator=generator),
    ]
    return (0.02 + sum(parts)).reshape(seeds, 200, 1).double()


CLASSES = torch.arange(200) // 5
# 97.5 % quantiles of Student's t distribution with n - 1 degrees of freedom, divided by that of the normal one; none of
# it applies to one seed.
WIDENING = {1: 1.0, 2: 12.7062047 / 1.9599640, 3: 4.3026527 / 1.9599640, 6: 2.5705818 / 1.9599640}


class TestStatistics:
    @pytest.mark.parametrize("seeds", [1, 2, 3, 6])
    def test_against_the_reference(self, seeds: int) -> None:
        table = simulated(seeds, torch.Generator().manual_seed(seeds), 0.05, 0.1, 0.1)[:, :60]
        labels = CLASSES[:60]
        found = group_differences(["x"], torch.zeros_like(table), table, labels, 4000)["x"]
        value, low, high, p = group_bootstrap(table[..., 0].tolist(), labels.tolist(), WIDENING[seeds], 1500, 5)
        assert found.value == pytest.approx(value)
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * (high - low))  # other random draws
        assert found.p == pytest.approx(p, abs=0.06)

    @pytest.mark.parametrize("effects", [(0.03, 0.0, 0.05), (0.03, 0.1, 0.2)])
    def test_covers_the_truth_with_three_seeds(self, effects: tuple[float, float, float]) -> None:
        """Intervals cover it in at least nine of ten samples; those over the queries of a single seed do not."""
        random, missed, missed_by_queries = torch.Generator().manual_seed(0), 0, 0
        for _ in range(100):
            table = simulated(3, random, *effects)
            found = group_differences(["x"], torch.zeros_like(table), table, CLASSES, 300)["x"]
            missed += not found.low <= 0.02 <= found.high
            queries = paired_differences(["x"], torch.zeros(200, 1), table[0], 300)["x"]
            missed_by_queries += not queries.low <= 0.02 <= queries.high
        assert missed <= 10
        assert missed_by_queries > 25

    def test_queries_of_a_class_are_drawn_together(self) -> None:
        """Differences that depend on the class alone have as many independent values as there are classes."""
        table = simulated(1, torch.Generator().manual_seed(1), 0.0, 0.2, 0.0)
        wide = group_differences(["x"], torch.zeros_like(table), table, CLASSES, 500)["x"]
        narrow = group_differences(["x"], torch.zeros_like(table), table, torch.arange(200), 500)["x"]
        assert wide.high - wide.low > 1.8 * (narrow.high - narrow.low)

    def test_swapping_the_groups_negates_the_difference(self) -> None:
        one, other = (simulated(3, torch.Generator().manual_seed(seed), 0.1, 0.1, 0.1) for seed in (1, 2))
        there, back = (group_differences(["x"], *pair, CLASSES, 300)["x"] for pair in ((one, other), (other, one)))
        assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))
        assert there.p == back.p

    def test_one_seed_and_every_query_its_own_class_is_the_comparison_of_two_runs(self) -> None:
        table = simulated(1, torch.Generator().manual_seed(4), 0.0, 0.1, 0.1)
        group = group_differences(["x"], torch.zeros_like(table), table, torch.arange(200))["x"]
        runs = paired_differences(["x"], torch.zeros(200, 1), table[0])["x"]
        assert vars(group) == pytest.approx(vars(runs))

    def test_tables_of_other_queries(self) -> None:
        for other in (torch.zeros(2, 4, 1), torch.zeros(3, 5, 1)):
            with pytest.raises(ValueError, match="must have the same queries"):
                group_differences(["x"], torch.zeros(2, 5, 1), other, torch.arange(5))


@pytest.fixture(scope="module")
def root(copy_run: CopyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two groups with seeds 0 and 1, one that has seed 2, and one on other classes."""
    root = tmp_path_factory.mktemp("groups")
    copy_run(root / "dim8-0")
    copy_run(root / "dim8-1", "training.seed=1")
    copy_run(root / "dim4-0", "model.dim=4")
    copy_run(root / "dim4-1", "model.dim=4", "training.seed=1")
    copy_run(root / "elsewhere-0", "data.split_seed=3")
    change_config(copy_run(root / "extra-2"), "training.seed", 2)
    return root


@pytest.fixture(scope="module")
def comparison(root: Path) -> Comparison:
    return compare_groups([[root / "dim8-0", root / "dim8-1"], [root / "dim4-*"]])


class TestRuns:
    def test_means_are_those_of_the_runs(self, comparison: Comparison, root: Path) -> None:
        (test,) = comparison.tests
        assert comparison.names == ["dim8-*", "dim4-*"]
        for group, dim in (("dim8-*", 8), ("dim4-*", 4)):
            measured = [
                json.loads((root / f"dim{dim}-{seed}" / "evaluation.json").read_text())[0]["metrics"]["r@1"]["value"]
                for seed in (0, 1)
            ]
            assert [test.seeds[group][seed]["r@1"] for seed in (0, 1)] == pytest.approx(measured)
            assert test.means[group]["r@1"] == pytest.approx(sum(measured) / 2)
        difference = test.differences["dim4-*"]["r@1"]
        assert difference.value == pytest.approx(test.means["dim4-*"]["r@1"] - test.means["dim8-*"]["r@1"])
        assert difference.low <= difference.value <= difference.high

    def test_runs_are_paired_by_seed_in_any_order(self, comparison: Comparison, root: Path) -> None:
        turned = compare_groups([[root / "dim8-1", root / "dim8-0"], [root / "dim4-0", root / "dim4-1"]])
        assert turned.to_dict() == comparison.to_dict()

    def test_three_groups(self, root: Path) -> None:
        copy = Path(shutil.copytree(root / "dim8-0", root / "copy"))
        (test,) = compare_groups([[root / "dim8-0"], [root / "dim4-0"], [copy]]).tests
        assert list(test.differences) == ["dim4-0", "copy"]
        assert all(each.value == 0 for each in test.differences["copy"].values())

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ([["dim8-*"], ["dim4-0"]], r"The group dim4-0 has no run with seed 1, but dim8-\* has: runs are paired"),
            ([["dim8-0", "extra-2"], ["dim4-*"]], r"The group .* has no run with seed 1, but dim4-\* has"),
            ([["dim8-0", "dim4-0"], ["dim8-1"]], "have the same training.seed, 0. Give runs that differ in their seed"),
            ([["dim8-0"], ["dim8-*"]], "given twice"),
            ([["dim8-*"]], "at least two groups"),
        ],
    )
    def test_groups_that_cannot_be_paired(self, groups: list[list[str]], message: str, root: Path) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            compare_groups([[root / each for each in group] for group in groups])
        assert "\n" not in str(error.value)

    def test_other_queries(self, root: Path) -> None:
        with pytest.raises(RunError, match=r"not tested on the same queries.*data\.split_seed"):
            compare_groups([[root / "dim8-0"], [root / "elsewhere-0"]])

    def test_a_pattern_without_a_run(self, root: Path) -> None:
        with pytest.raises(RunError, match=r"No folder of a run matches .*nothing-\*"):
            compare_groups([[root / "dim8-*"], [root / "nothing-*"]])

    def test_single_runs_by_a_pattern(self, root: Path) -> None:
        assert compare_runs([root / "dim8-*"]).names == ["dim8-0", "dim8-1"]


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([["a/seed-0/x", "a/seed-1/x"], ["a/seed-0/y", "a/seed-1/y"]], ["seed-*/x", "seed-*/y"]),
        ([["a/0", "a/1"], ["a/2", "a/3"]], ["group 1", "group 2"]),
        ([["one/run"], ["two/run"]], ["one/run", "two/run"]),
    ],
)
def test_names(groups: list[list[str]], names: list[str]) -> None:
    assert name_groups([[Path(each) for each in group] for group in groups]) == names


class TestOutput:
    def test_json(self, comparison: Comparison, root: Path) -> None:
        found = json.loads(json.dumps(comparison.to_dict()))
        assert found["groups"]["dim4-*"] == {"0": str(root / "dim4-0"), "1": str(root / "dim4-1")}
        (test,) = found["tests"]
        assert test["differences"]["dim4-*"]["r@1"].keys() == {"value", "low", "high", "p", "significant"}
        assert test["seeds"]["dim4-*"]["1"].keys() == test["metrics"]["dim4-*"].keys()

    def test_table(self, comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
        print_comparison(comparison)
        out = capsys.readouterr().out
        assert "dim8-*, %" in out
        (test,) = comparison.tests
        rows = [line.replace("│", " ").split() for line in out[out.index("by seed") :].splitlines()]
        for seed in (0, 1):
            assert [str(seed), *(f"{100 * each[seed]['r@1']:.1f}" for each in test.seeds.values())] in rows
        (verdict,) = comparison.verdicts()
        assert f"{verdict}." in out.splitlines()
        assert ", 2 seeds" in verdict

    def test_page(self, comparison: Comparison, tmp_path: Path) -> None:
        text, found = read(write_comparison(comparison, tmp_path / "page.html"))
        for part in ("dim4-* against dim8-*", "r@1 by seed", "classes, with all of their queries", "seed 0 is shown"):
            assert part in text
        assert "single seed" not in text
        cards = [each for name, each in found.elements if name == "article"]
        assert len([each for name, each in found.elements if name == "ol"]) == 2 * len(cards) > 0
        assert str(comparison.groups["dim4-*"][1]) in text

    def test_the_page_of_a_single_seed_says_what_is_missing(self, root: Path, tmp_path: Path) -> None:
        one = compare_groups([[root / "dim8-0"], [root / "dim4-0"]])
        assert "the variation between seeds is not included" in read(write_comparison(one, tmp_path / "page.html"))[0]

    def test_few_queries(self, comparison: Comparison) -> None:
        (test,) = comparison.tests
        (verdict,) = replace(comparison, tests=[replace(test, queries=dict.fromkeys(test.queries, 3))]).verdicts()
        assert "but 3 queries are too few" in verdict
