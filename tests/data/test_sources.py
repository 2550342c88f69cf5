"""`open_catalog` and `open_collection` open folders, tables and benchmarks, or raise errors that say what to do."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shortlist.data import Catalog, half_validation, open_catalog, open_collection
from shortlist.data.missing_files import absent_files
from shortlist.errors import ConfigError, DataError
from tests.data.pictures import class_folders, write

# Folders


def test_one_folder_per_class(tmp_path: Path):
    catalog = open_catalog(class_folders(tmp_path / "toys", {"car": 2, "ball": 3, "kite": 1}))
    assert catalog.name == "toys"
    assert catalog.class_names == ("ball", "car", "kite")
    assert catalog.paths.tolist() == ["ball/0.jpg", "ball/1.jpg", "ball/2.jpg", "car/0.jpg", "car/1.jpg", "kite/0.jpg"]
    assert catalog.labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert catalog.splits.tolist() == ["train"] * 5 + ["test"]  # half of 3 classes, rounded up
    assert catalog.roles is None
    assert all(catalog.file(i).is_file() for i in range(len(catalog)))


def test_spaces_umlauts_and_upper_case(tmp_path: Path):
    root = tmp_path / "meine schönen Bilder"
    write(root / "Straßen bahn" / "Über Größe.JPG")
    write(root / "日本 語" / "ä.PNG")
    catalog = open_catalog(str(root))
    assert catalog.class_names == ("Straßen bahn", "日本 語")
    assert catalog.paths.tolist() == ["Straßen bahn/Über Größe.JPG", "日本 語/ä.PNG"]
    assert all(catalog.file(i).is_file() for i in range(2))


def test_hidden_and_other_files_are_ignored(tmp_path: Path):
    root = class_folders(tmp_path, {"a": 1, "b": 1, ".thumbnails": 1})
    (root / "a" / ".DS_Store").touch()
    (root / "a" / "notes.txt").touch()
    (root / "README.md").touch()
    catalog = open_catalog(root)
    assert catalog.paths.tolist() == ["a/0.jpg", "b/0.jpg"]
    assert catalog.ignored == ("a/notes.txt",)


def test_symbolic_links_are_followed(tmp_path: Path):
    root = class_folders(tmp_path / "toys", {"a": 2})
    elsewhere = class_folders(tmp_path / "elsewhere", {"b": 2})
    (root / "b").symlink_to(elsewhere / "b")
    (root / "a" / "2.jpg").symlink_to(elsewhere / "b" / "0.jpg")
    assert open_catalog(root).labels.tolist() == [0, 0, 0, 1, 1]


def test_share_and_seed_of_the_split(tmp_path: Path):
    root = class_folders(tmp_path, {"a": 1, "b": 1, "c": 1, "d": 1})
    assert open_catalog(root, train_share=0.75).splits.tolist() == ["train"] * 3 + ["test"]
    splits = {tuple(open_catalog(root, split_seed=seed).splits.tolist()) for seed in range(8)}
    assert len(splits) > 1


def test_train_and_test_folders_are_splits(tmp_path: Path):
    for split, sizes in {"train": {"a": 2, "b": 1}, "val": {"c": 1}, "test": {"a": 1, "d": 1}}.items():
        class_folders(tmp_path / split, sizes)
    catalog = open_catalog(tmp_path)
    assert catalog.class_names == ("a", "b", "c", "d")
    table = {
        (p, catalog.class_names[n], s) for p, n, s in zip(catalog.paths, catalog.labels, catalog.splits, strict=True)
    }
    assert table == {
        ("train/a/0.jpg", "a", "train"),
        ("train/a/1.jpg", "a", "train"),
        ("train/b/0.jpg", "b", "train"),
        ("val/c/0.jpg", "c", "validation"),
        ("test/a/0.jpg", "a", "test"),
        ("test/d/0.jpg", "d", "test"),
    }


def test_a_class_may_be_named_train(tmp_path: Path):
    catalog = open_catalog(class_folders(tmp_path, {"train": 2, "bus": 2}))
    assert catalog.class_names == ("bus", "train")
    assert catalog.paths.tolist() == ["bus/0.jpg", "bus/1.jpg", "train/0.jpg", "train/1.jpg"]


def refused(source: Path | str, message: str, **options: object) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_catalog(source, **options)
    assert "\n" not in str(caught.value)


def test_an_empty_folder(tmp_path: Path):
    refused(tmp_path, r"No class folders in .*: it is empty; expected one sub-folder per class")


def test_images_without_class_folders(tmp_path: Path):
    write(tmp_path / "1.jpg")
    refused(tmp_path, r"1 images are directly in it; expected one sub-folder per class")
    class_folders(tmp_path, {"a": 1, "b": 1})
    refused(tmp_path, r"1 images are directly in .*, beside the class folders")


def test_folders_too_deep(tmp_path: Path):
    class_folders(tmp_path / "vehicles", {"a": 1, "b": 1})
    refused(tmp_path, r"The class folder 'vehicles' .* contains folders \(a, b\); expected one sub-folder per class")
    class_folders(tmp_path / "train", {"c": 1})
    refused(tmp_path, r"contains folders")  # train/ is a split only if all other folders are splits


def test_images_directly_in_a_split(tmp_path: Path):
    class_folders(tmp_path / "train", {"a": 1})
    write(tmp_path / "test" / "0.jpg")
    refused(tmp_path, r"1 images are directly in .*test; expected")


def test_val_and_validation(tmp_path: Path):
    class_folders(tmp_path / "val", {"a": 1})
    class_folders(tmp_path / "validation", {"a": 1})
    refused(tmp_path, "both val/ and validation/")


def test_one_class_cannot_be_split(tmp_path: Path):
    root = class_folders(tmp_path / "toys", {"only": 3})
    refused(root, "toys has 1 class, but at least two are needed")
    assert open_catalog(root, train_share=1).splits.tolist() == ["train"] * 3


def test_classes_without_images(tmp_path: Path):
    root = class_folders(tmp_path, {"a": 1, "b": 1, "nothing": 0})
    refused(root, r"1 class folders in .* have no images: nothing/. .* `on_missing=\"skip\"`")
    catalog = open_catalog(root, on_missing="skip")
    assert catalog.class_names == ("a", "b")
    assert catalog.missing == ("nothing/",)
    refused(class_folders(tmp_path / "x", {"a": 0, "b": 0}), r"No images in .*: its folders \(a/, b/\) contain none")


def test_root_is_rejected_for_a_folder(tmp_path: Path):
    with pytest.raises(ConfigError, match="`root` has no effect for"):
        open_catalog(class_folders(tmp_path, {"a": 1, "b": 1}), root=tmp_path)


# Tables


def csv_file(folder: Path, *lines: str, name: str = "table.csv", encoding: str = "utf-8") -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding=encoding)
    return file


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    return class_folders(tmp_path, {"pics": 4})


def test_a_csv_file(toys: Path):
    file = csv_file(
        toys,
        "label,colour,path,split,role",
        "car,red,pics/0.jpg,train,",
        '"ball, big",blue,pics/1.jpg,val,',
        "",
        "kite,,pics/2.jpg,test,query",
        "kite,,./pics//3.jpg,test,gallery",
    )
    catalog = open_catalog(file)
    assert catalog.name == "table"
    assert catalog.class_names == ("ball, big", "car", "kite")
    assert catalog.paths.tolist() == ["pics/0.jpg", "pics/1.jpg", "pics/2.jpg", "pics/3.jpg"]
    assert [catalog.class_names[label] for label in catalog.labels] == ["car", "ball, big", "kite", "kite"]
    assert catalog.splits.tolist() == ["train", "validation", "test", "test"]
    assert catalog.roles is not None
    assert catalog.roles.tolist() == ["", "", "query", "gallery"]
    assert all(catalog.file(i).is_file() for i in range(4))


def test_a_table_without_splits_is_split_by_class(toys: Path):
    file = csv_file(toys, "path,label", *(f"pics/{i}.jpg,{'ba'[i % 2]}" for i in range(4)))
    assert open_catalog(file).splits.tolist() == ["test", "train", "test", "train"]
    assert open_catalog(file, train_share=1).splits.tolist() == ["train"] * 4


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_and_umlauts(tmp_path: Path, encoding: str):
    write(tmp_path / "Fotos älter" / "Grün 1.jpg")
    file = csv_file(tmp_path, "path,label", "Fotos älter/Grün 1.jpg,Bäume", encoding=encoding)
    catalog = open_catalog(file, train_share=1)
    assert catalog.class_names == ("Bäume",)
    assert catalog.file(0).is_file()


def test_paths_may_be_relative_to_a_root_or_absolute(tmp_path: Path, toys: Path):
    (tmp_path / "lists").mkdir()
    file = csv_file(tmp_path / "lists", "path,label", "pics/0.jpg,a", f"{toys.absolute().as_posix()}/pics/1.jpg,b")
    catalog = open_catalog(file, root=toys)
    assert all(catalog.file(i).is_file() for i in range(2))
    refused(file, "1 of 2 images is missing in .*lists: pics/0.jpg")


def test_parquet_and_csv_give_the_same_catalog(toys: Path):
    columns = {
        "path": [f"pics/{i}.jpg" for i in range(4)],
        "label": ["7", "7", "12", "ü"],
        "split": ["train", "train", "validation", "test"],
        "role": ["", "", "query", "gallery"],
    }
    pq.write_table(pa.table({**columns, "extra": [1.5] * 4}), toys / "table.parquet")
    rows = [",".join(row) for row in zip(*columns.values(), strict=True)]
    from_csv, from_parquet = (
        open_catalog(csv_file(toys, ",".join(columns), *rows)),
        open_catalog(toys / "table.parquet"),
    )
    assert from_csv.fingerprint() == from_parquet.fingerprint()
    other = open_catalog(csv_file(toys, ",".join(columns), *rows[::-1]))
    assert other.fingerprint() != from_parquet.fingerprint()


def test_labels_may_be_numbers(toys: Path):
    pq.write_table(pa.table({"path": ["pics/0.jpg", "pics/1.jpg"], "label": [3, 5]}), toys / "table.parquet")
    assert open_catalog(toys / "table.parquet").class_names == ("3", "5")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"table.csv has no column path, label; its columns: none"),
        (["path,label"], r"table.csv has no rows"),
        (["path,class", "pics/0.jpg,a"], r"has no column label; its columns: path, class"),
        (["path;label", "pics/0.jpg;a"], r"not separated by commas: its first line is 'path;label'; write the header"),
        (["path,label,label", "pics/0.jpg,a,b"], r"column label more than once"),
        (["path,label", "pics/0.jpg,a", "pics/1.jpg"], r"table.csv, line 3: 1 values for 2 columns"),
        (["path,label", "pics/0.jpg,a", "", ",b"], r"table.csv, line 4: the path is empty"),
        (["path,label", "pics/0.jpg, "], r"table.csv, line 2: the label is empty"),
        (["path,label,split", "pics/0.jpg,a,tset"], r"line 2: split 'tset' is not one of .*; did you mean 'test'\?"),
        (["path,label,role", "pics/0.jpg,a,querry"], r"line 2: role 'querry' .* did you mean 'query'\?"),
        (["path,label,split", "pics/0.jpg,a,test", "pics/1.jpg,a,"], r"line 3: the split is empty, .* \(1 such rows\)"),
        (["path,label", "pics/0.jpg,a", "./pics/0.jpg,b"], r"line 3: pics/0.jpg is already listed in line 2"),
    ],
)
def test_a_bad_csv_file(toys: Path, lines: list[str], message: str):
    refused(csv_file(toys, *lines), message)


def test_a_csv_file_in_another_encoding(toys: Path):
    refused(csv_file(toys, "path,label", "pics/0.jpg,Bäume", encoding="latin-1"), "as a CSV file in UTF-8")


def test_bad_parquet_files(toys: Path):
    file = toys / "table.parquet"
    file.write_text("path,label\npics/0.jpg,a\n")
    refused(file, r"Cannot read .*table.parquet as a Parquet file")
    pq.write_table(pa.table({"path": ["pics/0.jpg", "pics/1.jpg"], "label": ["a", None]}), file)
    refused(file, r"table.parquet, row 2: the label is empty")
    pq.write_table(pa.table({"path": ["pics/0.jpg"], "klass": ["a"]}), file)
    refused(file, r"has no column label; its columns: path, klass")


def test_missing_files_are_an_error_or_skipped(toys: Path):
    rows = [f"pics/{i}.jpg,{'ab'[i % 2]}" for i in range(10)]
    file = csv_file(toys, "path,label", *rows)
    refused(
        file,
        r"6 of 10 images are missing in .*: pics/4.jpg, pics/5.jpg, pics/6.jpg and 3 more\. .*`on_missing=\"skip\"`",
    )
    catalog = open_catalog(file, on_missing="skip")
    assert catalog.paths.tolist() == [f"pics/{i}.jpg" for i in range(4)]
    assert catalog.missing == tuple(f"pics/{i}.jpg" for i in range(4, 10))
    refused(
        file, r"none of its 10 images exists in .*Check that `root` is right", root=toys / "pics", on_missing="skip"
    )


def test_folders_and_broken_links_are_not_files(toys: Path):
    (toys / "pics" / "dir.jpg").mkdir()
    (toys / "pics" / "dead.jpg").symlink_to(toys / "nowhere.jpg")
    (toys / "pics" / "link.jpg").symlink_to(toys / "pics" / "0.jpg")
    paths = np.array(
        ["pics/dir.jpg", "pics/dead.jpg", "pics/link.jpg", "pics/0.jpg", "no/0.jpg", "0.jpg"], dtype=object
    )
    assert absent_files(toys, paths).tolist() == [True, True, False, False, True, True]
    strange = np.array(["x" * 5000, "a\0b/0.jpg", "pics/0.jpg/0.jpg"], dtype=object)
    assert absent_files(toys, strange).tolist() == [True, True, True]


def test_on_missing_is_error_or_skip(toys: Path):
    with pytest.raises(ConfigError, match=r"`on_missing=\"skipp\"`: did you mean 'skip'\?"):
        open_catalog(toys, on_missing="skipp")


# Names


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    refused(
        "cars169",
        r"Unknown source 'cars169': .* no benchmark has this name; did you mean 'cars196'\? \(expected a benchmark",
    )
    refused(
        "xyz",
        r"Unknown source 'xyz': the folder 'xyz' does not exist, .*; known: cars196, cub, .*omniglot, .* \(expected",
    )
    refused("./cars196", r"cars196 does not exist; expected a benchmark's name, a folder")
    refused("list.csv", r"list.csv does not exist; expected")
    (tmp_path / "notes.txt").touch()
    refused("notes.txt", "notes.txt cannot be opened as images; expected a benchmark's name, a folder")


def test_errors_of_the_operating_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused("x" * 5000, "Cannot open x+: File name too long")
    refused("cars196", "Cannot open cars196: File name too long", root="x" * 5000)

    def denied(folder: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    root = class_folders(tmp_path / "toys", {"a": 1, "b": 1})
    monkeypatch.setattr("os.scandir", denied)
    refused(root, r"Cannot list the folder .*toys: Permission denied")


def test_a_benchmark_needs_its_folder(tmp_path: Path):
    refused("cars196", r"cars196 needs its folder: set `root` to the folder that contains cars_annos.mat and car_ims/")
    refused(
        "omniglot", r"omniglot: the folder .*nowhere does not exist; `root` must contain", root=tmp_path / "nowhere"
    )


def test_a_benchmark_takes_precedence_over_a_folder_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "cars196", {"a": 1, "b": 1})
    refused("cars196", "cars196 needs its folder")
    assert open_catalog("./cars196").class_names == ("a", "b")
    class_folders(tmp_path / "mine", {"c": 1, "d": 1})
    assert open_catalog("mine").class_names == ("c", "d")


def test_each_folder_is_listed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [f"{c}/{i}.jpg" for c in range(20) for i in range(100)]
    for c in range(20):
        (tmp_path / str(c)).mkdir()
    for row in rows:
        (tmp_path / row).touch()

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise AssertionError(f"a system call for a single file: {self}")

    file = csv_file(tmp_path, "path,label", *(f"{row},{row.partition('/')[0]}" for row in rows))
    from_table = open_catalog(file)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        patch.setattr(Path, "stat", refuse)
        assert not absent_files(tmp_path, from_table.paths).any()
    assert len(open_catalog(tmp_path)) == len(from_table) == 2000


# Several labels per image, and other columns


def test_several_labels(tmp_path: Path):
    toys = class_folders(tmp_path, {"ball": 2, "car": 1})
    given = {
        "path": ["ball/0.jpg", "ball/1.jpg", "car/0.jpg"],
        "label": [["red", "ball"], ["ball"], ["car", "red", "red"]],
    }
    pq.write_table(pa.table(given), toys / "images.parquet")
    lines = ["path,label", "ball/0.jpg,red | ball", "ball/1.jpg,ball", "car/0.jpg,car|red|red"]
    (toys / "images.csv").write_text("\n".join(lines))
    for name, separator in (("images.parquet", None), ("images.csv", "|")):
        catalog = open_catalog(toys / name, label_separator=separator, train_share=1)
        assert catalog.class_names == ("ball", "car", "red")
        assert catalog.labels.tolist() == [2, 0, 1]
        assert catalog.label_sets.tolist() == [(2, 0), (0,), (1, 2)]
        assert catalog.relevance_labels.tolist() == [[2, 0], [0, -1], [1, 2]]
        assert catalog.share_label([0, 0, 1], [1, 2, 2]).tolist() == [True, True, False]
        assert catalog.subset([2, 1]).label_names(0) == ("car", "red")
    with pytest.raises(ConfigError, match=r"^`label_separator` is empty: give a separator"):
        open_catalog(toys / "images.csv", label_separator="")
    one = open_catalog(toys / "images.csv", train_share=1)
    assert (one.label_sets, one.class_names) == (None, ("ball", "car|red|red", "red | ball"))
    assert one.fingerprint() != catalog.fingerprint()


def test_images_that_share_a_label_are_in_the_same_split(tmp_path: Path):
    labels = ["a|b", "c", "d|c", "b|e", "f", "f|g"]  # {a, b, e}, {c, d}, {f, g}
    rows = "\n".join(f"{write(tmp_path / f'{number}.jpg').name},{each}" for number, each in enumerate(labels))
    (tmp_path / "images.csv").write_text(f"path,label\n{rows}")
    catalog = open_catalog(tmp_path / "images.csv", label_separator="|")
    assert catalog.splits.tolist() == ["train", "train", "train", "train", "test", "test"]
    assert half_validation(catalog).splits.tolist() == ["train", "validation", "validation", "train", "test", "test"]
    (tmp_path / "images.csv").write_text(f"path,label\n{rows}|a|c")
    with pytest.raises(DataError, match=r"1 class .all labels are linked by images with several labels.* column split"):
        open_catalog(tmp_path / "images.csv", label_separator="|")


def test_a_row_without_any_of_several_labels(toys: Path):
    (toys / "images.csv").write_text("path,label\nball/0.jpg,a|b\ncar/0.jpg, | ")
    with pytest.raises(DataError, match="line 3: the label is empty"):
        open_catalog(toys / "images.csv", label_separator="|")
    assert open_collection(toys / "images.csv", label_separator="|").class_names == ("", "a", "b")


def test_other_columns_are_fields(tmp_path: Path):
    toys = class_folders(tmp_path, {"ball": 1, "car": 1})
    (toys / "images.csv").write_text("path,sku,label,price\nball/0.jpg,A 1,ball,9.50\ncar/0.jpg,,car,7\n")
    catalog = open_catalog(toys / "images.csv")
    assert {name: each.tolist() for name, each in catalog.fields.items()} == {
        "sku": ["A 1", ""],
        "price": ["9.50", "7"],
    }
    assert catalog.subset([1]).fields["price"].tolist() == ["7"]
    given = {
        "path": ["ball/0.jpg", "car/0.jpg"],
        "label": ["ball", "car"],
        "price": [9.5, float("nan")],
        "day": [date(2026, 1, 2), None],
        "vector": [[1.0], [2.0]],
        "bytes": [b"1", b"2"],
    }
    pq.write_table(pa.table(given), toys / "images.parquet")
    fields = open_catalog(toys / "images.parquet").fields
    assert {name: each.tolist() for name, each in fields.items()} == {"price": [9.5, None], "day": ["2026-01-02", None]}


# Collections: images with or without labels


def found(catalog: Catalog) -> dict[str, str]:
    """Return the label of each path."""
    return {path: catalog.class_names[label] for path, label in zip(catalog.paths, catalog.labels, strict=True)}


def test_a_collection_with_one_sub_folder_per_class(tmp_path: Path) -> None:
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


def test_a_collection_of_split_folders(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", {"bolt": 2})
    class_folders(tmp_path / "val", {"nut": 1})
    catalog = open_collection(tmp_path)
    assert found(catalog) == {"train/bolt/0.jpg": "bolt", "train/bolt/1.jpg": "bolt", "val/nut/0.jpg": "nut"}
    assert found(open_collection(tmp_path, split="validation")) == {"val/nut/0.jpg": "nut"}
    with pytest.raises(DataError, match="has no test images"):
        open_collection(tmp_path, split="test")
    with pytest.raises(ConfigError, match="did you mean 'test'"):
        open_collection(tmp_path, split="tests")


def test_a_collection_of_images_directly_in_a_folder_named_train(tmp_path: Path) -> None:
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


def test_a_collection_of_one_image(tmp_path: Path) -> None:
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
def test_the_table_of_a_collection_needs_no_labels(tmp_path: Path, text: str, labels: list[str]) -> None:
    (tmp_path / "table.csv").write_text(text)
    catalog = open_collection(tmp_path / "table.csv")  # files are not checked until they are read
    assert list(found(catalog).values()) == labels
    assert open_collection(tmp_path / "table.csv", root=tmp_path / "x").file(0) == tmp_path / "x" / "a.png"
    if "" in labels:
        with pytest.raises(DataError, match="label"):
            open_catalog(tmp_path / "table.csv")


def test_a_benchmark_as_a_collection(tmp_path: Path) -> None:
    everything, test = open_collection("glyphs"), open_collection("glyphs", split="test")
    assert len(everything) == 4800
    assert len(test) == 2400


def test_collections_that_cannot_be_opened(tmp_path: Path) -> None:
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
