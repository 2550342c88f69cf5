"""Cars196 and Omniglot in all layouts, as miniatures and, if available, the real data."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from shortlist.data import Catalog, load_image, open_catalog
from shortlist.data.benchmarks import benchmark, omniglot
from shortlist.errors import DataError
from tests.data.pictures import REAL_IMAGES, picture, pixels, write
from tests.miniatures import annotations, strings

# Cars196

CLASSES = [119, 1, 98, 99, 196, 1, 119, 42]  # unordered, as in the real benchmark
NAMES = [f"Maker Model {number} 2012" for number in range(1, 197)]


@pytest.fixture
def original(tmp_path: Path) -> Path:
    root = tmp_path / "cars"
    paths = [f"car_ims/{index + 1:06}.jpg" for index in range(len(CLASSES))]
    for index, path in enumerate(paths):
        write(root / path, picture(seed=index))
    table = annotations(relative_im_path=paths, **{"class": CLASSES}, test=[0, 1] * 4)
    savemat(root / "cars_annos.mat", {"annotations": table, "class_names": strings(NAMES)})
    return root


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    root = tmp_path / "newer"
    (root / "devkit").mkdir(parents=True)
    for part, classes, file in (
        ("cars_train", CLASSES[:4], "cars_train_annos.mat"),
        ("cars_test", CLASSES[4:], "cars_test_annos_withlabels.mat"),
    ):
        names = [f"{index + 1:05}.jpg" for index in range(4)]
        for index, name in enumerate(names):
            write(root / part / name, picture(seed=index + len(part)))
        table = annotations(**{"class": classes}, fname=names)
        savemat(root / "devkit" / file, {"annotations": table})
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": strings(NAMES)})
    return root


def check_classes(catalog: Catalog) -> None:
    assert (catalog.labels + 1).tolist() == CLASSES
    assert catalog.splits.tolist() == ["train" if number <= 98 else "test" for number in CLASSES]
    assert all(catalog.file(index).is_file() for index in range(len(catalog)))


def refused(name: str, root: Path, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_catalog(name, root=root)
    assert "\n" not in str(caught.value)


def test_the_original_layout(original: Path):
    catalog = open_catalog("cars196", root=original)
    check_classes(catalog)
    assert catalog.paths[0] == "car_ims/000001.jpg"
    assert catalog.class_names == tuple(NAMES)


@pytest.mark.parametrize("devkit", ["devkit", "."])
def test_the_newer_layout(newer: Path, devkit: str):
    if devkit == ".":
        for file in (newer / "devkit").iterdir():
            file.rename(newer / file.name)
    catalog = open_catalog("cars196", root=newer)
    check_classes(catalog)
    assert catalog.paths[[0, 4]].tolist() == ["cars_train/00001.jpg", "cars_test/00001.jpg"]
    assert catalog.class_names == tuple(NAMES)


def test_without_names_classes_are_numbers(newer: Path):
    (newer / "devkit" / "cars_meta.mat").unlink()
    catalog = open_catalog("cars196", root=newer)
    assert catalog.class_names[:2] == ("class 001", "class 002")
    assert len(catalog.class_names) == 196
    check_classes(catalog)


def test_cars_that_are_missing(original: Path, newer: Path):
    (original / "car_ims" / "000003.jpg").unlink()
    refused(
        "cars196", original, r"cars196: 1 of 8 images is missing in .*: car_ims/000003.jpg\. .*`on_missing=\"skip\"`"
    )
    catalog = open_catalog("cars196", root=original, on_missing="skip")
    assert catalog.missing == ("car_ims/000003.jpg",)
    assert (catalog.labels + 1).tolist() == [*CLASSES[:2], *CLASSES[3:]]
    (newer / "cars_test" / "00001.jpg").unlink()
    refused("cars196", newer, "1 of 8 images is missing in .*: cars_test/00001.jpg")


def test_cars_in_another_place(original: Path, newer: Path):
    for root, inside in ((original, "car_ims"), (newer, "cars_train"), (newer, "devkit")):
        refused(
            "cars196",
            root / inside,
            rf"does not contain cars_annos.mat .*; {root} looks like the right folder: set `root`",
        )
    refused("cars196", original.parent, r"does not contain .*; .*/cars looks like the right folder: set `root` to it")
    elsewhere = original / "empty" / "deeper"
    elsewhere.mkdir(parents=True)
    refused("cars196", elsewhere, r"the devkit's \.mat files; .*/cars looks like the right folder")
    deeper = elsewhere / "still"
    deeper.mkdir()
    refused("cars196", deeper, r"the devkit's \.mat files \(shortlist data about cars196\)\.$")  # too far for a hint


def test_parts_of_cars_that_are_missing(original: Path, newer: Path):
    shutil.rmtree(original / "car_ims")
    refused("cars196", original, r"cars_annos.mat exists, but the folder car_ims with the images is not next to it")
    labels = newer / "devkit" / "cars_test_annos_withlabels.mat"
    labels.rename(labels.with_name("cars_test_annos.mat"))
    refused("cars196", newer, r"no cars_test_annos_withlabels.mat in .* cars_test_annos.mat is not sufficient")
    shutil.rmtree(newer / "cars_train")
    refused("cars196", newer, r"no folder cars_train in")


def test_damaged_annotations(original: Path):
    file = original / "cars_annos.mat"
    file.write_bytes(file.read_bytes()[:400])
    refused("cars196", original, r"cannot read .*cars_annos.mat")
    file.write_text("<!DOCTYPE html><html>Not found</html>")
    refused("cars196", original, r"cars_annos.mat is a web page")
    savemat(file, {"annotations": annotations(fname=["000001.jpg"])})
    refused("cars196", original, r"no field 'relative_im_path' in its annotations \(it has: bbox_x1, .*, fname\)")
    savemat(file, {"something": np.zeros(3)})
    refused("cars196", original, r"it has: no annotations")
    savemat(file, {"annotations": annotations(relative_im_path=["car_ims/000001.jpg"], **{"class": [0]})})
    refused("cars196", original, r"must be numbers from 1 to 196")
    savemat(file, {"annotations": annotations(relative_im_path=["car_ims/000001.jpg"], **{"class": ["Audi"]})})
    refused("cars196", original, r"must be numbers from 1 to 196")
    savemat(file, {"annotations": annotations(relative_im_path=[1, 2], **{"class": [1, 2]})})
    refused("cars196", original, r"the field 'relative_im_path' of .* must contain image names")
    savemat(file, {"annotations": 5})
    refused("cars196", original, r"it has: no annotations")
    twice = annotations(relative_im_path=["car_ims/000001.jpg"] * 2, **{"class": [1, 2]})
    savemat(file, {"annotations": twice, "class_names": strings(["a", "a"])})
    refused("cars196", original, r"the same name for two classes")
    few = {
        "annotations": annotations(relative_im_path=["car_ims/000001.jpg"], **{"class": [3]}),
        "class_names": strings(["a"]),
    }
    savemat(file, few)
    refused("cars196", original, r"names 1 classes, but an image has class 3")


@pytest.mark.skipif(not (REAL_IMAGES / "cars196").is_dir(), reason="no cars196 in SHORTLIST_REAL_IMAGES")
def test_the_real_cars():
    refused("cars196", REAL_IMAGES / "cars196", r"29 of 16185 images are missing in .* and 26 more")
    catalog = open_catalog("cars196", root=REAL_IMAGES / "cars196", on_missing="skip")
    assert catalog.remarks == ()  # the list is complete, although 29 files are missing
    assert len(catalog) == 16156
    assert len(catalog.missing) == 29
    assert len(catalog.class_names) == 196
    assert catalog.class_names[0] == "AM General Hummer SUV 2000"
    train, test = catalog.split("train"), catalog.split("test")
    assert train.classes().tolist() == list(range(98))
    assert test.classes().tolist() == list(range(98, 196))
    missing = [int(path[-10:-4]) for path in catalog.missing]
    everything = sorted([int(path[-10:-4]) for path in catalog.paths] + missing)
    assert everything == list(range(1, 16186))
    assert len(train) + len(test) == 16156
    assert abs(len(train) - 8054) <= 29
    assert load_image(catalog.file(0)).mode == "RGB"


# Omniglot


def drawing(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((105, 105)) > 0.1  # True = paper


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    root = tmp_path / "omniglot"
    root.mkdir()
    for part, classes, seed in (("images_background", 3, 0), ("images_evaluation", 2, 100)):
        images = np.stack([drawing(seed + i) for i in range(classes * 4)]).reshape(classes, 4, 105, 105)
        np.savez_compressed(root / f"{part}.npz", images=images, labels=np.repeat(np.arange(classes), 4).reshape(-1, 4))
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_omniglot_from_arrays(arrays: Path):
    steps: list[tuple[int, int]] = []
    catalog = open_catalog("omniglot", root=arrays, progress=lambda *step: steps.append(step))
    assert steps == [(number, 20) for number in range(1, 21)]
    assert catalog.class_names == (
        "background/0000",
        "background/0001",
        "background/0002",
        "evaluation/0000",
        "evaluation/0001",
    )
    assert catalog.labels.tolist() == [label for label in range(5) for _ in range(4)]
    assert catalog.splits.tolist() == ["train"] * 12 + ["test"] * 8
    for index, seed in enumerate([*range(12), *range(100, 108)]):
        with Image.open(catalog.file(index)) as image:
            assert (image.mode, image.size) == ("L", (105, 105))
            assert (pixels(image) == drawing(seed) * 255).all()


def test_omniglot_is_unpacked_once(arrays: Path, cache: Path):
    first = open_catalog("omniglot", root=arrays)
    times = {file: file.stat().st_mtime_ns for file in cache.rglob("*.png")}
    assert len(times) == 20

    def refuse(done: int, total: int) -> None:
        raise AssertionError("unpacked again")

    again = open_catalog("omniglot", root=arrays, progress=refuse)
    assert again.fingerprint() == first.fingerprint()
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.png")} == times


def test_other_arrays_are_not_confused(arrays: Path):
    first = open_catalog("omniglot", root=arrays)
    images = np.stack([drawing(50 + i) for i in range(12)]).reshape(3, 4, 105, 105)
    labels = np.repeat(np.arange(3), 4).reshape(3, 4)
    np.savez_compressed(arrays / "images_background.npz", images=images, labels=labels)
    second = open_catalog("omniglot", root=arrays)
    assert first.paths.tolist() == second.paths.tolist()
    assert first.root != second.root
    assert pixels(load_image(first.file(0))).tolist() != pixels(load_image(second.file(0))).tolist()


def test_an_interrupted_unpacking_leaves_nothing(arrays: Path, cache: Path):
    def interrupt(done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_catalog("omniglot", root=arrays, progress=interrupt)
    assert [file for file in cache.rglob("*") if file.is_file()] == []
    assert len(open_catalog("omniglot", root=arrays)) == 20


def test_a_cache_with_missing_files(arrays: Path):
    catalog = open_catalog("omniglot", root=arrays)
    catalog.file(3).unlink()
    refused("omniglot", arrays, "1 of 20 images is missing in .*cache")
    assert len(open_catalog("omniglot", root=arrays, on_missing="skip")) == 19


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    root = tmp_path / "folders"
    for part, alphabet in (("images_background", "Greek"), ("images_evaluation", "Ge_ez")):
        for character in ("character01", "character02"):
            for number in (1, 2):
                image = Image.fromarray(drawing(number)).convert("1")
                write(root / part / alphabet / character / f"0001_0{number}.png", image)
    (root / "images_background" / "Greek" / "character01" / "._0001_01.png").touch()  # macOS creates such files
    return root


def test_omniglot_from_folders(folders: Path):
    catalog = open_catalog("omniglot", root=folders)
    assert catalog.class_names == (
        "Ge_ez/character01",
        "Ge_ez/character02",
        "Greek/character01",
        "Greek/character02",
    )
    train, test = catalog.split("train"), catalog.split("test")
    assert train.labels.tolist() == [2, 2, 3, 3]
    assert test.labels.tolist() == [0, 0, 1, 1]
    assert train.paths[0] == "images_background/Greek/character01/0001_01.png"
    values = pixels(load_image(train.file(0)))
    assert (values == drawing(1)[..., None] * 255).all()


def test_omniglot_in_another_place(arrays: Path, folders: Path):
    refused("omniglot", folders.parent, r"does not contain images_background .*; .* looks like the right folder")
    refused("omniglot", folders / "images_background", r"does not contain .*; .*folders looks like the right folder")
    (arrays / "images_evaluation.npz").unlink()
    refused("omniglot", arrays, r"it only contains images_background.npz")
    shutil.rmtree(folders / "images_evaluation" / "Ge_ez")
    refused("omniglot", folders, r"no images in .*images_evaluation; expected files such as Alphabet/character01")


def test_a_class_in_both_splits(folders: Path):
    shutil.copytree(folders / "images_background" / "Greek", folders / "images_evaluation" / "Greek")
    refused("omniglot", folders, r"2 classes, such as Greek/character01, are in both the training and the test list")


def test_damaged_arrays(arrays: Path, cache: Path):
    file = arrays / "images_evaluation.npz"
    good = file.read_bytes()
    labels = np.zeros((2, 4), dtype=int)
    file.write_bytes(good[: len(good) // 2])
    refused("omniglot", arrays, "cannot read .*images_evaluation.npz")
    np.savez(file, labels=labels)
    refused("omniglot", arrays, "has no array 'images'")
    np.savez(file, images=np.zeros((2, 3, 105, 105), dtype=bool), labels=labels)
    refused("omniglot", arrays, r"labels of shape \(2, 4\); expected black and white images")
    np.savez(file, images=np.zeros((2, 4, 105, 105)), labels=labels)
    refused("omniglot", arrays, r"contains float64 images")
    np.savez(file, images=np.zeros((2, 4, 105, 105), dtype=bool), labels=labels - 1)
    refused("omniglot", arrays, "must be non-negative integers")
    np.savez(file, images=np.array([{}], dtype=object), labels=np.array([{}], dtype=object))
    refused("omniglot", arrays, "cannot read")  # pickled arrays are not loaded
    assert [left for left in cache.rglob("*") if left.is_file()] == []


@pytest.mark.skipif(not (REAL_IMAGES / "omniglot").is_dir(), reason="no omniglot in SHORTLIST_REAL_IMAGES")
def test_the_real_omniglot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The images are not unpacked, since writing 32,460 files takes half a minute."""
    unpacked: list[Path] = []
    monkeypatch.setattr(omniglot, "_unpack", lambda root, folder, progress: unpacked.append(folder))
    monkeypatch.setattr(benchmark, "without_missing", lambda catalog, on_missing: catalog)
    catalog = open_catalog("omniglot", root=REAL_IMAGES / "omniglot")
    assert len(unpacked) == 1
    assert catalog.remarks == ()
    assert len(catalog) == 32460
    assert len(catalog.split("train").classes()) == 964
    assert len(catalog.split("test").classes()) == 659
    assert set(catalog.class_sizes().tolist()) == {20}
    images, labels = omniglot._read_images(REAL_IMAGES / "omniglot" / "images_background.npz")
    assert images.shape == (19280, 105, 105)
    assert 0.9 < images[:100].mean() < 1  # mostly paper
    assert labels[[0, 19, 20]].tolist() == [0, 0, 1]
