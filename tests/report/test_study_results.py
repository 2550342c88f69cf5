"""The table and the plot of an ablation study."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from shortlist.errors import RunError
from shortlist.files import write_json
from shortlist.report.study_results import PAPER, curves, draw, read_results, shown_metric, table

SCORES = {("SAP", "16", 0): 0.5, ("SAP", "16", 1): 0.6, ("RS@k", "128", 0): 0.9, ("RS@k", "16", 0): 0.25}


def results(
    study: str = "batch-size", scores: dict[tuple[str, str, int], float] = SCORES, metric: str = "r@1"
) -> dict[str, object]:
    cases = [
        {"method": method, "value": value, "seed": seed, "metrics": {metric: score}}
        for (method, value, seed), score in scores.items()
    ]
    failed = {"method": "SAP", "value": "128", "seed": 0, "failed": True}
    return {"study": study, "config": {"name": "tiny"}, "cases": [*cases, failed]}


def test_curves_are_in_order() -> None:
    found = curves(results())
    assert found == {"RS@k": {"16": [25.0], "128": [90.0]}, "SAP": {"16": [50.0, 60.0]}}
    assert list(found) == ["RS@k", "SAP"]
    assert list(found["RS@k"]) == ["16", "128"]  # as numbers


def test_the_table_has_mean_and_spread() -> None:
    assert table(results()) == (["batch size", "RS@k", "SAP"], [["16", "25.0", "55.0 ± 7.1"], ["128", "90.0", "-"]])


@pytest.mark.parametrize(
    ("study", "values", "metric", "panels"),
    [
        ("batch-size", ("16", "3856"), "r@1", 3),
        ("rank-temperature", ("0.1", "5"), "r@1", 1),
        ("k", ("[1]", "[1,2]"), "mAP medium", 1),
    ],
)
def test_the_plot_has_a_panel_for_each_figure_of_the_paper(
    study: str, values: tuple[str, str], metric: str, panels: int, tmp_path: Path
) -> None:
    scores = {(method, value, 0): 0.5 for method in ("RS@k", "RS@k + SiMix") for value in values}
    with Image.open(draw(results(study, scores, metric), tmp_path / "plot.png")) as image:
        assert image.width == pytest.approx(panels * 4.6 * 150, abs=2)
        assert len(image.convert("RGB").getcolors(10**6) or []) > 50
    assert [file.name for file in tmp_path.iterdir()] == ["plot.png"]


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (["mAP easy", "mAP medium", "mP@1 medium"], "mAP medium"),
        (["r@2", "mAP"], "r@2"),
        (["mAP", "r@1"], "r@1"),
    ],
)
def test_another_metric_is_shown_if_r_at_1_was_not_measured(measured: list[str], shown: str) -> None:
    found = results()
    for case in found["cases"]:
        if "metrics" in case:
            case["metrics"] = {name: case["metrics"]["r@1"] if name == shown else 0.0 for name in measured}
    assert shown_metric(found) == shown
    assert curves(found) == curves(results())


def test_numbers_in_any_spelling_are_in_order() -> None:
    scores = {("RS@k", value, 0): 0.5 for value in ("5", "1e-1", ".5", "1")}
    assert list(curves(results("rank-temperature", scores))["RS@k"]) == ["1e-1", ".5", "1", "5"]


def test_nothing_to_show(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"study": "k", "cases": [], "config": {}})
    with pytest.raises(RunError, match="no case of this study is finished yet"):
        read_results(tmp_path / "results.json")


def test_the_papers_numbers() -> None:
    """r@1 by batch size, as the paper plots it."""
    table = """
    Cars196  RS@k   RS@k + SiMix  SAP
    16       74.60  86.27         68.9
    32       77.04  87.46         71.91
    64       76.67  87.31         75.64
    128      78.92  87.43         77.92
    256      79.14  87.06         78.48
    392      80.72  88.17         79.50
    """
    rows = [line.split() for line in table.strip().splitlines()[1:]]
    cars, sop = PAPER["batch-size"].values()
    for column, method in enumerate(("RS@k", "RS@k + SiMix", "SAP"), start=1):
        assert cars[method] == {row[0]: [float(row[column])] for row in rows}
    values = [72.9, 77.3, 79.0, 79.7, 80.5, 81.2, 82.0, 82.5, 82.8, 82.4]
    assert sop == {"RS@k": {str(16 * 2**doubled): [value] for doubled, value in enumerate(values)}}
