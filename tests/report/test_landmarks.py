"""Pages for judged queries, several tests and distractors, with miniatures of the benchmarks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shortlist.files import verified, with_checksum
from shortlist.report.comparison import Comparison, compare_runs, write_comparison
from shortlist.report.run_report import write_report
from shortlist.training import RunFolder
from shortlist.training import train_run as train
from tests.report.runs import read
from tests.training.test_evaluation import home, landmarks  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def runs(home: Path, tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:  # noqa: F811
    root = tmp_path_factory.mktemp("runs")
    only_paris = f"evaluation.tests=[{{source: rparis6k, root: {home / 'paris'}}}]"
    settings = {"both": (), "paris": (only_paris, "training.seed=1", "evaluation.before=false")}
    return [train(landmarks(home, *each), root / name) for name, each in settings.items()]


@pytest.fixture(scope="module")
def page(runs: list[RunFolder]) -> Path:
    """The report of the first run."""
    return write_report(runs[0].path)


class TestReport:
    def test_a_section_for_each_test(self, page: Path) -> None:
        text, found = read(page)
        for name in ("roxford5k", "rparis6k"):
            assert f"Queries and results: {name}" in text
            assert f"Failures: {name}" in text
        cards = [each for name, each in found.elements if name == "article"]
        assert len(cards) == 6 + 6  # every query with a positive
        assert text.count("all queries 6") == 2
        assert "Most frequent confusions" not in text

    def test_results_of_the_paper(self, runs: list[RunFolder], page: Path) -> None:
        text, _ = read(page)
        without, with_distractors, _ = json.loads(runs[0].evaluation_file.read_text())
        for each, paper in ((without, 60.0), (with_distractors, 40.0)):
            difference = 100 * each["metrics"]["mAP medium"]["value"] - paper
            assert f"paper {paper} ({difference:+.1f})" in text
        assert "roxford5k+r1m: revisited" in text
        assert "mP@7 hard" in text  # listed as not measured
        assert "Distractors are not searched here." in text

    def test_means_over_all_tests(self, runs: list[RunFolder], page: Path, tmp_path: Path) -> None:
        assert "Mean over the landmark tests" not in read(page)[0]  # Paris was not tested with distractors
        run = RunFolder(Path(shutil.copytree(runs[0].path, tmp_path / "run")))
        tested = json.loads(run.evaluation_file.read_text())
        tested.append(with_checksum({**verified(tested[0], run.evaluation_file), "data": "rparis6k+r1m"}))
        run.evaluation_file.write_text(json.dumps(tested))
        text, _ = read(write_report(run.path))
        values = [100 * each["metrics"][f"mAP {setup}"]["value"] for each in tested for setup in ("medium", "hard")]
        assert len(values) == 8
        assert "Mean over the landmark tests" in text
        with_r1m = [*values[2:4], *values[6:]]
        assert f"all {sum(values) / 8:.2f} R1M {sum(with_r1m) / 4:.2f}" in text

    def test_without_a_test_before_training(self, runs: list[RunFolder]) -> None:
        assert "before training" not in read(write_report(runs[1].path))[0]


@pytest.fixture(scope="module")
def comparison(runs: list[RunFolder]) -> Comparison:
    return compare_runs([run.path for run in runs])


class TestComparison:
    def test_only_common_tests_are_compared(self, comparison: Comparison) -> None:
        assert [test.catalog.name for test in comparison.tests] == ["rparis6k"]

    def test_every_setup(self, comparison: Comparison, runs: list[RunFolder]) -> None:
        (test,) = comparison.tests
        measured = json.loads(runs[1].evaluation_file.read_text())[0]
        assert test.means["paris"] == pytest.approx({name: each["value"] for name, each in measured["metrics"].items()})
        assert {name: test.queries[f"mAP {name}"] for name in ("easy", "medium", "hard")} == measured["setups"]

    def test_page(self, comparison: Comparison, tmp_path: Path) -> None:
        text, found = read(write_comparison(comparison, tmp_path / "page.html"))
        assert "mAP medium" in text
        assert [name for name, _ in found.elements].count("article") == 6
