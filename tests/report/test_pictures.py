"""Pictures of queries and results: what is drawn, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from shortlist.data import Catalog
from shortlist.report.pictures import RIGHT, WRONG, Column, draw_results, sample_queries, top_results

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
    def test_of_different_classes_with_something_to_find(self, catalog: Catalog) -> None:
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


class TestSheet:
    def test_right_and_wrong_are_marked_where_they_are(self, catalog: Catalog, tmp_path: Path) -> None:
        vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.95, 0.05], [0.0, 1.0], [0.0, 0.9], [0.0, 0.8], [0.0, 0.7]])
        assert top_results(vectors, [0], 2) == [[2, 1]]  # first a wrong one, then the right one
        path = draw_results(catalog, [0], [Column("one", vectors)], tmp_path / "sheet.png", title="Title", results=2)
        sheet = pixels(path)
        assert frame_around(sheet, COLOURS[1]) == [ImageColor.getrgb(RIGHT)]
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
        path = draw_results(catalog, [0, 2, 4], columns, tmp_path / "sheet.png", title="Title", results=1)
        sheet = pixels(path)
        blue, red = (places(sheet, ImageColor.getrgb(colour)) for colour in (RIGHT, WRONG))
        assert red[:, 1].max() < blue[:, 1].min()  # all wrong before, all right after
        rows = [int(np.median(places(sheet, COLOURS[query])[:, 0])) for query in (0, 2, 4)]
        assert rows == sorted(rows)

    def test_marks_are_not_by_colour_alone(self, catalog: Catalog, tmp_path: Path) -> None:
        vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.95, 0.05], [0.0, 1.0], [0.0, 0.9], [0.0, 0.8], [0.0, 0.7]])
        path = draw_results(catalog, [0], [Column("one", vectors)], tmp_path / "sheet.png", title="Title", results=2)
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
        draw_results(catalog, [1, 2], [Column("one", vectors)], target, title="Ü" * 300, results=8)
        sheet = pixels(target)
        assert len(places(sheet, (77, 77, 77)))
        assert len(places(sheet, (1, 2, 3)))
        assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]
