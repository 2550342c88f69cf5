"""Contact sheets: what is drawn, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor, ImageDraw

from shortlist.data import Catalog
from shortlist.gallery import Hit, Item
from shortlist.report import contact_sheet
from shortlist.report.contact_sheet import (
    CORRECT,
    WRONG,
    Column,
    draw_hits,
    draw_rankings,
    sample_queries,
    top_results,
)
from tests.data.pictures import write

LABELS = [0, 0, 1, 1, 2, 2, 3]
COLOURS = [(number * 30 + 20, 255 - number * 30, 90) for number in range(len(LABELS))]  # one for each image


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Images of one colour each."""
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (80, 80), colour).save(tmp_path / f"{number}.png")
    return Catalog(
        name="colours",
        root=tmp_path,
        paths=np.array([f"{number}.png" for number in range(len(LABELS))], dtype=object),
        labels=np.array(LABELS),
        class_names=("a", "b", "c", "d"),
        splits=np.array(["test"] * len(LABELS)),
    )


class TestQueries:
    def test_different_classes_that_have_a_positive(self, catalog: Catalog) -> None:
        for seed in range(10):
            chosen = sample_queries(catalog, 10, seed)
            assert sorted(LABELS[index] for index in chosen) == [0, 1, 2]  # class 3 has one image
        assert len(sample_queries(catalog, 2)) == 2

    def test_random_and_repeatable(self, catalog: Catalog) -> None:
        assert sample_queries(catalog, 3, seed=4) == sample_queries(catalog, 3, seed=4)
        assert len({tuple(sample_queries(catalog, 3, seed)) for seed in range(10)}) > 3


class TestResults:
    def test_the_most_similar_first_and_never_the_query(self) -> None:
        vectors = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [-1.0, 0.0]])
        assert top_results(vectors, [0, 3], 2) == [[2, 1], [1, 2]]
        assert top_results(vectors, [0], 99) == [[2, 1, 3]]

    def test_a_copy_of_the_query_is_a_result(self) -> None:
        assert top_results(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), [1], 1) == [[0]]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def places(sheet: np.ndarray, colour: tuple[int, ...]) -> np.ndarray:
    """(n, 2) rows and columns of the pixels of a colour."""
    return np.argwhere((sheet == np.array(colour)).all(-1))


