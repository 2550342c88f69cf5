"""Which classes train, validate and test, where the data do not say so. Whole classes, always: the open-set setting."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np

from shortlist.data.catalog import Catalog
from shortlist.errors import ConfigError, DataError


def open_set_split(catalog: Catalog, train_share: float = 0.5, seed: int | None = None) -> Catalog:
    """The catalog with whole classes given to train and to test.

    The classes are sorted by name (by the SHA-256 of seed and name where there is a seed), and the first of them train:
    `train_share` of their number, rounded up, but at least one is left for the test. A share of 1 trains on all and a
    share of 0 tests on all. Without a seed this is the paper's way: the first half trains.

    Raises:
        DataError: fewer than two classes and a share between 0 and 1.
    """
    if not 0 <= train_share <= 1:
        raise ConfigError(f"`train_share` is the share of classes that train, from 0 to 1, not {train_share}")
    present = [(catalog.class_names[label], int(label)) for label in catalog.classes()]
    if len(present) < 2 and 0 < train_share < 1:
        raise DataError(
            f"{catalog.name} has {_classes(len(present))}: it takes at least two to train on one and test on another. "
            "Add classes, or train on all of them with `train_share=1`"
        )
    order = sorted(present, key=lambda item: item[0] if seed is None else _shuffled(seed, item[0]))
    trains = math.ceil(len(order) * train_share - 1e-9)  # 0.7 * 10 is a little more than 7
    if train_share < 1:
        trains = min(trains, len(order) - 1)
    training = [label for _, label in order[:trains]]
    return replace(catalog, splits=np.where(np.isin(catalog.labels, training), "train", "test"))


def half_validation(catalog: Catalog) -> Catalog:
    """The catalog with the second half of the training classes, in the order of `class_names`, as validation.

    The first half, rounded up, goes on training: how the paper chooses its hyper-parameters.

    Raises:
        DataError: fewer than two training classes, or there is a validation split already.
    """
    if (catalog.splits == "validation").any():
        raise DataError(f"{catalog.name} has a validation split of its own; use it, or take it out")
    classes = catalog.split("train").classes()
    if len(classes) < 2:
        raise DataError(
            f"{catalog.name} has {_classes(len(classes), 'training ')}: too few to keep half of them for validation"
        )
    validates = np.isin(catalog.labels, classes[math.ceil(len(classes) / 2) :]) & (catalog.splits == "train")
    return replace(catalog, splits=np.where(validates, "validation", catalog.splits))


def _shuffled(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogatepass")).hexdigest()


def _classes(number: int, kind: str = "") -> str:
    return f"{number} {kind}{'class' if number == 1 else 'classes'}"
