"""Summaries of catalogs, and checks of their files."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from shortlist.data import Catalog, check, find_unreadable, open_catalog, summary
from shortlist.data.inspection import find_look_alikes
from shortlist.data.near_duplicates import MAX_DISTANCE, VisualHash, near_duplicates, visual_hash
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
    assert (report.images, report.missing, report.unreadable, report.duplicates, report.copies) == (13, (), (), (), ())


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
    assert report.copies == (("b/0.jpg", "b/1.jpg"), ("c/0.jpg", "c/1.jpg"))
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


def test_unreadable_images_are_named(toys: Catalog):
    assert find_unreadable(toys) == []
    toys.file(4).write_text("a text")
    toys.file(12).unlink()
    steps: list[int] = []
    bad = find_unreadable(toys, workers=2, progress=lambda done, total: steps.append(done))
    assert [path for path, _ in bad] == ["a/4.jpg", "d/0.jpg"]
    assert bad[1][1] == "the file does not exist"
    assert steps == list(range(1, 14))


# Images that look the same


@pytest.fixture
def photos() -> list[Image.Image]:
    """Ten smooth random pictures."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (10, 6, 7, 3), dtype=np.uint8)
    return [Image.fromarray(each).resize((280, 240), Image.Resampling.BICUBIC) for each in noise]


def saved(image: Image.Image, **options: object) -> Image.Image:
    content = io.BytesIO()
    image.save(content, "JPEG", **options)
    return Image.open(content).convert("RGB")


def test_near_duplicates(photos: list[Image.Image], monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [
        photos[0].resize((90, 80)),
        saved(photos[1], quality=40),
        ImageEnhance.Brightness(photos[2]).enhance(1.04),
        photos[3].crop((2, 2, 278, 238)),
    ]
    different = [
        ImageOps.mirror(photos[4]),
        Image.merge("RGB", photos[5].split()[::-1]),
        photos[6].crop((60, 0, 280, 180)),
    ]
    plain = [Image.new("RGB", (50, 40), colour) for colour in ("red", "blue", "white", "white")]
    hashes = [visual_hash(each) for each in (*photos, *changed, *different, *plain)]
    expected = [[0, 10], [1, 11], [2, 12], [3, 13], [19, 20]]
    assert near_duplicates(hashes).tolist() == expected
    monkeypatch.setattr("shortlist.data.near_duplicates._TILE", 2)
    assert near_duplicates(hashes).tolist() == expected
    assert near_duplicates([]).shape == (0, 2)


def test_all_hashes_within_the_distance_are_found() -> None:
    """The result is compared with all pairs, many of which differ in about seven bits."""
    random, thumbnail = np.random.default_rng(0), np.zeros(192, dtype=np.uint8)
    bits = np.repeat(random.random((20, 64)) < 0.5, 6, axis=0) ^ (random.random((120, 64)) < 0.06)
    hashes = [VisualHash(np.packbits(each).view(np.uint64)[0], thumbnail) for each in bits]
    distance = (bits[:, None] != bits).sum(2)
    expected = np.argwhere(np.triu(distance <= MAX_DISTANCE, 1)).tolist()
    assert 20 < len(expected) < np.triu(distance <= 12, 1).sum()
    assert near_duplicates(hashes).tolist() == expected


def test_look_alikes_across_classes_and_splits(photos: list[Image.Image], tmp_path: Path) -> None:
    """Rows: the file, its class, its split and the picture."""
    rows = [("0", "a", "train", 0), ("1", "a", "train", 0), ("2", "a", "test", 0), ("3", "b", "train", 1)]
    rows += [("4", "c", "train", 1), ("5", "c", "validation", 2), ("6", "d", "test", 2), ("7", "d", "test", 3)]
    for quality, (name, _, _, photo) in enumerate(rows, start=80):
        photos[photo].save(tmp_path / f"{name}.jpg", quality=quality)
    shutil.copy(tmp_path / "7.jpg", tmp_path / "8.jpg")  # the same bytes in two classes
    shutil.copy(tmp_path / "3.jpg", tmp_path / "9.jpg")  # a training image among the test images of its class
    rows += [("8", "a", "test", 3), ("9", "b", "test", 1)]
    table = [f"{name}.jpg,{label},{split}" for name, label, split, _ in rows]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *table]))
    report = check(open_catalog(tmp_path / "t.csv"))
    assert report.duplicates == (("7.jpg", "8.jpg"),)
    found = {(each.one[0], each.other[0]): each.leak for each in report.look_alikes}
    assert found == {
        ("0", "2"): True,
        ("1", "2"): True,
        ("3", "9"): True,
        ("4", "9"): True,
        ("3", "4"): False,
        ("5", "6"): False,
    }
    assert [each.leak for each in report.look_alikes] == [True] * 4 + [False] * 2
    assert [pair for pair, _ in find_look_alikes(open_catalog(tmp_path / "t.csv"))][:2] == [(0, 2), (1, 2)]
