"""Validate the ground truth of the landmark benchmarks: lists of names, and indices into them, from a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

NO_CLASS = "unlabelled"  # class name of a benchmark with judgements instead of labels
_UNEXPECTED = "it is not the expected ground truth"


def image_names(file: Path, content: Any, key: str) -> list[str]:
    """Return the list of names under `key`.

    Args:
        file: The pickle, for messages.
        content: Content of the pickle.
        key: Key of its dict.

    Raises:
        DataError: If there is no such list, or it contains values other than strings.
    """
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(name, str) for name in found):
        raise DataError(f"{file} has no list of names {key!r}: {_UNEXPECTED}.")
    return list(found)


def query_judgements(file: Path, content: Mapping[str, Any], queries: int) -> list[Mapping[str, Any]]:
    """Return the ground truth of each query: one dict per query.

    Args:
        file: The pickle, for messages.
        content: Content of the pickle.
        queries: Number of queries.

    Raises:
        DataError: If there is not exactly one dict per query.
    """
    found = content.get("gnd")
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, dict) for each in found):
        raise DataError(f"{file} has no list 'gnd' with one dict per query: {_UNEXPECTED}.")
    if len(found) != queries:
        raise DataError(f"{file} has ground truth for {len(found)} queries, but lists {queries}.")
    return list(found)


def image_indices(file: Path, judged: Mapping[str, Any], key: str, images: int) -> NDArray[np.int64]:
    """Return the image indices that a dict holds under `key`.

    Args:
        file: The pickle, for messages.
        judged: Ground truth of one query.
        key: Key of the dict, such as "easy".
        images: Number of images that the indices refer to.

    Raises:
        DataError: If the key is missing, or its value is not a list of valid indices.
    """
    if key not in judged:
        available = ", ".join(map(str, judged))
        raise DataError(f"{file} has no entry {key!r} (it has: {available}): {_UNEXPECTED}.")
    found = judged[key]
    is_integers = isinstance(found, (list, tuple)) and all(type(index) is int for index in found)
    if not is_integers or not all(0 <= index < images for index in found):
        raise DataError(f"{file}: the entry {key!r} must contain indices of the {images} images.")
    return np.array(found, dtype=np.int64)
