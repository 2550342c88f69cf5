"""Assign whole classes to the training, validation and test splits: the open-set setting."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shortlist.data.catalog import Catalog
from shortlist.errors import ConfigError, DataError
from shortlist.progress import format_count


def open_set_split(catalog: Catalog, train_share: float = 0.5, seed: int | None = None) -> Catalog:
    """Return the catalog with whole classes assigned to train and test.

    If images have several labels, images that share a label are in the same split: labels that are linked by images
    with several labels, directly or indirectly, count as one class, which has the name of the first of them.

    Args:
        catalog: Catalog whose splits are replaced.
        train_share: Share of the classes used for training, rounded up to whole classes; at least one class is kept
            for the test unless the share is 1. A share of 1 trains on all classes, a share of 0 tests on all.
        seed: None takes the first classes in order of their names, as in the paper. An integer orders the classes by
            the SHA-256 of seed and name instead, which is the same on every machine.

    Raises:
        DataError: If there are fewer than two classes and the share is between 0 and 1.
        ConfigError: If the share is not between 0 and 1.
    """
    if not 0 <= train_share <= 1:
        raise ConfigError(f"`train_share` is the share of classes used for training, from 0 to 1, not {train_share}.")
    groups = _groups(catalog)
    present = [(catalog.class_names[label], label) for label in np.unique(groups).tolist()]
    if len(present) < 2 and 0 < train_share < 1:
        linked = "" if catalog.label_sets is None else " (all labels are linked by images with several labels)"
        choice = "Add classes" if catalog.label_sets is None else "Add a column split"
        raise DataError(
            f"{catalog.name} has {format_count(len(present), 'classes')}{linked}, but at least two are needed to train "
            f"on some and test on others. {choice}, or train on all of them with `train_share=1`."
        )
    order = sorted(present, key=lambda item: item[0] if seed is None else _seeded_key(seed, item[0]))
    number = math.ceil(len(order) * train_share - 1e-9)  # 0.7 * 10 is slightly more than 7 in floating point
    if train_share < 1:
        number = min(number, len(order) - 1)
    training = [label for _, label in order[:number]]
    return replace(catalog, splits=np.where(np.isin(groups, training), "train", "test"))


def half_validation(catalog: Catalog) -> Catalog:
    """Return the catalog with the second half of the training classes moved to validation.

    Classes are taken in the order of `class_names`, and the first half is rounded up. The paper chooses its
    hyper-parameters on this split.

    Raises:
        DataError: If there are fewer than two training classes, or the catalog already has a validation split.
    """
    if (catalog.splits == "validation").any():
        raise DataError(f"{catalog.name} already has a validation split; use it, or remove it.")
    groups = _groups(catalog)
    classes = np.unique(groups[catalog.splits == "train"])
    if len(classes) < 2:
        raise DataError(
            f"{catalog.name} has {format_count(len(classes), 'training classes')}: too few to validate on half of them."
        )
    validation = np.isin(groups, classes[math.ceil(len(classes) / 2) :]) & (catalog.splits == "train")
    return replace(catalog, splits=np.where(validation, "validation", catalog.splits))


def _groups(catalog: Catalog) -> NDArray[np.int64]:
    """Return the class of each image, (n,): the smallest of the labels linked by images with several labels."""
    if catalog.label_sets is None:
        return catalog.labels
    first = [each[0] for each in catalog.label_sets for _ in each[1:]]
    further = [label for each in catalog.label_sets for label in each[1:]]
    group, before = np.arange(len(catalog.class_names)), None
    while before is None or not np.array_equal(group, before):
        before = group.copy()
        np.minimum.at(group, first, group[further])
        np.minimum.at(group, further, group[first])
        group = group[group]
    groups: NDArray[np.int64] = group[catalog.labels]
    return groups


def _seeded_key(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogatepass")).hexdigest()
