"""Catalogs: validation, subsets, fingerprints, and the two rules that assign splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortlist.data import Catalog, Judgement, half_validation, open_set_split
from shortlist.errors import ConfigError, DataError


def catalog(labels: list[int], class_names: list[str], splits: list[str] | None = None, **more: object) -> Catalog:
    values = {"roles": None, **more}
    return Catalog(
        name="toys",
        root=Path("somewhere"),
        paths=np.array([f"{i}.jpg" for i in range(len(labels))], dtype=object),
        labels=np.array(labels, dtype=np.int64),
        class_names=tuple(class_names),
        splits=np.array(splits or [""] * len(labels), dtype=np.str_),
        **values,
    )


TOYS = catalog([0, 1, 1, 3, 3, 3], ["ball", "car", "doll", "kite"], ["train"] * 3 + ["test"] * 3)


def test_files_and_class_sizes():
    assert len(TOYS) == 6
    assert TOYS.file(2) == Path("somewhere/2.jpg")
    assert TOYS.classes().tolist() == [0, 1, 3]  # no image shows a doll
    assert TOYS.class_sizes().tolist() == [1, 2, 3]


def test_labels_from_classes():
    numbers = Catalog.from_classes("toys", Path(), ["a.jpg", "b.jpg", "c.jpg"], [10, 9, 10], "train")
    assert numbers.class_names == ("9", "10")  # sorted as numbers
    assert numbers.labels.tolist() == [1, 0, 1]
    assert numbers.splits.tolist() == ["train"] * 3
    assert numbers.label_sets is None
    several = Catalog.from_classes("toys", Path(), ["a.jpg", "b.jpg"], [("red", "car"), ("car",)], ["test", "train"])
    assert several.class_names == ("car", "red")
    assert several.labels.tolist() == [1, 0]
    assert several.label_sets.tolist() == [(1, 0), (0,)]
    assert several.splits.tolist() == ["test", "train"]


def test_a_subset_keeps_the_labels():
    test = TOYS.split("test")
    assert test.paths.tolist() == ["3.jpg", "4.jpg", "5.jpg"]
    assert test.labels.tolist() == [3, 3, 3]
    assert test.class_names == TOYS.class_names
    assert TOYS.subset([5, 0]).labels.tolist() == [3, 0]
    assert len(TOYS.subset([])) == 0


def test_a_subset_keeps_the_roles():
    with_roles = replace(TOYS, roles=np.array(["", "", "", "query", "gallery", "gallery"]))
    assert with_roles.split("test").roles.tolist() == ["query", "gallery", "gallery"]
    assert TOYS.split("test").roles is None


def test_the_error_for_an_empty_split_lists_the_available_ones():
    with pytest.raises(DataError, match=r"toys has no validation images \(available splits: train, test\)"):
        TOYS.split("validation")
    with pytest.raises(ValueError, match="not 'tset'"):
        TOYS.split("tset")


def test_arrays_are_read_only():
    for values in (TOYS.paths, TOYS.labels, TOYS.splits):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = values[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.array([0, 1])}, r"labels has shape \(2,\)"),
        ({"labels": np.array([0, 1, 1, 3, 3, 4])}, "indices of the 4 class names"),
        ({"labels": np.array([0, 1, 1, 3, 3, -1])}, "indices of the 4 class names"),
        ({"splits": np.array(["train"] * 5 + ["tset"])}, "splits contains 'tset'"),
        ({"roles": np.array(["query"] * 5 + ["guest"])}, "roles contains 'guest'"),
        ({"class_names": ("ball", "car", "car", "kite")}, "same name"),
    ],
)
def test_invalid_fields_are_rejected(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        replace(TOYS, **change)


def test_the_fingerprint_depends_on_the_content_only():
    same = replace(TOYS, root=Path("elsewhere"), name="other", missing=("x.jpg",))
    assert same.fingerprint() == TOYS.fingerprint() != ""
    different = [
        replace(TOYS, paths=np.array(["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.jpg", "6.jpg"], dtype=object)),
        replace(TOYS, labels=np.array([0, 1, 1, 3, 3, 2])),
        replace(TOYS, class_names=("ball", "car", "doll", "drum")),
        replace(TOYS, splits=np.array(["train"] * 4 + ["test"] * 2)),
        replace(TOYS, roles=np.array([""] * 6)),
        TOYS.subset([1, 0, 2, 3, 4, 5]),
        TOYS.subset([0, 1, 2, 3, 4]),
    ]
    prints = {one.fingerprint() for one in different}
    assert len(prints) == len(different)
    assert TOYS.fingerprint() not in prints


def test_the_fingerprint_is_stable():
    assert TOYS.fingerprint() == "c6ee873b3278a5b5cdc7f6b5c93be39dbe4a408d0166346c82d840092ab73f23"


# Splits


def training_names(split: Catalog) -> list[str]:
    return sorted(split.class_names[label] for label in split.subset(split.splits == "train").classes())


def test_the_first_half_by_name_is_for_training():
    five = catalog([0, 1, 2, 3, 4, 4], ["e", "b", "d", "a", "c"])
    split = open_set_split(five)
    assert training_names(split) == ["a", "b", "c"]  # rounded up
    assert split.splits.tolist() == ["test", "train", "test", "train", "train", "train"]


def test_shuffling_by_seed_is_stable():
    many = catalog(list(range(20)), [f"{number:02}" for number in range(20)])
    by_seed = {seed: training_names(open_set_split(many, seed=seed)) for seed in (None, 0, 1)}
    assert by_seed[None] == [f"{number:02}" for number in range(10)]
    assert len({tuple(names) for names in by_seed.values()}) == 3
    assert by_seed[0] == ["01", "05", "06", "08", "10", "11", "13", "14", "16", "18"]


def test_the_split_does_not_depend_on_the_order_of_classes():
    forth = catalog([0, 1, 2, 3], ["a", "b", "c", "d"])
    back = catalog([0, 1, 2, 3], ["d", "c", "b", "a"])
    for seed in (None, 7):
        assert training_names(open_set_split(forth, seed=seed)) == training_names(open_set_split(back, seed=seed))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=12).map(
        lambda sizes: [0, *sizes]
    ),  # with an empty class first
    share=st.integers(0, 20).map(lambda part: part / 20),
    seed=st.none() | st.integers(0, 5),
)
def test_classes_stay_whole_and_the_share_is_right(sizes: list[int], share: float, seed: int | None):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    split = open_set_split(catalog(labels, [f"c{label}" for label in range(len(sizes))]), share, seed)
    train, test = (set(split.labels[split.splits == name].tolist()) for name in ("train", "test"))
    assert not train & test
    assert train | test == set(labels)
    present = len(set(labels))
    assert share * present - 1 <= len(train) < share * present + 1
    assert bool(train) == (share > 0)
    assert bool(test) == (share < 1)


def test_a_whole_number_of_classes_is_not_rounded_up():
    ten = catalog(list(range(10)), [str(number) for number in range(10)])
    assert len(training_names(open_set_split(ten, 0.7))) == 7  # 0.7 * 10 is slightly more than 7


def test_one_class_cannot_be_split():
    with pytest.raises(DataError, match=r"toys has 1 class, but at least two .* `train_share=1`"):
        open_set_split(catalog([0, 0], ["only"]))
    assert training_names(open_set_split(catalog([0, 0], ["only"]), 1)) == ["only"]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_the_share_must_be_between_0_and_1(share: float):
    with pytest.raises(ConfigError, match="`train_share` is the share"):
        open_set_split(TOYS, share)


def test_half_of_the_training_classes_become_validation():
    seven = catalog([0, 0, 1, 2, 3, 4, 5, 6], list("gfedcba"), ["train"] * 6 + ["test"] * 2)
    split = half_validation(seven)
    assert split.splits.tolist() == ["train"] * 4 + ["validation"] * 2 + ["test"] * 2  # in class order: g f e, d c


def test_half_validation_needs_two_classes_and_no_validation():
    with pytest.raises(DataError, match="1 training class"):
        half_validation(catalog([0, 1], ["a", "b"], ["train", "test"]))
    with pytest.raises(DataError, match="already has a validation split"):
        half_validation(half_validation(TOYS))


class TestJudgements:
    """Rows 0 and 3 are queries; 1, 2, 4 and 5 are the gallery."""

    ROLES = ("query", "gallery", "gallery", "query", "gallery", "gallery")

    @staticmethod
    def judged(positives: list[int], junk: list[int]) -> Judgement:
        return Judgement(np.array(positives, dtype=np.int64), np.array(junk, dtype=np.int64))

    def catalog(self, judgements: dict[str, tuple[Judgement, ...]] | None = None) -> Catalog:
        boxes = np.arange(24.0).reshape(6, 4)
        return Catalog(
            name="judged",
            root=Path(),
            paths=np.array([f"{number}.jpg" for number in range(6)], dtype=object),
            labels=np.zeros(6, dtype=np.int64),
            class_names=("unlabelled",),
            splits=np.full(6, "test"),
            roles=np.array(self.ROLES),
            boxes=boxes,
            judgements=judgements or {"easy": (self.judged([1, 4], [5]), self.judged([2], []))},
        )

    @given(st.lists(st.integers(0, 5), unique=True))
    def test_a_subset_keeps_the_judgements_of_its_images(self, rows: list[int]) -> None:
        whole = self.catalog()
        part = whole.subset(rows)
        queries = [row for row in rows if self.ROLES[row] == "query"]
        expected = {0: ({"1.jpg", "4.jpg"}, {"5.jpg"}), 3: ({"2.jpg"}, set())}
        left = {f"{row}.jpg" for row in rows}
        assert len(part.judgements["easy"]) == len(queries)
        for row, judged in zip(queries, part.judgements["easy"], strict=True):
            assert set(part.paths[judged.positives]) == expected[row][0] & left
            assert set(part.paths[judged.junk]) == expected[row][1] & left
        assert part.boxes.tolist() == whole.boxes[np.array(rows, dtype=int)].tolist()

    @pytest.mark.parametrize(
        ("judgements", "message"),
        [
            ({"easy": ()}, "judges 0 queries, but 2 images"),
            ({"easy": (([0], []), ([], []))}, "must be rows of the gallery"),  # a query
            ({"easy": (([], [6]), ([], []))}, "must be rows of the gallery"),
            ({"easy": (([-1], []), ([], []))}, "must be rows of the gallery"),
        ],
    )
    def test_invalid_judgements_are_rejected(self, judgements: dict[str, tuple[object, ...]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.catalog({setup: tuple(self.judged(*each) for each in all_) for setup, all_ in judgements.items()})

    def test_the_fingerprint_depends_on_judgements_and_boxes(self) -> None:
        other = self.catalog({"easy": (self.judged([1], [5]), self.judged([2], []))})
        assert self.catalog().fingerprint() == self.catalog().fingerprint() != other.fingerprint()
        moved = replace(self.catalog(), boxes=np.zeros((6, 4)))
        assert moved.fingerprint() != self.catalog().fingerprint()

    def test_boxes_must_have_four_values(self) -> None:
        with pytest.raises(ValueError, match="boxes has shape"):
            replace(self.catalog(), boxes=np.zeros((6, 3)))
