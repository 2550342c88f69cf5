"""`open_collection` opens images with or without labels: any folder, a table, an image file, a benchmark."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shortlist.data import Catalog, open_catalog, open_collection
from shortlist.errors import ConfigError, DataError
from tests.data.pictures import class_folders, write


def found(catalog: Catalog) -> dict[str, str]:
    """Return the label of each path."""
    return {path: catalog.class_names[label] for path, label in zip(catalog.paths, catalog.labels, strict=True)}


def test_one_sub_folder_per_class(tmp_path: Path) -> None:
    class_folders(tmp_path, {"bolt": 2, "nut": 1})
    catalog = open_collection(tmp_path)
    assert found(catalog) == {"bolt/0.jpg": "bolt", "bolt/1.jpg": "bolt", "nut/0.jpg": "nut"}
    assert catalog.name == tmp_path.name
    assert set(catalog.splits) == {""}


def test_images_at_any_depth(tmp_path: Path) -> None:
    for name in ("a.png", "bolt/b.PNG", "bolt/deep/er/c.png", ".hidden/d.png", "bolt/.e.png"):
        write(tmp_path / name, format="PNG")
    (tmp_path / "bolt" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    expected = {"a.png": "", "bolt/b.PNG": "bolt", "bolt/deep/er/c.png": "bolt"}
    assert found(open_collection(str(tmp_path))) == expected
    (tmp_path / "bolt" / "loop").symlink_to(tmp_path)
    assert found(open_collection(tmp_path)) == expected
    with pytest.raises(DataError, match="directly in"):  # training needs one sub-folder per class
        open_catalog(tmp_path)


def test_split_folders(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", {"bolt": 2})
    class_folders(tmp_path / "val", {"nut": 1})
    catalog = open_collection(tmp_path)
    assert found(catalog) == {"train/bolt/0.jpg": "bolt", "train/bolt/1.jpg": "bolt", "val/nut/0.jpg": "nut"}
    assert found(open_collection(tmp_path, split="validation")) == {"val/nut/0.jpg": "nut"}
    with pytest.raises(DataError, match="has no test images"):
        open_collection(tmp_path, split="test")
    with pytest.raises(ConfigError, match="did you mean 'test'"):
        open_collection(tmp_path, split="tests")


def test_images_directly_in_a_folder_named_train(tmp_path: Path) -> None:
    write(tmp_path / "train" / "0.png")
    assert found(open_collection(tmp_path)) == {"train/0.png": "train"}


def test_names_that_are_not_utf8_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff.png")
    try:
        write(tmp_path / "a.png", format="PNG").rename(file)
    except OSError:
        pytest.skip("the file system does not allow such names")
    with pytest.raises(DataError, match="is not valid UTF-8"):
        open_collection(tmp_path)
    write(tmp_path / "é.png", format="PNG")
    catalog = open_collection(tmp_path)
    assert (list(catalog.paths), catalog.missing) == (["é.png"], (file.name,))


def test_one_image(tmp_path: Path) -> None:
    file = write(tmp_path / "a b.png")
    catalog = open_collection(file)
    assert found(catalog) == {"a b.png": ""}
    assert catalog.file(0) == file


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("path\na.png\nb.png\n", ["", ""]),
        ("path,label\na.png,bolt\nb.png,\n", ["bolt", ""]),
        ("label,path\nbolt,a.png\nnut,b.png\n", ["bolt", "nut"]),
    ],
)
def test_a_table_needs_no_labels(tmp_path: Path, text: str, labels: list[str]) -> None:
    (tmp_path / "table.csv").write_text(text)
    catalog = open_collection(tmp_path / "table.csv")  # files are not checked until they are read
    assert list(found(catalog).values()) == labels
    assert open_collection(tmp_path / "table.csv", root=tmp_path / "x").file(0) == tmp_path / "x" / "a.png"
    if "" in labels:
        with pytest.raises(DataError, match="label"):
            open_catalog(tmp_path / "table.csv")


def test_a_benchmark(tmp_path: Path) -> None:
    everything, test = open_collection("glyphs"), open_collection("glyphs", split="test")
    assert len(everything) == 4800
    assert len(test) == 2400


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No images in"):
        open_collection(tmp_path)
    with pytest.raises(DataError, match="did you mean 'glyphs'"):
        open_collection("glyps")
    with pytest.raises(DataError, match=r"nothing/here does not exist"):
        open_collection("nothing/here")
    with pytest.raises(ConfigError, match="`root` has no effect"):
        open_collection(tmp_path, root=tmp_path)
    (tmp_path / "table.csv").write_text("file\na.png\n")
    with pytest.raises(DataError, match="has no column path"):
        open_collection(tmp_path / "table.csv")
