"""Class-balanced batches: their contents, their number, and that they depend on seed and epoch only."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from shortlist.batches.sampler import RELEASE_ORDERS, ClassBalancedSampler, release_epoch_length
from shortlist.errors import ConfigError
from shortlist.seeds import derived_seed

# Images of the 98 training classes of Cars196.
CARS = [
    *(89, 64, 86, 84, 81, 89, 78, 90, 82, 66, 76, 73, 82, 85, 86, 87, 81, 85, 81, 92, 84, 85, 79, 90, 79, 68, 71, 82),
    *(85, 83, 88, 83, 84, 89, 82, 82, 77, 81, 73, 78, 71, 69, 92, 89, 65, 87, 70, 85, 75, 84, 86, 82, 89, 80, 79, 93),
    *(75, 88, 89, 73, 86, 74, 88, 59, 90, 83, 77, 80, 76, 85, 70, 90, 89, 87, 88, 87, 81, 75, 97, 86, 90, 90, 81, 84),
    *(87, 85, 88, 79, 88, 82, 77, 80, 78, 87, 91, 82, 84, 92),
]


def some_labels(sizes: list[int], seed: int = 0) -> Tensor:
    """Labels of classes of these sizes, with gaps between their numbers, shuffled."""
    labels = torch.tensor([7 * number - 20 for number, size in enumerate(sizes) for _ in range(size)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


@cache
def most_batches(groups: tuple[int, ...], classes_per_batch: int) -> int:
    """Return the largest possible number of batches, by trying every set of classes for the next batch."""
    left = tuple(sorted((group for group in groups if group), reverse=True))
    best = 0
    for chosen in set(combinations(range(len(left)), classes_per_batch)):
        rest = tuple(sorted(group - (place in chosen) for place, group in enumerate(left)))
        best = max(best, 1 + most_batches(rest, classes_per_batch))
    return best


def batches_of_the_release(sizes: list[int], classes_per_batch: int, per_class: int) -> int:
    """Count the batches as the authors' code does, for classes in the order of an epoch.

    A batch takes images of the first classes that have enough left. The epoch ends when a batch cannot be filled.
    """
    left, batches = list(sizes), 0
    while True:
        taken = 0
        for number in range(len(left)):
            if left[number] >= per_class and taken < classes_per_batch:
                left[number] -= per_class
                taken += 1
        if taken < classes_per_batch:
            return batches
        batches += 1


def shuffled(sizes: list[int], seed: int) -> list[int]:
    return random.Random(seed).sample(sizes, len(sizes))


@st.composite
def settings_of_a_sampler(draw: st.DrawFn, classes: int = 30, size: int = 25) -> tuple[list[int], int, int]:
    """Draw class sizes, classes per batch and images per class, so that at least one batch can be filled."""
    sizes = draw(st.lists(st.integers(1, size), min_size=1, max_size=classes))
    per_class = draw(st.integers(1, 5))
    usable = sum(size >= per_class for size in sizes)
    assume(usable)
    return sizes, draw(st.integers(1, usable)), per_class


# Contents of a batch


@settings(max_examples=50)
@given(settings_of_a_sampler(), st.integers(0, 10**6), st.integers(0, 100))
def test_every_batch_is_balanced_and_no_image_is_repeated(
    setting: tuple[list[int], int, int], seed: int, epoch: int
) -> None:
    sizes, classes, per_class = setting
    labels = some_labels(sizes, seed)
    sampler = ClassBalancedSampler(labels, classes * per_class, per_class, seed)
    table = sampler.batches(epoch)
    assert table.shape == (len(sampler), classes * per_class)
    assert len(sampler) > 0
    assert len(table.unique()) == table.numel()  # no image twice
    for batch in labels[table]:
        assert set(Counter(batch.tolist()).values()) == {per_class}
        assert len(batch.unique()) == classes
        together = batch.view(classes, per_class)  # images of a class lie together
        assert (together == together[:, :1]).all()
    too_small = [7 * number - 20 for number, size in enumerate(sizes) if size < per_class]
    assert sampler.left_out == too_small
    assert not set(labels[table].flatten().tolist()) & set(too_small)


def test_every_image_is_used_in_some_epoch() -> None:
    sampler = ClassBalancedSampler(some_labels([11] * 6), 24, 4)
    seen = Counter(image for epoch in range(40) for image in sampler.batches(epoch).flatten().tolist())
    assert len(seen) == 66  # all images, although an epoch has room for 8 of the 11 of a class
    assert max(seen.values()) - min(seen.values()) < 25
    assert sampler.batches(0).numel() == 48


def test_the_classes_of_a_batch_are_chosen_anew_for_each_batch() -> None:
    sampler = ClassBalancedSampler(torch.arange(60).repeat_interleave(20), 24, 4)
    classes = (sampler.batches(0) // 20)[:, ::4]  # 5 batches for each class, with 5 others each
    met = [len(classes[(classes == number).any(1)].unique()) - 1 for number in range(60)]
    assert sum(met) / 60 > 15  # of 25; chance gives 20


@pytest.mark.parametrize(("classes", "spread"), [(10, 1.0), (11, 1.1)])
def test_every_class_is_used_equally_often(classes: int, spread: float) -> None:
    """A batch has 4 classes, and a class has 2 groups of images: those of 10 classes fill 5 batches.

    Of 11 classes, 2 groups are left over, which differ from epoch to epoch.
    """
    sampler = ClassBalancedSampler(torch.arange(classes).repeat_interleave(7), 12, 3)
    assert len(sampler) == 5
    epochs = torch.cat([sampler.batches(epoch)[:, ::3] // 7 for epoch in range(300)])
    counts = epochs.flatten().bincount(minlength=classes)
    assert counts.max() <= spread * counts.min()


# Number of batches


@settings(max_examples=50)
@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 3))
def test_the_number_of_batches_is_the_largest_possible(data: st.DataObject, groups: list[int], per_class: int) -> None:
    assume(any(groups))
    classes = data.draw(st.integers(1, sum(group > 0 for group in groups)))
    sizes = [group * per_class + data.draw(st.integers(0, per_class - 1)) for group in groups]
    found = len(ClassBalancedSampler(some_labels(sizes), classes * per_class, per_class))
    assert found == most_batches(tuple(sorted(groups)), classes)


@settings(max_examples=50)
@given(settings_of_a_sampler(), st.integers(0, 10**6))
def test_never_fewer_batches_than_the_release(setting: tuple[list[int], int, int], seed: int) -> None:
    sizes, classes, per_class = setting
    ours = len(ClassBalancedSampler(some_labels(sizes), classes * per_class, per_class))
    assert ours >= batches_of_the_release(shuffled(sizes, seed), classes, per_class)


def test_sometimes_more_batches_than_the_release() -> None:
    sizes = [4, 4, 4, 4, 16]
    assert len(ClassBalancedSampler(some_labels(sizes), 8, 4)) == 4
    assert {batches_of_the_release(shuffled(sizes, seed), 2, 4) for seed in range(50)} == {2, 3, 4}


@settings(max_examples=50)
@given(settings_of_a_sampler())
def test_the_length_of_the_release_s_epochs(setting: tuple[list[int], int, int]) -> None:
    sizes, classes, per_class = setting
    groups = torch.tensor(sizes) // per_class
    assert release_epoch_length(groups, classes) == batches_of_the_release(sizes, classes, per_class)
    assert torch.equal(groups, torch.tensor(sizes) // per_class)


TAIL = [*(1000 - 50 * number for number in range(18)), *(60 + number % 7 for number in range(100)), *([9, 13] * 150)]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "full", "release"),
    [(CARS, 392, 14, 14), (CARS, 256, 30, 21), (CARS, 64, 123, 117), (TAIL, 400, 27, 21)],
)
def test_epochs_as_long_as_those_of_the_release(sizes: list[int], batch_size: int, full: int, release: int) -> None:
    lengths = [batches_of_the_release(shuffled(sizes, seed), batch_size // 4, 4) for seed in range(100)]
    labels = some_labels(sizes)
    one, other = (ClassBalancedSampler(labels, batch_size, seed=seed, epoch_length="release") for seed in (0, 1))
    assert len(one) == len(other) == release  # every seed trains for the same number of steps
    assert abs(len(one) - sum(lengths) / 100) <= 0.5 + 3 * np.std(lengths) / RELEASE_ORDERS**0.5
    assert len(ClassBalancedSampler(labels, batch_size)) == full
    batches = one.batches(3)
    assert batches.shape == (release, batch_size)
    assert len(batches.unique()) == batches.numel()


def test_an_invalid_length_of_epochs() -> None:
    with pytest.raises(ConfigError, match='`epoch_length` must be "full" or "release", not \'short\''):
        ClassBalancedSampler([0, 0, 1, 1], 4, 2, epoch_length="short")


def test_cars196() -> None:
    assert (len(CARS), sum(CARS)) == (98, 8054)
    sampler = ClassBalancedSampler(some_labels(CARS), 392)
    assert len(sampler) == 14
    assert str(sampler) == (
        "14 batches per epoch, each of 98 classes x 4 images: 5488 of 8054 images; 0 of 98 classes left out "
        "(fewer than 4 images)"
    )
    assert len(ClassBalancedSampler(some_labels(CARS), 588, per_class=6)) == 9
    assert str(ClassBalancedSampler([0, 0, 1, 1], 4, 2)).startswith("1 batch per epoch, each of 2 classes")


def test_a_batch_for_each_image_of_a_class() -> None:
    assert len(ClassBalancedSampler([3] * 9, 1, per_class=1)) == 9
    assert len(ClassBalancedSampler([3] * 9, 9, per_class=9)) == 1


# Seed and epoch


def test_same_seed_and_epoch_same_batches() -> None:
    def batches(seed: int, epoch: int) -> Tensor:
        torch.manual_seed(random.randrange(2**32))  # torch's own random numbers do not matter
        return ClassBalancedSampler(some_labels([9] * 12), 16, 4, seed).batches(epoch)

    assert torch.equal(batches(3, 5), batches(3, 5))
    assert not torch.equal(batches(3, 5), batches(3, 6))
    assert not torch.equal(batches(3, 5), batches(4, 5))
    assert not torch.equal(batches(0, 1), batches(1, 0))


def test_the_default_seed_is_0() -> None:
    labels = some_labels([9] * 12)
    assert torch.equal(ClassBalancedSampler(labels, 16).batches(0), ClassBalancedSampler(labels, 16, 4, 0).batches(0))


def test_the_key_of_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is used for no other random numbers that are derived from the seed of a run."""
    keys: list[tuple[object, ...]] = []
    monkeypatch.setattr("shortlist.batches.sampler.derived_seed", lambda *key: keys.append(key) or 1)
    ClassBalancedSampler(some_labels([9] * 12), 16, seed=3).batches(5)
    assert keys == [("batches", 3, 5)]


