"""Near-duplicates: images that differ only in size, compression or small details, found by a perceptual hash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shortlist.data.catalog import Catalog

MAX_DISTANCE = 7  # maximum number of differing bits, of 63, in the hashes of near-duplicates
MAX_DIFFERENCE = 16.0  # maximum mean difference, of 255, of their thumbnails
MIN_SIDE = 64  # minimum side in pixels of an image for `visual_hash`
_SIDE, _FREQUENCIES, _THUMBNAIL = 32, 8, 8  # pixels, cosines and pixels in each direction
_TILE = 1024  # number of hashes that are compared with each other at once
_ONES = np.unpackbits(np.arange(2**16, dtype=np.uint16).view(np.uint8)).reshape(-1, 16).sum(1, dtype=np.uint8)
_COSINES = np.cos(np.pi / _SIDE * np.outer(np.arange(_FREQUENCIES), np.arange(_SIDE) + 0.5))


class VisualHash(NamedTuple):
    """Perceptual hash and thumbnail of an image.

    Attributes:
        hash: 63 bits: whether each low frequency is stronger than the median.
        thumbnail: 8 x 8 pixels, (192,) uint8, because images with the same hash can differ in colour.
    """

    hash: np.uint64
    thumbnail: NDArray[np.uint8]


def visual_hash(image: Image.Image) -> VisualHash:
    """Compute the perceptual hash and the thumbnail of an RGB image."""
    grey = image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR).convert("L")
    frequencies = (_COSINES @ np.asarray(grey, dtype=np.float64) @ _COSINES.T).round(3).ravel()
    bits = np.concatenate(([False], frequencies[1:] > np.median(frequencies[1:])))  # without the mean brightness
    thumbnail = image.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BILINEAR)
    return VisualHash(np.packbits(bits).view(np.uint64)[0], np.asarray(thumbnail).reshape(-1))


def near_duplicates(visual_hashes: list[VisualHash]) -> NDArray[np.int64]:
    """Find all pairs of images whose hashes differ in at most `MAX_DISTANCE` bits, and whose thumbnails are similar.

    Hashes that differ in at most 7 bits agree in at least one of their 8 bytes. Therefore, each image is compared only
    with the images that have an equal byte, about 1/32 of all.

    Returns:
        Pairs of indices, (m, 2), the smaller index first, in ascending order.
    """
    if not visual_hashes:
        return np.empty((0, 2), np.int64)
    hashes = np.array([each.hash for each in visual_hashes])
    thumbnails = np.stack([each.thumbnail for each in visual_hashes])
    found = [np.empty((0, 2), np.int64)]
    for band in hashes.view(np.uint8).reshape(-1, 8).T:
        order = np.argsort(band, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(band[order])) + 1):
            for left, right in _tiles(members):
                differing = (hashes[left][:, None] ^ hashes[right]).view(np.uint16).reshape(len(left), len(right), -1)
                one, other = np.nonzero(_ONES[differing].sum(2) <= MAX_DISTANCE)
                pairs = np.column_stack((left[one], right[other]))
                pairs = pairs[pairs[:, 0] < pairs[:, 1]]
                found.append(pairs[_difference(thumbnails, pairs) <= MAX_DIFFERENCE])
    return np.unique(np.concatenate(found), axis=0)


def misleading_pairs(catalog: Catalog, pairs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Select pairs of near-duplicates that bias results.

    Args:
        catalog: The images.
        pairs: Rows of the catalog, (m, 2).

    Returns:
        Pairs (s, 2) without a common label, or with exactly one training image; and whether the latter is the case,
        (s,). Pairs with one training image come first.
    """
    in_training = catalog.splits[pairs] == "train"
    leaks = (in_training[:, 0] != in_training[:, 1]) & (catalog.splits[pairs] != "").all(1)
    chosen = leaks | ~catalog.share_label(pairs[:, 0], pairs[:, 1])
    order = np.flatnonzero(chosen)[np.argsort(~leaks[chosen], kind="stable")]
    return pairs[order], leaks[order]


def _tiles(members: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield pairs of tiles of a group to compare. Its indices are ascending, because they were sorted stably."""
    if len(members) > 1:
        parts = [members[start : start + _TILE] for start in range(0, len(members), _TILE)]
        yield from ((left, right) for number, left in enumerate(parts) for right in parts[number:])


def _difference(thumbnails: NDArray[np.uint8], pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    one, other = thumbnails[pairs[:, 0]], thumbnails[pairs[:, 1]]
    difference: NDArray[np.float64] = (np.maximum(one, other) - np.minimum(one, other)).mean(1)
    return difference
