"""What the ground truth of the landmark benchmarks has in common: indices into a list of images, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

UNLABELLED = ("unlabelled",)  # the one class of images that are judged, not labelled


def names(file: Path, content: Any, key: str) -> list[str]:
    """A list of names in a pickle's dict.

    Raises:
        DataError: there is none, or it holds something else.
    """
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(name, str) for name in found):
        raise DataError(f"{file} has no list of names {key!r}: it is not the ground truth that was expected")
    return list(found)


def queries(file: Path, content: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
    """What is said of each of `number` queries.

    Raises:
        DataError: it is not a dict for each.
    """
    found = content.get("gnd")
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, dict) for each in found):
        raise DataError(f"{file} has no list 'gnd' of a dict a query: it is not the ground truth that was expected")
    if len(found) != number:
        raise DataError(f"{file} judges {len(found)} queries, but lists {number}")
    return list(found)


def indices(file: Path, judged: Mapping[str, Any], key: str, images: int) -> NDArray[np.int64]:
    """The images that are `key` for a query.

    Raises:
        DataError: it does not say, or says something else than numbers of images.
    """
    if key not in judged:
        has = ", ".join(map(str, judged))
        raise DataError(f"{file} does not say {key!r} (it has: {has}): it is not the ground truth that was expected")
    found = judged[key]
    whole = isinstance(found, (list, tuple)) and all(type(index) is int for index in found)
    if not whole or not all(0 <= index < images for index in found):
        raise DataError(f"{file}: the {key} of a query must be numbers of the {images} images")
    return np.array(found, dtype=np.int64)