def test_batches_wait_only_while_a_class_goes_on() -> None:
    """10 batches of 2 classes. The second class has groups in 7 batches of the first round and in 2 of the next.

    The 7 batches wait for these two only: the place of the last batch that did not wait is random among the next 8.
    """
    sampler = ClassBalancedSampler(torch.arange(3).repeat_interleave(torch.tensor([3, 9, 8])), 2, 1)
    sampler._batches = 10
    places = set()
    for seed in range(100):
        dealt = sampler._deal(torch.tensor([3, 9, 8]), torch.Generator().manual_seed(seed)).tolist()
        waiting, second = set(dealt[3:10]), dealt[10:]
        free = [place for place, batch in enumerate(second) if batch not in waiting]
        assert free[:2] == [0, 1]
        places.add(free[2])
    assert places == set(range(2, 10))


def test_batches_do_not_change_the_random_state_of_torch() -> None:
    state = torch.get_rng_state()
    ClassBalancedSampler(some_labels([9] * 12), 16).batches(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_each_iteration_is_the_next_epoch() -> None:
    sampler = ClassBalancedSampler(some_labels([9] * 12), 16)
    epochs = [list(sampler) for _ in range(3)]
    assert epochs == [sampler.batches(epoch).tolist() for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len(epochs[0]) == len(sampler) == 6
    assert sampler.epoch == 3


def test_an_epoch_can_be_set_to_repeat_or_resume() -> None:
    sampler = ClassBalancedSampler(some_labels([9] * 12), 16)
    sampler.set_epoch(3)
    assert list(sampler) == sampler.batches(3).tolist()
    assert list(sampler) == sampler.batches(4).tolist()
    sampler.set_epoch(3)
    assert list(sampler) == sampler.batches(3).tolist()


def test_batches_of_an_epoch_neither_depend_on_iteration_nor_advance_it() -> None:
    sampler = ClassBalancedSampler(some_labels([9] * 12), 16)
    before = sampler.batches(0)
    assert sampler.epoch == 0
    list(sampler)
    assert torch.equal(sampler.batches(0), before)
    assert sampler.epoch == 1


def test_an_iterator_gets_its_epoch_with_its_first_batch() -> None:
    sampler = ClassBalancedSampler(some_labels([9] * 12), 16)
    iter(sampler)  # nothing is drawn from it
    broken_off = iter(sampler)
    assert next(broken_off) == sampler.batches(0)[0].tolist()
    other = iter(sampler)
    assert next(other) == sampler.batches(1)[0].tolist()
    assert next(broken_off) == sampler.batches(0)[1].tolist()  # two iterators are independent
    later = iter(sampler)
    sampler.set_epoch(7)
    assert list(later) == sampler.batches(7).tolist()


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_as_batch_sampler_of_a_loader(workers: int, persistent: bool) -> None:
    """With workers, DataLoader calls iter() on its sampler twice for the first epoch, and then once for each."""
    sampler = ClassBalancedSampler(some_labels([9] * 12), 16, seed=1)
    sampler.set_epoch(2)
    loader = DataLoader(torch.arange(108), batch_sampler=sampler, num_workers=workers, persistent_workers=persistent)
    assert len(loader) == 6
    for epoch in (2, 3, 4):
        assert torch.equal(torch.stack(list(loader)), sampler.batches(epoch))
    for batch in loader:  # an epoch that is not finished is followed by the next one
        assert torch.equal(batch, sampler.batches(5)[0])
        break
    assert torch.equal(next(iter(loader)), sampler.batches(6)[0])


@pytest.mark.parametrize(
    "kind",
    [
        list,
        np.array,
        torch.tensor,
        lambda labels: np.array(labels, dtype=np.uint8),
        lambda labels: np.array(labels, dtype=np.uint16),
    ],
)
def test_kinds_of_labels(kind: type) -> None:
    labels = [5, 5, 0, 0, 5, 9, 9, 0]
    found = ClassBalancedSampler(kind(labels), 4, 2, seed=2)
    assert torch.equal(found.batches(0), ClassBalancedSampler(labels, 4, 2, seed=2).batches(0))


# Errors


@pytest.mark.parametrize(
    ("batch_size", "message"),
    [
        (
            20,
            "A batch of `batch_size=20` images cannot be filled. The largest batch possible is 12: 3 classes have 4 "
            "images or more (2 have",
        ),
        (10, "`batch_size=10` is not a multiple of `per_class=4`. The largest batch possible is 12: 3 classes"),
        (0, "`batch_size` must be at least 1, not 0"),
        (-4, "`batch_size` must be at least 1, not -4"),
    ],
)
def test_a_batch_that_cannot_be_filled(batch_size: int, message: str) -> None:
    labels = some_labels([9, 3, 4, 1, 5])
    with pytest.raises(ConfigError) as caught:
        ClassBalancedSampler(labels, batch_size)
    assert message in str(caught.value)
    largest = ClassBalancedSampler(labels, 12)
    assert len(largest) == 1
    assert largest.left_out == [-13, 1]


@pytest.mark.parametrize("labels", [[1, 2, 3], [1, 1, 1, 2, 2, 2]])
def test_no_class_is_large_enough(labels: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"No class has 4 images.*Set a smaller `per_class`"):
        ClassBalancedSampler(labels, 4)


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([], ValueError, "`labels` is empty"),
        (torch.empty(0, 2), ValueError, "`labels` is empty"),
        ([[1, 1], [1, 1]], ValueError, r"labels must be a vector with one integer per item, got shape \(2, 2\)"),
        (3, ValueError, r"labels must be a vector .* got shape \(\)"),
        ([[1, 1], [1]], TypeError, "`labels` must be integers, one per image"),
        ([0.0, 0.0, 1.0, 1.0], TypeError, "labels must be integers, got torch.float32"),
        (np.array([0, 0, np.nan]), TypeError, "labels must be integers, got torch.float64"),
        ([True, False, True, False], TypeError, "labels must be integers, got torch.bool"),
        (["cat", "cat", "dog", "dog"], TypeError, "`labels` must be integers, one per image"),
        (None, TypeError, "`labels` must be integers, one per image"),
    ],
)
def test_invalid_labels(labels: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ClassBalancedSampler(labels, 2, per_class=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"batch_size": 4.0}, TypeError, "`batch_size` must be an integer, not 4.0"),
        ({"batch_size": True, "per_class": 1}, TypeError, "`batch_size` must be an integer, not True"),
        ({"batch_size": None}, TypeError, "`batch_size` must be an integer, not None"),
        ({"per_class": 2.0}, TypeError, "`per_class` must be an integer, not 2.0"),
        ({"per_class": True}, TypeError, "`per_class` must be an integer, not True"),
        ({"per_class": 0}, ValueError, "`per_class` must be at least 1, not 0"),
        ({"per_class": -2}, ValueError, "`per_class` must be at least 1, not -2"),
        ({"seed": 0.5}, TypeError, "`seed` must be an integer, not 0.5"),
        ({"seed": "0"}, TypeError, "`seed` must be an integer, not '0'"),
    ],
)
def test_invalid_numbers(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ClassBalancedSampler([0, 0, 1, 1], **{"batch_size": 4, "per_class": 2, **arguments})


@pytest.mark.parametrize(
    ("epoch", "kind", "message"),
    [
        (0.5, TypeError, "`epoch` must be an integer, not 0.5"),
        (True, TypeError, "`epoch` must be an integer, not True"),
        (-1, ValueError, "`epoch` must be at least 0, not -1"),
    ],
)
def test_invalid_epochs(epoch: Any, kind: type[Exception], message: str) -> None:
    sampler = ClassBalancedSampler([0, 0, 1, 1], 4, per_class=2)
    for use in (sampler.set_epoch, sampler.batches):
        with pytest.raises(kind, match=message):
            use(epoch)
    assert list(sampler) == sampler.batches(0).tolist()


# Seeds


def test_a_derived_seed_depends_on_the_values_of_its_key_only() -> None:
    expected = derived_seed("augment", 1, 2, 3)
    assert expected == 6689706203504725388 == derived_seed("augment", np.int64(1), np.uint8(2), torch.tensor(3))
    keys = [("augment", 1, 2, 3), ("augment", 1, 23), ("augment", 12, 3), ("augment", 3, 2, 1), ("batches", 1, 2, 3)]
    assert len({derived_seed(*key) for key in keys}) == 5
    assert derived_seed("1") != derived_seed(1)
    assert all(0 <= derived_seed("range", number) < 2**63 for number in range(1000))
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        derived_seed("augment", 0.5)


def test_labels_of_a_read_only_array() -> None:
    """There is no warning, which would be an error in the tests."""
    labels = np.arange(8) // 2
    labels.setflags(write=False)
    assert len(list(ClassBalancedSampler(labels, batch_size=4, per_class=2))) == 2
