"""The list of benchmarks, and their descriptions as text, as JSON and in the docs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from shortlist.data import BENCHMARKS, Catalog, open_catalog
from shortlist.data.benchmarks import glyphs

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
PAPER_K = {  # the cut-offs of the paper's tables, and the usual ones for CUB
    "cars196": (1, 2, 4, 8),
    "cub": (1, 2, 4, 8),
    "sop": (1, 10, 100, 1000),
    "inaturalist": (1, 4, 16, 32),
    "vehicleid-small": (1, 5),
}


def test_the_list_is_complete_and_immutable():
    sizes = [f"vehicleid-{size}{protocol}" for size in ("small", "medium", "large") for protocol in ("", "-reid")]
    landmarks = ["gldv1", "gldv2-clean", "roxford5k", "rparis6k", "r1m", "sfm120k-val"]
    others = ["cars196", "sop", "inaturalist", "cub", "inshop", "omniglot", "glyphs"]
    assert sorted(BENCHMARKS) == sorted([*sizes, *landmarks, *others])
    with pytest.raises(TypeError, match="does not support item assignment"):
        BENCHMARKS["mine"] = BENCHMARKS["glyphs"]
    assert {name: BENCHMARKS[name].k for name in PAPER_K} == PAPER_K


@pytest.mark.parametrize("name", BENCHMARKS)
def test_descriptions_are_complete(name: str):
    benchmark = BENCHMARKS[name]
    assert benchmark.name == name
    facts = benchmark.facts()
    assert json.loads(json.dumps(facts)) == facts
    text = benchmark.description()
    assert text.startswith(f"{name}: {benchmark.about}\n")
    for line in (benchmark.protocol, *facts["download"], *facts["tree"], *benchmark.reported):
        assert line in text
    for count in benchmark.counts.values():
        assert str(count) in text
    assert max(map(len, text.splitlines())) <= 120
    assert f"shortlist data show {name}" in text
    if benchmark.expects is not None:
        assert benchmark.markers
        assert any(marker.split("/")[-1] in benchmark.tree for marker in benchmark.markers)
        assert "http" in benchmark.download


def test_reported_metrics():
    assert BENCHMARKS["sop"].reported == ("r@1", "r@10", "r@100", "r@1000")
    assert BENCHMARKS["rparis6k"].reported == ("mAP", "mP@1", "mP@5", "mP@10")
    assert BENCHMARKS["gldv1"].reported == BENCHMARKS["r1m"].reported == ()


def test_the_docs_page_matches_the_descriptions():
    """Text blocks of the page equal the output of `shortlist data about`, and its table has every benchmark."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    shown = {block.partition(":")[0]: block for block in blocks}
    for name, block in shown.items():
        assert block == BENCHMARKS[name].description()
    assert {name.removesuffix("-small") for name in shown} == {
        "cars196",
        "sop",
        "inaturalist",
        "vehicleid",
        "cub",
        "inshop",
        "omniglot",
        "gldv1",
        "gldv2-clean",
        "roxford5k",
        "r1m",
        "sfm120k-val",
    }
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert sorted(rows) == sorted(BENCHMARKS)
    for name, row in rows.items():
        assert all(str(count) in row for count in BENCHMARKS[name].counts.values())


def test_glyphs_need_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Images are kept in the cache, or in a given folder."""
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))
    roots: list[Path] = []

    def read(root: Path, progress: object) -> Catalog:
        roots.append(root)
        (tmp_path / "a.bmp").touch()
        return Catalog("glyphs", tmp_path, np.array(["a.bmp"], dtype=object), [0], ("a",), ["train"])

    small = dataclasses.replace(glyphs.BENCHMARK, read=read, counts={})
    monkeypatch.setattr("shortlist.data.sources.BENCHMARKS", {"glyphs": small})
    assert len(open_catalog("glyphs")) == 1
    open_catalog("glyphs", root=tmp_path / "mine")
    assert roots == [tmp_path / "cache", tmp_path / "mine"]
