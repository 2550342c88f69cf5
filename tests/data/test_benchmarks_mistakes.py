"""Common mistakes in a benchmark's folder: the error says what is expected and where."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from shortlist.data import BENCHMARKS, open_catalog
from shortlist.errors import DataError
from tests.data.pictures import class_folders
from tests.miniatures import lines, miniature

NAMES = sorted(set(BENCHMARKS) - {"glyphs"})
LISTS = {  # one text file that each benchmark reads
    "sop": "Ebay_test.txt",
    "inaturalist": "Inat_dataset_splits/Inaturalist_test_set1.txt",
    "vehicleid-medium": "train_test_split/test_list_1600.txt",
    "vehicleid-small-reid": "train_test_split/train_list.txt",
    "cub": "image_class_labels.txt",
    "inshop": "list_eval_partition.txt",
    "gldv1": "train.csv",
    "gldv2-clean": "train_clean.csv",
    "r1m": "revisitop1m.txt",
}
PICKLES = {
    "roxford5k": "gnd_roxford5k.pkl",
    "rparis6k": "gnd_rparis6k.pkl",
    "sfm120k-val": "retrieval-SfM-120k-val-eccv2020.pkl",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))


def refused(name: str, root: Path | None, *parts: str, on_missing: str = "error") -> None:
    """Assert that opening the benchmark raises a message of one line that contains all parts."""
    with pytest.raises(DataError) as caught:
        open_catalog(name, root=root, on_missing=on_missing)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def small(name: str, folder: Path) -> Path:
    return miniature(name, folder / "data" / name, 2, 2)


# The folder


@pytest.mark.parametrize("name", NAMES)
def test_no_folder(name: str, tmp_path: Path):
    refused(name, None, f"{name} needs its folder: set `root` to the folder that contains {BENCHMARKS[name].expects}")
    refused(
        name, tmp_path / "nowhere", f"{name}: the folder {tmp_path / 'nowhere'} does not exist; `root` must contain"
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_or_two_folders_too_high(name: str, tmp_path: Path):
    root = small(name, tmp_path)
    for above in (root.parent, root.parent.parent):
        refused(
            name,
            above,
            f"{above} does not contain {BENCHMARKS[name].expects}; {root} looks like the right folder: set `root`",
        )


@pytest.mark.parametrize("name", NAMES)
def test_one_or_two_folders_too_deep(name: str, tmp_path: Path):
    root = small(name, tmp_path)
    inside = next((entry for entry in sorted(root.iterdir(), reverse=True) if entry.is_dir()), root / "images")
    deeper = inside / "some" / "where"
    deeper.mkdir(parents=True)
    for folder in (inside, deeper.parent):
        refused(name, folder, "does not contain", f"; {root} looks like the right folder: set `root` to it")
    # The right folder is too far away for a hint.
    refused(name, deeper, f"does not contain {BENCHMARKS[name].expects} (shortlist data about {name})")


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_folder(name: str, tmp_path: Path):
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    refused(name, tmp_path / "a" / "b" / "c", f"{name}: ", "does not contain", f"(shortlist data about {name})")


@pytest.mark.parametrize("name", ["cars196", "cub", "sop", "inaturalist", "inshop", "vehicleid-small"])
def test_a_split_for_classification(name: str, tmp_path: Path):
    class_folders(tmp_path / "train", {"Acura": 2, "Audi": 1})
    class_folders(tmp_path / "test", {"Acura": 1})
    refused(name, tmp_path, "its folders train/ and test/ are a classification split, not the retrieval benchmark")
    shutil.rmtree(tmp_path / "test")
    with pytest.raises(DataError) as caught:
        open_catalog(name, root=tmp_path)
    assert "classification" not in str(caught.value)  # a single split folder is no evidence


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("cub", "train_test_split.txt", "train_test_split.txt is the classification split and is not needed"),
        ("cub", "001.Black_footed_Albatross/", "belongs in images/"),
        ("inaturalist", "train2018.json", "train2018.json is the classification split; the retrieval split is"),
        ("inaturalist", "train_val2019/", "train_val2019 belongs to 2019, but the benchmark uses 2018"),
        ("inaturalist", "train_val2017/", "train_val2017 belongs to 2017"),
        ("inaturalist", "train.json", "train.json belongs to 2021"),
        ("inaturalist", "train_val2018/", "train_val2018 exists, but the lists do not: put Inat_dataset_splits"),
        ("vehicleid-large", "image/", "image exists, but the lists do not: put train_test_split/ next to it"),
        ("sop", "Ebay_info.txt", "Ebay_info.txt is the list of all images, without splits"),
        ("inshop", "img/", "img exists, but list_eval_partition.txt does not: it is in Eval/"),
        ("gldv1", "train_clean.csv", "train_clean.csv belongs to GLDv2: open it as gldv2-clean"),
        ("gldv2-clean", "train.csv", "train.csv is the uncleaned list"),
        ("gldv2-clean", "train/0/", "train exists, but train_clean.csv does not: put train_clean.csv next to it"),
        ("gldv1", "train/", "train exists, but train.csv does not: put train.csv next to it"),
        ("cub", "images/", "images exists, but images.txt and image_class_labels.txt do not: put both"),
        ("roxford5k", "jpg/", "jpg exists, but gnd_roxford5k.pkl does not: put gnd_roxford5k.pkl next to it"),
        ("r1m", "jpg/", "jpg exists, but revisitop1m.txt does not: put revisitop1m.txt next to it"),
        ("sfm120k-val", "retrieval-SfM-120k.pkl", "is the training list"),
        ("cars196", "car_ims/", "car_ims exists, but cars_annos.mat does not: put cars_annos.mat next to it"),
    ],
)
def test_lookalikes_are_explained(name: str, found: str, message: str, tmp_path: Path):
    if found.endswith("/"):
        (tmp_path / found).mkdir(parents=True)
    else:
        (tmp_path / found).touch()
    refused(name, tmp_path, f"does not contain {BENCHMARKS[name].expects}; ", message)


def test_a_folder_of_very_many_folders_is_not_searched(tmp_path: Path):
    """The second level is searched only if there are few folders."""
    miniature("cub", tmp_path / "000" / "cub", 2, 2)
    refused("cub", tmp_path, "looks like the right folder")
    for number in range(60):
        (tmp_path / f"{number:03}").mkdir(exist_ok=True)
    with pytest.raises(DataError) as caught:
        open_catalog("cub", root=tmp_path)
    assert "looks like the right folder" not in str(caught.value)


# Images


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"omniglot"}))  # its images are in the cache
def test_missing_images(name: str, tmp_path: Path):
    root = small(name, tmp_path)
    catalog = open_catalog(name, root=root)
    gone = str(catalog.paths[-1])
    (root / gone).unlink()
    refused(name, root, f" missing in {root}: {gone}. Add them, or leave them out with `on_missing")
    assert open_catalog(name, root=root, on_missing="skip").missing == (gone,)


@pytest.mark.parametrize(
    ("name", "images"),
    [("cub", "images"), ("inshop", "img"), ("vehicleid-small", "image"), ("roxford5k", "jpg"), ("r1m", "jpg")],
)
@pytest.mark.parametrize("on_missing", ["error", "skip"])
def test_images_one_folder_too_deep(name: str, images: str, on_missing: str, tmp_path: Path):
    root = small(name, tmp_path)
    first = open_catalog(name, root=root).file(0)
    (root / images).rename(root / "moved")
    (root / images).mkdir()
    (root / "moved").rename(root / images / images)
    place = root / images / first.relative_to(root)
    parts = "none of its", f"exists in {root}", f"{place} should be at {first}"
    refused(name, root, *parts, on_missing=on_missing)


@pytest.mark.parametrize(("name", "lists"), [("inaturalist", "Inat_dataset_splits"), ("inshop", "Eval")])
def test_root_is_the_folder_of_the_lists(name: str, lists: str, tmp_path: Path):
    root = small(name, tmp_path)
    if name == "inshop":
        (root / lists).mkdir()
        (root / LISTS[name]).rename(root / lists / LISTS[name])
    refused(
        name, root / lists, "none of its 8 images exists in", f"{root} looks like the right folder: set `root` to it"
    )


def test_no_image_exists(tmp_path: Path):
    root = small("cub", tmp_path)
    shutil.rmtree(root / "images")
    refused("cub", root, "cub: none of its 8 images exists in", "(first: images/001.", "Check that `root` is right.")


def test_gldv2_opened_as_gldv1(tmp_path: Path):
    root = miniature("gldv2-clean", tmp_path, 2, 2)
    names = [file.stem for file in root.rglob("*.jpg")]
    lines(root / "train.csv", ["id,url,landmark_id", *(f"{name},http://x,1" for name in names)])
    refused("gldv1", root, "are in folders named by one character, as in GLDv2: open it as gldv2-clean")


# Lists


@pytest.mark.parametrize(("name", "file"), LISTS.items(), ids=LISTS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"\n<!DOCTYPE html>\n<html><body>Quota exceeded</body></html>\n",
            "is a web page, not a list: the download failed",
        ),
        (b"<html>\n", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ],
    ids=["web page", "another", "pointer"],
)
def test_a_download_that_failed(name: str, file: str, content: bytes, message: str, tmp_path: Path):
    root = small(name, tmp_path)
    (root / file).write_bytes(content)
    refused(name, root, f"{name.partition('-')[0]}", str(root / file), message)


@pytest.mark.parametrize(("name", "file"), LISTS.items(), ids=LISTS)
def test_a_list_that_is_empty_or_binary(name: str, file: str, tmp_path: Path):
    root = small(name, tmp_path)
    (root / file).write_bytes(b"")
    refused(name, root, str(root / file))
    (root / file).write_bytes(b"\x1f\x8b\x08\x00\xff\xfe\xfa")
    refused(name, root, str(root / file))


@pytest.mark.parametrize("name", ["sop", "inaturalist", "vehicleid-medium", "vehicleid-small-reid", "cub"])
def test_a_list_that_is_missing(name: str, tmp_path: Path):
    root = small(name, tmp_path)
    (root / LISTS[name]).unlink()
    refused(name, root, f"{name}: there is no {Path(LISTS[name]).name} in {(root / LISTS[name]).parent}")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "sop",
            "1 2 bicycle_final/x.JPG",
            "line 6: expected 4 values (image_id class_id super_class_id path), not '1 2",
        ),
        ("sop", "1 two 1 bicycle_final/x.JPG", "line 6: the class_id 'two' is not a number"),
        (
            "inaturalist",
            "train_val2019/Plantae/1/x.jpg",
            "line 5: 'train_val2019/Plantae/1/x.jpg' belongs to iNaturalist 2019",
        ),
        (
            "inaturalist",
            "train_val2017/Plantae/Abies/x.jpg",
            "belongs to iNaturalist 2017, but the benchmark uses 2018",
        ),
        ("inaturalist", "2021_train/Plantae/1/x.jpg", "belongs to iNaturalist 2021"),
        ("inaturalist", "train/00001_Animalia_Annelida/x.jpg", "looks like iNaturalist 2021"),
        (
            "inaturalist",
            "train_val2018/x.jpg",
            "is not the path of an image of iNaturalist 2018; expected a path such as",
        ),
        ("inaturalist", "Plantae/7477/x.jpg", "is not the path of an image"),
        ("vehicleid-medium", "0279029.jpg 5", "line 5: the image '0279029.jpg' is not a number"),
        ("vehicleid-medium", "0279029", "line 5: expected 2 values (image vehicle), not '0279029'"),
        ("cub", "9", "line 9: expected 2 values (image_id class_id)"),
        ("cub", "9 Albatross", "line 9: the class_id 'Albatross' is not a number"),
        ("gldv1", '"a","b"', "row 7: 2 values for 3 columns"),
        ("gldv1", '"a","b","Eiffel"', "the landmark_id 'Eiffel' is not a number"),
        ("gldv2-clean", "1,a b", "lists 'a', which is not the name of an image"),
    ],
)
def test_an_invalid_line(name: str, line: str, message: str, tmp_path: Path):
    root = small(name, tmp_path)
    file = root / LISTS[name]
    text = file.read_text()
    lines(file, [*text.splitlines(), line])
    refused(name, root, str(file), message)


def test_a_product_list_with_only_its_header(tmp_path: Path):
    root = small("sop", tmp_path)
    lines(root / "Ebay_test.txt", ["image_id class_id super_class_id path"])
    refused("sop", root, "Ebay_test.txt lists no images; download it again")


def test_a_product_list_without_its_header(tmp_path: Path):
    root = small("sop", tmp_path)
    file = root / "Ebay_train.txt"
    file.write_text("\n".join(file.read_text().split("\n")[1:]))
    refused("sop", root, "must start with the line 'image_id class_id super_class_id path', not with '1 1 1 bicycle")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            ["1", "image_pair_name_1 image_pair_name_2 item_id evaluation_status", "img/a.jpg img/b.jpg id_1 train"],
            "belongs to the DeepFashion benchmark Consumer-to-shop; the list of In-shop Clothes Retrieval has",
        ),
        (["1", "image_name evaluation_status", "img/a.jpg train"], "benchmark Category and Attribute Prediction"),
        (["1", "image_name item_id", "img/a.jpg id_1"], "must start with the number of images and the line"),
        (["image_name item_id evaluation_status", "img/a.jpg id_1 train"], "must start with the number of images"),
        (["5", "image_name item_id evaluation_status", "a id_1 train"], "should list 5 images but lists 1"),
        (
            ["1", "image_name item_id evaluation_status", "a id_1 galery"],
            "line 3: unknown evaluation_status 'galery'; did",
        ),
        (["1", "image_name item_id evaluation_status", "a id_1"], "line 3: expected 3 values"),
        (["7"], "must start with the number of images"),
    ],
)
def test_the_wrong_partition_of_fashion(content: list[str], message: str, tmp_path: Path):
    root = small("inshop", tmp_path)
    lines(root / "list_eval_partition.txt", content)
    refused("inshop", root, message)


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        ("gldv1", "landmark_id,images", "must have the columns id,url,landmark_id, not 'landmark_id,images'"),
        ("gldv1", "id,landmark_id", "expected train.csv of Google Landmarks 2018"),
        (
            "gldv2-clean",
            "id,url,landmark_id",
            "expected train_clean.csv of GLDv2 (train.csv is the uncleaned list",
        ),
    ],
)
def test_a_landmark_list_with_other_columns(name: str, header: str, message: str, tmp_path: Path):
    root = small(name, tmp_path)
    lines(root / LISTS[name], [header, "1,2,3"])
    refused(name, root, message)
    lines(root / LISTS[name], [BENCHMARKS[name].tree.splitlines()[0].split()[-1]])  # the right columns, but no rows
    refused(name, root, "lists no images")


def test_a_landmark_list_without_landmarks(tmp_path: Path):
    root = small("gldv1", tmp_path)
    lines(root / "train.csv", ["id,url,landmark_id", "a,None,None"])
    refused("gldv1", root, "no image of", "has a landmark")
    lines(root / "train.csv", ["id,url,landmark_id", "a,None,None", "b,http://b,x"])
    refused("gldv1", root, "line 3: the landmark_id 'x' is not a number")
    lines(root / "train.csv", ["id,url,landmark_id", "a,None,None", "97c0a12e07ae8dd5,http://b,7"])
    refused("gldv1", root, "none of its 1 images exists in")


def test_landmarks_without_images(tmp_path: Path):
    root = small("gldv2-clean", tmp_path)
    lines(root / "train_clean.csv", ["landmark_id,images", "1,"])
    refused("gldv2-clean", root, "train_clean.csv lists no images; expected train_clean.csv of GLDv2")


def test_birds_without_a_class(tmp_path: Path):
    root = small("cub", tmp_path)
    file = root / "image_class_labels.txt"
    lines(file, file.read_text().splitlines()[:-2])
    refused("cub", root, "has no class for 2 images of images.txt, such as number 7")
    lines(file, [f"{number} 0" for number in range(1, 9)])
    refused("cub", root, "must be numbers from 1 to 200")
    # Names for all classes up to this number would fill the memory.
    lines(file, [f"{number} 900000000000" for number in range(1, 9)])
    refused("cub", root, "must be numbers from 1 to 200")


def test_distractors_without_extensions(tmp_path: Path):
    root = small("r1m", tmp_path)
    lines(root / "revisitop1m.txt", ["0/abc", "0/def"])
    refused("r1m", root, "must list one path with its extension per line")


@pytest.mark.parametrize(
    ("name", "file", "row"),
    [
        ("sop", "Ebay_test.txt", "77 1 1 bicycle_final/111085122871_0.JPG"),
        ("vehicleid-small", "train_test_split/test_list_800.txt", "0279030 23781"),
        ("vehicleid-small-reid", "train_test_split/test_list_800.txt", "0279030 23781"),
    ],
)
def test_a_class_in_both_splits(name: str, file: str, row: str, tmp_path: Path):
    root = small(name, tmp_path)
    before = (root / file).read_text()
    (root / file).write_text(f"{before.rstrip()}\n{row}\n")
    refused(
        name,
        root,
        "1 classes, such as ",
        "in both the training and the test list: these are not the lists of the retrieval",
    )


# Ground truth


@pytest.mark.parametrize(("name", "file"), PICKLES.items(), ids=PICKLES)
def test_ground_truth_that_failed_to_download(name: str, file: str, tmp_path: Path):
    root = small(name, tmp_path)
    (root / file).write_bytes(b"<!DOCTYPE html>")
    refused(name, root, f"{root / file} cannot be read as a pickle", "the download may have failed")


@pytest.mark.parametrize(("name", "file"), PICKLES.items(), ids=PICKLES)
def test_ground_truth_that_would_execute_code(name: str, file: str, tmp_path: Path):
    root = small(name, tmp_path)
    mark = tmp_path / "was here"
    content = f"open({str(mark)!r}, 'w')"
    (root / file).write_bytes(b"cbuiltins\neval\n(V" + content.encode() + b"\ntR.")
    refused(name, root, "requests builtins.eval; only numbers, strings, lists and dicts are read")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda gnd: [], "has no list of names 'imlist'"),
        (lambda gnd: {**gnd, "imlist": [1, 2]}, "has no list of names 'imlist'"),
        (lambda gnd: {**gnd, "qimlist": []}, "has no list of names 'qimlist'"),
        (lambda gnd: {**gnd, "gnd": None}, "has no list 'gnd' with one dict per query"),
        (lambda gnd: {**gnd, "gnd": gnd["gnd"][:1]}, "has ground truth for 1 queries, but lists 2"),
        (lambda gnd: _first(gnd, easy=[99]), "the entry 'easy' must contain indices of the 4 images"),
        (lambda gnd: _first(gnd, hard=[-1]), "the entry 'hard' must contain indices of the 4 images"),
        (lambda gnd: _first(gnd, junk=["0"]), "the entry 'junk' must contain indices"),
        (lambda gnd: _first(gnd, junk=[True]), "the entry 'junk' must contain indices"),
        (lambda gnd: _first(gnd, junk=3), "the entry 'junk' must contain indices"),
        (lambda gnd: _first(gnd, bbx=[1, 2, 3]), "the bbx of a query must be four numbers, not [1, 2, 3]"),
        (lambda gnd: _first(gnd, bbx=None), "the bbx of a query must be four numbers"),
        (lambda gnd: _first(gnd, bbx=[9, 0, 9, 9]), "is not a valid box (left, top, right, bottom)"),
        (lambda gnd: _first(gnd, bbx=[0, 0, float("nan"), 9]), "is not a valid box"),
        (lambda gnd: _first(gnd, bbx=[0, 0, 10**400, 9]), "is not a valid box"),
        (lambda gnd: _first(gnd, junk=gnd["gnd"][0]["easy"]), "lists an image twice in easy, hard and junk"),
        (
            lambda gnd: {**gnd, "gnd": [{"ok": [0], "junk": [], "bbx": [0, 0, 9, 9]}] * 2},
            "has no entry 'easy' (it has: ok",
        ),
    ],
)
def test_invalid_ground_truth(change: object, message: str, tmp_path: Path):
    root = small("roxford5k", tmp_path)
    file = root / "gnd_roxford5k.pkl"
    file.write_bytes(pickle.dumps(change(pickle.loads(file.read_bytes()))))
    refused("roxford5k", root, str(file), message)


def _first(gnd: dict, **change: object) -> dict:
    first, *others = gnd["gnd"]
    return {**gnd, "gnd": [{**first, **change}, *others]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cids": ["short"] * 4}, "must have 6 characters or more"),
        ({"qidx": []}, "has no list 'qidx' of queries"),
        ({"qidx": [0, 4]}, "the entry 'qidx' must contain indices of the 4 images"),
        ({"gnd": [{"ok": [0]}]}, "has ground truth for 1 queries, but lists 2"),
        ({"gnd": [{"ok": [7]}, {}]}, "the entry 'ok' must contain indices of the 4 images"),
        ({"gnd": [{"easy": [1]}] * 2}, "has no entry 'ok' (it has: junk, easy)"),
    ],
)
def test_invalid_validation_ground_truth(change: dict, message: str, tmp_path: Path):
    root = small("sfm120k-val", tmp_path)
    file = root / PICKLES["sfm120k-val"]
    file.write_bytes(pickle.dumps({**pickle.loads(file.read_bytes()), **change}))
    refused("sfm120k-val", root, str(file), message)
