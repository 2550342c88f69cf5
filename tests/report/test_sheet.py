"""The contact sheet: a place for everything that was found, also for files that have gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from shortlist.gallery import Hit, Item
from shortlist.report import sheet
from shortlist.report.sheet import draw_hits
from tests.data.pictures import write


def hits(root: Path, number: int, label: str | None = "bolt") -> list[Hit]:
    files = [write(root / f"{each}.png", Image.new("RGB", (40, 30), (0, 20 * each, 255))) for each in range(number)]
    return [Hit(Item(each, file, label), 1 - each / 10) for each, file in enumerate(files)]


def seen(path: Path) -> set[tuple[int, ...]]:
    """Every colour of a picture."""
    with Image.open(path) as image:
        return {tuple(each) for each in np.asarray(image).reshape(-1, 3).tolist()}


def test_every_result_is_there(tmp_path: Path) -> None:
    query = write(tmp_path / "query.png", Image.new("RGB", (30, 40), (255, 0, 0)))
    found = hits(tmp_path, 7)
    path = draw_hits([(query, found), (query, found[:2])], tmp_path / "new" / "sheet.png", title="Parts")
    colours = seen(path)
    assert {(0, 20 * each, 255) for each in range(7)} <= colours
    assert (255, 0, 0) in colours


def test_a_file_that_has_gone(tmp_path: Path) -> None:
    query, found = write(tmp_path / "query.png"), hits(tmp_path, 3, label=None)
    found[1].item.path.unlink()
    assert ImageColor.getrgb(sheet.HOLE) in seen(draw_hits([(query, found)], tmp_path / "sheet.png"))


def test_nothing_was_found(tmp_path: Path) -> None:
    query = write(tmp_path / "query.png")
    with Image.open(draw_hits([(query, [])], tmp_path / "sheet.png")) as drawn:
        assert drawn.height > sheet.THUMB


def test_long_names_are_cut_in_the_middle() -> None:
    draw = ImageDraw.Draw(Image.new("RGB", (10, 10)))
    shown = sheet._fitting(draw, "a very long name\nof a file - 0001.png", 100, sheet._font(12))
    assert draw.textlength(shown, sheet._font(12)) <= 100
    assert shown.startswith("a v")
    assert shown.endswith("png")
    assert "…" in shown
    assert sheet._fitting(draw, "short", 100, sheet._font(12)) == "short"
