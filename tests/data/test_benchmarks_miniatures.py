"""Every benchmark, opened from a miniature in its own format."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shortlist.data import BENCHMARKS, Catalog, load_image, open_catalog, summary
from shortlist.data.benchmarks import ImageCount
from tests.evaluation.revisited import GROUND_TRUTH
from tests.miniatures import digest, lines, miniature

NAMES = sorted(set(BENCHMARKS) - {"glyphs"})  # it has its own tests


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))


def opened(name: str, folder: Path, classes: int = 3, images: int = 4) -> Catalog:
    return open_catalog(name, root=miniature(name, folder / name, classes, images))


def part(catalog: Catalog, split: str) -> list[tuple[str, str]]:
    """Return the path and class of each image of a split."""
    return [(path, catalog.class_names[n]) for path, n, s in _rows(catalog) if s == split]


def _rows(catalog: Catalog) -> zip:
    return zip(catalog.paths.tolist(), catalog.labels.tolist(), catalog.splits.tolist(), strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_image_can_be_opened(name: str, tmp_path: Path):
    catalog = opened(name, tmp_path)
    assert catalog.name == name
    sizes = {load_image(catalog.file(index)).size for index in range(len(catalog))}
    assert len(sizes) > 1 or name == "omniglot"
    assert summary(catalog)["unreadable"] == 0
    for kind in ("train", "test"):
        if kind in BENCHMARKS[name].counts:
            tested = catalog.split(kind)
            assert (len(tested.classes()), tested.class_sizes().tolist()) == (3, [4, 4, 4])


@pytest.mark.parametrize("name", NAMES)
def test_different_counts_are_reported(name: str, tmp_path: Path):
    benchmark, catalog = BENCHMARKS[name], opened(name, tmp_path)
    expected = [f"{part}: the lists have " for part in benchmark.counts]
    found = [remark for remark in catalog.remarks if ": the lists have " in remark]
    assert [remark[: len(start)] for remark, start in zip(found, expected, strict=True)] == expected
    for remark, count in zip(found, benchmark.counts.values(), strict=True):
        assert f"but {name} has {count.images:,} images" in remark
    assert catalog.subset([0]).remarks == catalog.remarks
    assert summary(catalog)["remarks"] == list(catalog.remarks)


def test_equal_counts_are_not_reported(tmp_path: Path):
    root = miniature("sop", tmp_path, 3, 4)
    exact = replace(BENCHMARKS["sop"], counts={"train": ImageCount(12, 3), "test": ImageCount(12, 3)})
    assert exact.load(root).remarks == ()
    (root / "sofa_final" / "111085122872_0.JPG").unlink()
    assert exact.load(root, "skip").remarks == ()  # it is listed, although the file does not exist
    other = replace(exact, counts={**exact.counts, "test": ImageCount(13, 3)})
    assert other.load(root, "skip").remarks == (
        "test: the lists have 12 images of 3 classes, but sop has 13 images of 3 classes",
    )


def test_an_image_that_is_listed_twice(tmp_path: Path):
    root = miniature("sop", tmp_path, 2, 2)
    with (root / "Ebay_train.txt").open("a") as file:
        file.write("9 1 1 bicycle_final/111085122871_0.JPG\n")
    assert "images that are listed more than once: 1" in open_catalog("sop", root=root).remarks


# One by one


def test_sop(tmp_path: Path):
    catalog = opened("sop", tmp_path)
    train, test = part(catalog, "train"), part(catalog, "test")
    assert train[:5] == [
        ("bicycle_final/111085122871_0.JPG", "1"),
        ("bicycle_final/111085122871_1.JPG", "1"),
        ("bicycle_final/111085122871_2.JPG", "1"),
        ("bicycle_final/111085122871_3.JPG", "1"),
        ("sofa_final/111085122872_0.JPG", "2"),
    ]
    assert test[-1] == ("bicycle_final/2111085122873_3.JPG", "11321")  # the last line has no line ending
    assert catalog.class_names == ("1", "2", "3", "11319", "11320", "11321")  # in numerical order
    assert (catalog.roles, catalog.protocol) == (None, None)


def test_inaturalist(tmp_path: Path):
    catalog = opened("inaturalist", tmp_path)
    assert part(catalog, "train")[0] == (f"train_val2018/Plantae/7477/{digest('train', 0, 0)}.jpg", "Plantae/7477")
    assert part(catalog, "test")[-1] == (f"train_val2018/Plantae/101/{digest('test', 2, 3)}.jpg", "Plantae/101")
    train, test = "Aves/7477 Plantae/7477 Plantae/7478", "Aves/100 Plantae/100 Plantae/101"
    # Two training classes have the number 7477.
    assert Counter(name for _, name in part(catalog, "train")) == dict.fromkeys(train.split(), 4)
    assert Counter(name for _, name in part(catalog, "test")) == dict.fromkeys(test.split(), 4)


def test_inaturalist_with_its_lists_beside_the_images(tmp_path: Path):
    root = miniature("inaturalist", tmp_path, 2, 2)
    before = open_catalog("inaturalist", root=root)
    for file in (root / "Inat_dataset_splits").iterdir():
        file.rename(root / file.name)
    (root / "Inat_dataset_splits").rmdir()
    assert open_catalog("inaturalist", root=root).fingerprint() == before.fingerprint()


@pytest.mark.parametrize(("size", "vehicles"), [("small", 800), ("medium", 1600), ("large", 2400)])
def test_vehicleid(size: str, vehicles: int, tmp_path: Path):
    root = miniature("vehicleid-small", tmp_path, 3, 4)
    lines(root / "train_test_split" / f"test_list_{vehicles}.txt", ["0279042 5", "0279045  5", "0279046\t6"])
    catalog = open_catalog(f"vehicleid-{size}", root=root)
    assert part(catalog, "train")[0] == ("image/0279030.jpg", "23781")
    assert part(catalog, "test") == [
        ("image/0279042.jpg", "5"),
        ("image/0279045.jpg", "5"),
        ("image/0279046.jpg", "6"),
    ]
    assert (catalog.roles, catalog.protocol) == (None, None)


def test_vehicleid_as_re_identification(tmp_path: Path):
    root = miniature("vehicleid-large-reid", tmp_path, 7, 5)
    plain, catalog = (open_catalog(name, root=root) for name in ("vehicleid-large", "vehicleid-large-reid"))
    assert catalog.protocol == "re-identification"
    for field in ("paths", "labels", "splits"):
        assert (getattr(catalog, field) == getattr(plain, field)).all()
    train, test = catalog.split("train"), catalog.split("test")
    assert set(train.roles.tolist()) == {""}
    for label in test.classes():
        mine = test.subset(test.labels == label)
        assert Counter(mine.roles.tolist()) == {"gallery": 1, "query": 4}
        hashes = [hashlib.sha256(f"0/{path[6:13]}".encode()).hexdigest() for path in mine.paths]  # seed/image
        assert mine.roles[int(np.argmin(np.array(hashes)))] == "gallery"
    drawn = [int(np.flatnonzero(test.roles[test.labels == label] == "gallery")[0]) for label in test.classes()]
    assert len(set(drawn)) > 1  # not always the first image


def test_the_gallery_does_not_depend_on_the_order_of_the_list(tmp_path: Path):
    root = miniature("vehicleid-small-reid", tmp_path, 4, 4)

    def gallery() -> set[str]:
        catalog = open_catalog("vehicleid-small-reid", root=root)
        return set(catalog.paths[catalog.roles == "gallery"].tolist())

    before = gallery()
    file = root / "train_test_split" / "test_list_800.txt"
    file.write_text("\n".join(reversed(file.read_text().split("\n"))))
    assert gallery() == before
    assert len(before) == 4


def test_cub(tmp_path: Path):
    catalog = opened("cub", tmp_path)
    albatross = "Black_footed_Albatross/Black_Footed_Albatross"
    assert part(catalog, "train")[0] == (f"images/001.{albatross}_0001_0.jpg", "001.Black_footed_Albatross")
    assert part(catalog, "test")[0] == (f"images/101.{albatross}_0013_0.jpg", "101.Black_footed_Albatross")
    assert catalog.split("train").classes().tolist() == [0, 1, 2]
    assert catalog.split("test").classes().tolist() == [100, 101, 102]
    (tmp_path / "cub" / "train_test_split.txt").unlink()
    assert open_catalog("cub", root=tmp_path / "cub").fingerprint() == catalog.fingerprint()  # the file is not needed


def test_cub_with_labels_in_another_order(tmp_path: Path):
    root = miniature("cub", tmp_path, 2, 2)
    before = open_catalog("cub", root=root)
    file = root / "image_class_labels.txt"
    file.write_text("\n".join(reversed(file.read_text().split("\n")[:-1])))
    assert open_catalog("cub", root=root).fingerprint() == before.fingerprint()


def test_inshop(tmp_path: Path):
    catalog = opened("inshop", tmp_path)
    assert part(catalog, "train")[0] == ("img/WOMEN/Tees_Tanks/id_00000001/01_0_front.jpg", "id_00000001")
    assert set(catalog.split("train").roles.tolist()) == {""}
    test = catalog.split("test")
    assert test.roles.tolist() == ["query", "gallery"] * 6
    assert test.paths[1] == "img/WOMEN/Tees_Tanks/id_00005001/02_1_front.jpg"
    assert catalog.protocol is None


def test_inshop_as_it_is_downloaded(tmp_path: Path):
    """Eval/list_eval_partition.txt and Img/img/..."""
    root = miniature("inshop", tmp_path, 2, 2)
    (root / "Eval").mkdir()
    (root / "Img").mkdir()
    (root / "list_eval_partition.txt").rename(root / "Eval" / "list_eval_partition.txt")
    (root / "img").rename(root / "Img" / "img")
    catalog = open_catalog("inshop", root=root)
    assert catalog.paths[0] == "Img/img/WOMEN/Tees_Tanks/id_00000001/01_0_front.jpg"
    assert catalog.file(0).is_file()


def test_gldv1(tmp_path: Path):
    catalog = opened("gldv1", tmp_path)
    assert part(catalog, "train")[4] == (f"train/{digest('gldv1', 1, 0)[:16]}.jpg", "6348")
    assert catalog.remarks[0] == "images of train.csv without a landmark, which were left out: 1"
    assert set(catalog.splits.tolist()) == {"train"}


@pytest.mark.parametrize("folder", ["images", "jpg", "."])
def test_gldv1_with_its_images_elsewhere(folder: str, tmp_path: Path):
    root = miniature("gldv1", tmp_path, 2, 2)
    for file in list((root / "train").iterdir()):
        (root / folder).mkdir(exist_ok=True)
        file.rename(root / folder / file.name)
    (root / "train").rmdir()
    catalog = open_catalog("gldv1", root=root)
    assert catalog.file(0).parent == (root / folder).resolve() or catalog.file(0).parent == root / folder
    assert catalog.file(0).is_file()


def test_gldv1_without_quotes_and_with_a_byte_order_mark(tmp_path: Path):
    root = miniature("gldv1", tmp_path, 2, 2)
    before = open_catalog("gldv1", root=root)
    (root / "train.csv").write_text(
        "\ufeffid,url,landmark_id\r\n"
        + "".join(f"{path[6:-4]},http://x,{6347 + i // 2}\r\n" for i, path in enumerate(before.paths)),
        encoding="utf-8",
        newline="",
    )
    assert open_catalog("gldv1", root=root).fingerprint() == before.fingerprint()


def test_gldv2(tmp_path: Path):
    catalog = opened("gldv2-clean", tmp_path)
    name = digest("gldv2", 2, 3)[:16]
    assert part(catalog, "train")[-1] == (f"train/{name[0]}/{name[1]}/{name[2]}/{name}.jpg", "7")
    assert catalog.class_names == ("1", "4", "7")


def test_r1m(tmp_path: Path):
    catalog = opened("r1m", tmp_path)
    assert catalog.paths[-1] == f"jpg/2/{digest('r1m', 2, 3)}.JPG"
    assert (set(catalog.splits.tolist()), set(catalog.roles.tolist())) == ({"test"}, {"gallery"})
    assert (catalog.class_names, catalog.judgements, catalog.boxes) == (("unlabelled",), None, None)
    file = tmp_path / "r1m" / "revisitop1m.txt"
    file.write_text("\n".join(f"jpg/{path}" for path in file.read_text().split()))  # some mirrors have such a list
    assert open_catalog("r1m", root=tmp_path / "r1m").fingerprint() == catalog.fingerprint()


# Queries with judgements


@pytest.mark.parametrize("name", ["roxford5k", "rparis6k"])
def test_revisited(name: str, tmp_path: Path):
    catalog = opened(name, tmp_path, 3, 4)
    assert catalog.roles.tolist() == ["query"] * 3 + ["gallery"] * 12
    assert set(catalog.splits.tolist()) == {"test"}
    assert catalog.paths[[0, 3, 14]].tolist() == [
        "jpg/query_000000.jpg",
        "jpg/ashmolean_000000.jpg",
        "jpg/ashmolean_002003.jpg",
    ]
    assert catalog.boxes[:3].tolist() == [[4.5, 2.25, 40, 36.5]] * 3
    assert np.isnan(catalog.boxes[3:]).all()
    found = {
        setup: [(sorted(one.positives.tolist()), sorted(one.junk.tolist())) for one in each]
        for setup, each in catalog.judgements.items()
    }
    # Images 0 and 2 of a class are easy, 1 is hard and 3 is junk; all images of the last class are hard.
    first, second, last = range(3, 7), range(7, 11), list(range(11, 15))
    assert found == {
        "easy": [([f[0], f[2]], [f[1], f[3]]) for f in (first, second)] + [([], last)],
        "medium": [([f[0], f[1], f[2]], [f[3]]) for f in (first, second)] + [(last, [])],
        "hard": [([f[1]], [f[0], f[2], f[3]]) for f in (first, second)] + [(last, [])],
    }


def test_judgements_are_right_without_the_missing_images(tmp_path: Path):
    catalog = opened("roxford5k", tmp_path, 3, 4)
    catalog.file(3).unlink()  # easy for the first query
    catalog.file(1).unlink()  # the second query
    left = open_catalog("roxford5k", root=catalog.root, on_missing="skip")
    assert left.missing == ("jpg/query_000001.jpg", "jpg/ashmolean_000000.jpg")
    assert left.paths[left.judgements["easy"][0].positives].tolist() == ["jpg/ashmolean_000002.jpg"]
    assert len(left.judgements["easy"]) == 2
    assert len(left.boxes) == 13


@pytest.mark.parametrize(
    ("name", "images", "easy"), [("roxford5k", 4993, 68), ("rparis6k", 6322, 70)], ids=["Oxford", "Paris"]
)
def test_the_real_ground_truth(name: str, images: int, easy: int):
    catalog = BENCHMARKS[name].read(GROUND_TRUTH)
    assert BENCHMARKS[name]._deviations(catalog) == []
    assert Counter(catalog.roles.tolist()) == {"query": 70, "gallery": images}
    answered = {setup: sum(len(one.positives) > 0 for one in each) for setup, each in catalog.judgements.items()}
    assert answered == {"easy": easy, "medium": 70, "hard": 70}
    with (GROUND_TRUTH / f"gnd_{name}.pkl").open("rb") as file:
        real = pickle.load(file)
    for query in (0, 33, 69):
        truth = real["gnd"][query]
        assert catalog.boxes[query].tolist() == truth["bbx"]
        assert catalog.paths[query] == f"jpg/{real['qimlist'][query]}.jpg"
        medium = catalog.judgements["medium"][query]
        assert set(catalog.paths[medium.positives]) == {
            f"jpg/{real['imlist'][i]}.jpg" for i in truth["easy"] + truth["hard"]
        }
        assert set(catalog.paths[medium.junk]) == {f"jpg/{real['imlist'][i]}.jpg" for i in truth["junk"]}


def test_sfm120k(tmp_path: Path):
    catalog = opened("sfm120k-val", tmp_path, 3, 4)
    assert set(catalog.splits.tolist()) == {"validation"}
    assert catalog.roles.tolist() == ["query"] * 3 + ["gallery"] * 12
    assert catalog.paths[:3].tolist() == catalog.paths[[3, 7, 11]].tolist()  # a query is two rows
    name = digest("sfm", 1, 0)
    assert catalog.paths[1] == f"ims/{name[-2:]}/{name[-4:-2]}/{name[-6:-4]}/{name}"
    judged = [(one.positives.tolist(), one.junk.tolist()) for one in catalog.judgements[""]]
    # A query is junk for itself, even for the first query, for which the file does not list it.
    assert judged == [([4, 5], [3]), ([8, 9], [7, 10]), ([12, 13], [11, 14])]
    assert (catalog.boxes, catalog.remarks) == (None, ())


def test_a_query_is_never_its_own_positive(tmp_path: Path):
    root = miniature("sfm120k-val", tmp_path, 2, 3)
    file = root / "retrieval-SfM-120k-val-eccv2020.pkl"
    content = pickle.loads(file.read_bytes())
    content["gnd"] = [{"ok": [0, 1]}, {"ok": [4, 3], "junk": [3]}]
    file.write_bytes(pickle.dumps(content))
    catalog = open_catalog("sfm120k-val", root=root)
    judged = [(one.positives.tolist(), one.junk.tolist()) for one in catalog.judgements[""]]
    assert judged == [([3], [2]), ([6], [5])]
