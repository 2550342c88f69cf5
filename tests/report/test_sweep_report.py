"""The page and the table of a sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shortlist.errors import ConfigError
from shortlist.report import write_sweep_report
from shortlist.report.plots import HistoryPoint, history_plot
from shortlist.report.sweep_report import rows
from shortlist.report.terminal_tables import print_sweep
from shortlist.training import SweepResult, TrialResult
from tests.report.runs import NASTY, read

KEYS = ("optimizer.lr", "model.weights")


def trial(number: int, state: str, value: float | None) -> TrialResult:
    values = {"optimizer.lr": 0.001 * (number + 1), "model.weights": NASTY if number == 1 else None}
    validations = {} if value is None else {1: value / 2, 3: value}
    return TrialResult(number, state, values, value, validations, None if state == "running" else 65.0)


@pytest.fixture
def result(tmp_path: Path) -> SweepResult:
    states = {
        0: ("pruned", 0.9),
        1: ("complete", 0.25),
        2: ("failed", None),
        3: ("complete", 0.5),
        4: ("running", None),
    }
    trials = tuple(trial(number, *each) for number, each in states.items())
    return SweepResult(tmp_path / "study", "tiny", "r@1", "tpe", "median", KEYS, 20, trials, None)


def test_the_best_is_complete(result: SweepResult) -> None:
    assert result.best is not None
    assert result.best.number == 3
    assert result.done == 4


def test_rows_are_sorted_by_value(result: SweepResult) -> None:
    assert [row[0] for row in rows(result)] == ["3", "1", "0", "2", "4"]
    assert rows(result)[0] == ["3", "0.004", "null", "50.0", "3", "1 min 05 s", "complete"]
    assert rows(result)[-1] == ["4", "0.005", "null", "-", "-", "-", "running"]


def test_page(result: SweepResult) -> None:
    file = write_sweep_report(result)
    assert file == result.path / "report.html"
    text, page = read(file)
    assert "Trial 3 is the best: validation r@1 50.0 % with optimizer.lr=0.004, model.weights=null." in text
    assert "4 of 20 trials are done" in text
    assert "1 pruned, 2 complete, 1 failed, 1 running; 20 when the sweep is finished" in text
    assert "this needs at least 8 complete trials" in text
    assert "No test image was used" in text
    assert NASTY in text
    assert [name for name, _ in page.elements].count("script") == 2  # that of the page, and its pictures
    (plot,) = [each for name, each in page.elements if name == "svg"]
    assert plot["aria-label"] == "validation r@1: the best of 2 is 50.0 % (1 not completed)."


def test_page_with_importances(result: SweepResult, tmp_path: Path) -> None:
    known = replace(result, importances={"model.weights": 0.75, "optimizer.lr": 0.25})
    text, _ = read(write_sweep_report(known, tmp_path / "page.html"))
    assert "model.weights 75.0 optimizer.lr 25.0" in text
    assert "this needs at least" not in text


def test_page_before_any_trial(result: SweepResult, tmp_path: Path) -> None:
    text, _ = read(write_sweep_report(replace(result, trials=()), tmp_path / "page.html"))
    assert "0 of 20 trials are done, and none is complete." in text
    assert "No trial is complete." in text


def test_a_page_that_cannot_be_written(result: SweepResult, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        write_sweep_report(result, tmp_path)


def test_table(result: SweepResult, capsys: pytest.CaptureFixture[str]) -> None:
    print_sweep(replace(result, keys=("optimizer.lr",)))
    out = capsys.readouterr().out
    cells = [line.replace("│", " ").split() for line in out.splitlines()]
    assert ["3", "0.004", "50.0", "3", "1", "min", "05", "s", "complete"] in cells
    assert out.splitlines()[-1].startswith("Trial 3 is the best")


def test_history() -> None:
    """Dots are the values; the line steps to the largest complete value so far, and never falls."""
    points = [
        HistoryPoint(0, 20.0, "a"),
        HistoryPoint(1, 60.0, "b"),
        HistoryPoint(2, 70.0, "c", complete=False),
        HistoryPoint(4, 40.0, "d"),
    ]
    plot = history_plot("r@1", points, x_name="trial", unit=" %")
    (x0, y0), (x1, y1), (x2, _) = plot.dots
    assert plot.line == f"M{x0} {y0} H{x1} V{y1} H{x2} V{y1} H{x2}"
    assert y1 < plot.dots[2][1] < y0  # SVG counts from the top
    ((x, y),) = plot.hollow_dots
    assert x1 < x < x2
    assert y < y1
    assert [text for _, _, text in plot.tooltips] == ["a", "b", "c", "d"]
    assert plot.summary == "r@1: the best of 3 is 60.0 % (1 not completed)."
    assert [text for _, text in plot.x_labels] == ["0", "1", "2", "3", "4"]
    single = history_plot("r@1", [HistoryPoint(0, 20.0, "a")], x_name="trial")
    assert len(single.dots) == 1