def frame_around(sheet: np.ndarray, colour: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The colours of the frames directly left of each area of a colour, from left to right."""
    found = places(sheet, colour)
    middle = int(np.median(found[:, 0]))
    row = sheet[middle]
    inside = (row == np.array(colour)).all(-1)
    starts = [x for x in np.flatnonzero(inside) if not inside[x - 1]]
    return [tuple(int(value) for value in row[x - 1]) for x in starts]


class TestRankings:
    def test_right_and_wrong_are_marked_where_they_are(self, catalog: Catalog, tmp_path: Path) -> None:
        vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.95, 0.05], [0.0, 1.0], [0.0, 0.9], [0.0, 0.8], [0.0, 0.7]])
        assert top_results(vectors, [0], 2) == [[2, 1]]  # first a wrong one, then the right one
        path = draw_rankings(catalog, [0], [Column("one", vectors)], tmp_path / "sheet.png", title="Title", results=2)
        sheet = pixels(path)
        assert frame_around(sheet, COLOURS[1]) == [ImageColor.getrgb(CORRECT)]
        assert frame_around(sheet, COLOURS[2]) == [ImageColor.getrgb(WRONG)]
        assert frame_around(sheet, COLOURS[0]) == [(255, 255, 255)]  # the query has no mark
        left = [int(places(sheet, COLOURS[image])[:, 1].min()) for image in (0, 2, 1)]
        assert left == sorted(left)
        assert not len(places(sheet, COLOURS[3]))

    def test_columns_and_rows(self, catalog: Catalog, tmp_path: Path) -> None:
        good = torch.nn.functional.one_hot(torch.tensor(LABELS)).float()
        good[:, 0] += torch.arange(len(LABELS)) * 1e-3
        bad = torch.roll(good, 1, dims=0)
        columns = [Column("before", bad), Column("after", good)]
        path = draw_rankings(catalog, [0, 2, 4], columns, tmp_path / "sheet.png", title="Title", results=1)
        sheet = pixels(path)
        blue, red = (places(sheet, ImageColor.getrgb(colour)) for colour in (CORRECT, WRONG))
        assert red[:, 1].max() < blue[:, 1].min()  # all wrong before, all right after
        rows = [int(np.median(places(sheet, COLOURS[query])[:, 0])) for query in (0, 2, 4)]
        assert rows == sorted(rows)

    def test_marks_differ_without_colour(self, catalog: Catalog, tmp_path: Path) -> None:
        vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.95, 0.05], [0.0, 1.0], [0.0, 0.9], [0.0, 0.8], [0.0, 0.7]])
        path = draw_rankings(catalog, [0], [Column("one", vectors)], tmp_path / "sheet.png", title="Title", results=2)
        grey = pixels(path).mean(-1)
        corners = []
        for answer in (1, 2):
            bottom, right = places(pixels(path), COLOURS[answer]).max(0)
            corners.append(grey[bottom - 13 : bottom + 1, right - 13 : right + 1] > 240)
        assert all(corner.any() for corner in corners)
        assert (corners[0] != corners[1]).any()

    def test_odd_shapes_and_an_existing_file(self, catalog: Catalog, tmp_path: Path) -> None:
        Image.new("L", (300, 20), 77).save(tmp_path / "1.png")
        Image.new("RGB", (3, 3), (1, 2, 3)).save(tmp_path / "2.png")
        target = tmp_path / "sheet.png"
        target.write_text("old")
        vectors = torch.eye(len(LABELS))
        draw_rankings(catalog, [1, 2], [Column("one", vectors)], target, title="Ü" * 300, results=8)
        sheet = pixels(target)
        assert len(places(sheet, (77, 77, 77)))
        assert len(places(sheet, (1, 2, 3)))
        assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def hits(root: Path, number: int, label: str | None = "bolt") -> list[Hit]:
    files = [write(root / f"{each}.png", Image.new("RGB", (40, 30), (0, 20 * each, 255))) for each in range(number)]
    return [Hit(Item(each, file, label), 1 - each / 10) for each, file in enumerate(files)]


def colours_of(path: Path) -> set[tuple[int, ...]]:
    """All colours of a picture."""
    with Image.open(path) as image:
        return {colour for _, colour in image.getcolors(image.width * image.height) or []}


def test_every_hit_is_drawn(tmp_path: Path) -> None:
    query = write(tmp_path / "query.png", Image.new("RGB", (30, 40), (255, 0, 0)))
    found = hits(tmp_path, 7)
    path = draw_hits([(query, found), (query, found[:2])], tmp_path / "new" / "sheet.png", title="Parts")
    colours = colours_of(path)
    assert {(0, 20 * each, 255) for each in range(7)} <= colours
    assert (255, 0, 0) in colours


def test_a_missing_file(tmp_path: Path) -> None:
    query, found = write(tmp_path / "query.png"), hits(tmp_path, 3, label=None)
    found[1].item.path.unlink()
    assert ImageColor.getrgb(contact_sheet.EMPTY) in colours_of(draw_hits([(query, found)], tmp_path / "sheet.png"))


def test_no_hits(tmp_path: Path) -> None:
    query = write(tmp_path / "query.png")
    with Image.open(draw_hits([(query, [])], tmp_path / "sheet.png")) as drawn:
        assert drawn.height > contact_sheet.HIT_SIDE


def test_long_names_are_cut_in_the_middle() -> None:
    draw = ImageDraw.Draw(Image.new("RGB", (10, 10)))
    shown = contact_sheet._shorten(draw, "a very long name\nof a file - 0001.png", 100, contact_sheet._font(12))
    assert draw.textlength(shown, contact_sheet._font(12)) <= 100
    assert shown.startswith("a v")
    assert shown.endswith("png")
    assert "…" in shown
    assert contact_sheet._shorten(draw, "short", 100, contact_sheet._font(12)) == "short"
