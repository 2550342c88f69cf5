"""Summaries of catalogs, and checks of their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shortlist.data import Catalog, check, drop_unreadable, open_catalog, summary
from tests.data.pictures import class_folders, picture, write
from tests.displays import Told


@pytest.fixture
def toys(tmp_path: Path) -> Catalog:
    """Classes of 5, 4, 3 and 1 images, of which the first two are for training."""
    root = class_folders(tmp_path / "toys", {"a": 5, "b": 4, "c": 3, "d": 1})
    write(root / "a" / "0.jpg", picture(100, 20))
    write(root / "a" / "1.jpg", picture(10, 200))
    return open_catalog(root)


def test_a_summary(toys: Catalog):
    found = summary(toys)
    assert found["images"] == 13
    assert found["classes"] == 4
    assert found["images_per_class"] == {"min": 1, "median": 3.5, "max": 5}
    assert found["too_small"] == 2  # c and d have fewer than 4
    assert found["splits"] == {
        "train": {"images": 9, "classes": 2, "images_per_class": {"min": 4, "median": 4.5, "max": 5}, "too_small": 0},
        "test": {"images": 4, "classes": 2, "images_per_class": {"min": 1, "median": 2.0, "max": 3}, "too_small": 2},
    }
    assert found["width"] == {"min": 10, "median": 24.0, "max": 100}
    assert found["height"] == {"min": 18, "median": 18.0, "max": 200}
    assert (found["sampled"], found["unreadable"], found["missing"]) == (13, 0, [])
    json.dumps(found)


def test_a_summary_reports_the_sample_size(toys: Catalog):
    assert summary(toys, per_class=5)["too_small"] == 3
    assert summary(toys, sample=3)["sampled"] == 3
    nothing = summary(toys, sample=0)
    assert (nothing["sampled"], nothing["width"]) == (0, None)


def test_a_summary_counts_unreadable_images(toys: Catalog):
    toys.file(2).write_text("no image")
    toys.file(3).unlink()
    found = summary(toys)
    assert (found["sampled"], found["unreadable"]) == (13, 2)


def test_a_check_without_problems(toys: Catalog):
    report = check(toys)
    assert report.ok
    assert (report.images, report.missing, report.unreadable, report.duplicates, report.copies) == (13, (), (), (), 0)


@pytest.mark.parametrize("workers", [1, 3, None])
def test_a_check_finds_all_problems(toys: Catalog, workers: int | None):
    toys.file(1).unlink()
    toys.file(2).write_text("a text")
    truncated = toys.file(3)
    truncated.write_bytes(truncated.read_bytes()[:-300])
    shutil.copy(toys.file(5), toys.file(6))  # b/0.jpg, b/1.jpg
    shutil.copy(toys.file(5), toys.file(9))  # c/0.jpg
    shutil.copy(toys.file(5), toys.file(10))  # c/1.jpg
    told = Told()
    report = check(toys, workers, told)
    assert not report.ok
    assert report.missing == ("a/1.jpg",)
    assert [path for path, _ in report.unreadable] == ["a/2.jpg", "a/3.jpg"]
    assert report.unreadable[0][1].startswith("it is not an image")
    assert "truncated" in report.unreadable[1][1].lower()
    assert report.duplicates == (("b/0.jpg", "c/0.jpg"), ("b/0.jpg", "c/1.jpg"))
    assert report.copies == 2  # b/1 of b/0, c/1 of c/0
    assert told.of("opening toys") == [(number, 13) for number in range(1, 14)]


def test_skipped_files_are_reported_as_missing(tmp_path: Path):
    class_folders(tmp_path, {"a": 2})
    (tmp_path / "t.csv").write_text("path,label\na/0.jpg,x\na/1.jpg,y\na/2.jpg,y\n")
    report = check(open_catalog(tmp_path / "t.csv", on_missing="skip"))
    assert report.missing == ("a/2.jpg",)
    assert not report.ok


def test_equal_unreadable_files_are_not_duplicates(toys: Catalog):
    for index in (0, 12):
        toys.file(index).write_bytes(b"")
    report = check(toys)
    assert report.unreadable == (("a/0.jpg", "the file is empty"), ("d/0.jpg", "the file is empty"))
    assert report.duplicates == ()


def test_unreadable_images_are_dropped_and_named(toys: Catalog):
    same, none = drop_unreadable(toys)
    assert (same, none) == (toys, [])
    toys.file(4).write_text("a text")
    toys.file(12).unlink()
    steps: list[int] = []
    rest, bad = drop_unreadable(toys, workers=2, progress=lambda done, total: steps.append(done))
    assert [path for path, _ in bad] == ["a/4.jpg", "d/0.jpg"]
    assert bad[1][1] == "there is no such file"
    assert rest.missing == ("a/4.jpg", "d/0.jpg")
    assert rest.paths.tolist() == [path for path in toys.paths if path not in rest.missing]
    assert rest.class_names == toys.class_names
    assert check(rest.subset(range(len(rest)))).unreadable == ()
    assert steps == list(range(1, 14))
