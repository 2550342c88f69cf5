"""The tables of docs/results.md match the raw results, and their verdicts follow the plan."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from scipy import stats

from shortlist.recipes import open_recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # as for a script
        return importlib.import_module("evidence_tables")


def test_the_page_shows_the_raw_results(tables: ModuleType) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    found = tables.tables()
    assert page == tables.fill(page, found)
    changed = {**found, "finetune": found["finetune"].replace("SAP", "99.9")}
    assert page != tables.fill(page, changed)  # the control


def test_the_recipe_states_its_measured_results(tables: ModuleType) -> None:
    raw = json.loads((ROOT / "benchmarks" / "results" / f"{tables.RECIPE}.json").read_text(encoding="utf-8"))
    settings = raw["command"].split()[3:]
    assert raw["config"] == open_recipe(tables.RECIPE, settings).model_dump(mode="json", exclude={"about", "measured"})
    for name, percent in open_recipe(tables.RECIPE).measured["cars196"].items():
        values = [run["after"][0]["metrics"][name]["value"] for run in raw["runs"]]
        assert percent == round(100 * statistics.mean(values), 1)


def test_the_plot_shows_the_raw_results(tables: ModuleType) -> None:
    found = tables.Results("frozen")
    with Image.open(tables.PLOT) as plot:
        assert plot.text["Comment"] == tables.digest_of_curves(found)
    found.tests[tables.cell("SAP", 64, "steps")][0] += 0.1  # the control
    with Image.open(tables.PLOT) as plot:
        assert plot.text["Comment"] != tables.digest_of_curves(found)


def test_other_pages_state_the_raw_results(tables: ModuleType) -> None:
    """The numbers of the README and of other pages, which are written by hand."""
    found, mixed = tables.Results("frozen"), "RS@k + SiMix, batch 392, equal images"
    gaps = [
        found.difference(tables.cell(f"RS@k{end}", batch, budget), tables.cell(f"SAP{end}", batch, budget))
        for end in ("", " + SiMix")
        for batch in tables.BATCHES
        for budget in tables.BUDGETS
    ]
    above = found.difference("Multi-Similarity, batch 64", mixed)
    below = found.difference("SAP + SiMix, batch 392, equal images", "Multi-Similarity, batch 64")
    tuned = tables.Results("finetune")
    over_rs, over_sap, over_multi_similarity = (
        interval(tuned.difference(*names))
        for names in (("RS@k + SiMix", "RS@k"), ("RS@k", "SAP"), ("RS@k", "Multi-Similarity"))
    )
    heads = [
        statistics.mean(seeds.values())
        for name, seeds in found.tests.items()
        if "batch 392" in name and "steps" not in name
    ]
    runs = json.loads((ROOT / "benchmarks" / "results" / f"{tables.RECIPE}.json").read_text(encoding="utf-8"))["runs"]
    recalls = [100 * run["after"][0]["metrics"]["r@1"]["value"] for run in runs]
    mean, half = statistics.mean(recalls), tables.half_width(recalls)
    for page, texts in {
        "README.md": (
            f"differ by at most {max(abs(gap.value) for gap in gaps):.1f} points",
            f"{interval(above)} points above RS@k with SiMix and {interval(below)} below Smooth AP with SiMix",
            f"{over_rs} points above RS@k alone, which is {over_sap} above Smooth AP "
            f"and {over_multi_similarity} above Multi-Similarity",
            f"is {mean:.1f} % (95 % interval of the mean over 3 seeds: {mean - half:.1f} to {mean + half:.1f}",
        ),
        "docs/training.md": (f"an r@1 of {mean:.1f} %", f"by at most {max(recalls) - min(recalls):.1f} points"),
        "docs/frozen.md": (f"an r@1 of {mean:.1f} when", f"{min(heads):.0f} to {max(heads):.0f} when it is [frozen]"),
    }.items():
        for text in texts:
            assert text in " ".join((ROOT / page).read_text(encoding="utf-8").split())


SETTINGS = ["cars196-lite0-cpu", "data.root=DATA", "data.on_missing=skip"]
RECORDED = ["evaluation.before=false", "batch.keep_graphs=8"]  # of the recipe
TRIAL = ["training.epochs=16", "loss.simix=true", "images.size=128", "images.resize=192"]
FOLDERS = ["--data", "no-data", "--work", "no-work"]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("recipe", [*SETTINGS, *RECORDED, "--seeds", "3"], "already has these runs"),
        ("recipe", SETTINGS, "has results of other settings"),
        ("tuning", [*TRIAL, *FOLDERS], "already has this trial"),
        ("evidence", ["remedies-frozen", *FOLDERS, "--results", "empty"], "no results of frozen"),
        *(("evidence", [study, *FOLDERS], "") for study in ("frozen", "omniglot", "remedies-frozen")),
    ],
)
def test_recorded_runs_are_neither_repeated_nor_replaced(
    script: str, arguments: list[str], message: str, tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[Path, str]:
        return {file: file.read_text(encoding="utf-8") for file in tables.RESULTS.parent.rglob("*.json*")}

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which evidence.py sets for its workers
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    before, main = files(), importlib.import_module(script).main
    if message:
        with pytest.raises(SystemExit, match=message):
            main()
    else:
        main()
    assert files() == before


def interval(gap: Any) -> str:
    return f"{gap.value:.1f} [{gap.value - gap.half:.1f}, {gap.value + gap.half:.1f}]"


def test_a_page_with_other_tables(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="'finetune'"):
        tables.fill("no table", {"finetune": ""})


def test_differences_are_paired_by_seed(tables: ModuleType) -> None:
    found = tables.Results("no such study")
    found.tests["one"] = {0: 51.0, 1: 42.0, 2: 63.5, 3: 70.0}
    found.tests["other"] = {2: 62.0, 1: 41.0, 0: 50.5}
    gap = found.difference("one", "other")
    want = stats.ttest_rel([51.0, 42.0, 63.5], [50.5, 41.0, 62.0]).confidence_interval()
    assert gap.value == pytest.approx(1.0)
    assert (gap.value - gap.half, gap.value + gap.half) == pytest.approx((want.low, want.high))
    assert found.difference("one", "nothing") is None


@pytest.mark.parametrize(
    ("value", "half", "want"),
    [
        (1.0, 0.9, "holds"),
        (1.0, 1.1, "not decided"),
        (-1.0, 0.9, "does not hold"),
        (0.1, 0.3, "does not hold"),
        (0.1, 0.45, "not decided"),
        (math.nan, math.nan, "not decided"),
    ],
)
def test_the_verdict_of_a_difference(value: float, half: float, want: str, tables: ModuleType) -> None:
    assert tables.Difference(value, half).verdict() == want


def test_the_verdict_of_several(tables: ModuleType) -> None:
    def judge(*values: float) -> str:
        verdict: str = tables.verdict([tables.Difference(value, 0.9) for value in values])
        return verdict

    assert judge(1, 1, 0) == "holds"
    assert judge(1, 1, -1) == "not decided"
    assert judge(-1, -1, 0) == "does not hold"
    assert judge(-1, -1, 1) == "not decided"
    assert judge(1, 0) == "not decided"
    assert tables.verdict([None]) == "not run"


def test_a_contrast_of_several_cells(tables: ModuleType) -> None:
    found = tables.Results("no such study")
    for name, values in {"a": (5, 6), "b": (1, 3), "c": (2, 2), "d": (1, 1)}.items():
        found.tests[name] = dict(enumerate(values))
    gap = found.contrast(["a", "d"], ["b", "c"])  # 3 and 2
    assert gap.value == pytest.approx(2.5)
    assert found.contrast(["a", "d"], ["b", "nothing"]) is None


def test_a_claim_that_one_opposite_refutes(tables: ModuleType) -> None:
    def judge(*values: float) -> str:
        verdict: str = tables._unless_opposite([tables.Difference(value, 0.9) for value in values])
        return verdict

    assert judge(1, 1) == "holds"
    assert judge(1, 0.5) == "not decided"
    assert judge(1, 1, -1) == "does not hold"
    assert tables._unless_opposite([None]) == "not run"


def test_a_difference_that_exceeds_a_point(tables: ModuleType) -> None:
    assert [tables.Difference(value, 1.2).exceeds(1) for value in (-1.3, 0.9, 1.1, 1.3)] == [True, False, False, True]


def test_a_claim_that_nothing_differs_by_a_point(tables: ModuleType) -> None:
    def judge(*values: float, half: float = 0.3) -> str:
        verdict: str = tables._within_a_point([tables.Difference(value, half) for value in values])
        return verdict

    assert judge(0.5, -0.6) == "holds"
    assert judge(0.5, -1.2) == "does not hold"
    assert judge(0.5, -0.8) == "not decided"
    assert judge(1.5, half=2) == "not decided"
    assert tables._within_a_point([None]) == "not run"
