"""The embedded default: a retrieval benchmark rendered on the spot, nothing to download.

Each class is a character, each image that character in another font, size, place, rotation, stroke and background, with
noise; always dark on light. The characters of the test split are not in the train split. The same seed gives the same
bytes everywhere: outlines are filled in integers, colours are integers, the random stream is numpy's frozen one, and a
BMP file has no compression.
"""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.cache import build_once, cache_folder
from shortlist.data.catalog import Catalog
from shortlist.data.glyph_outlines import (
    UNITS,
    Face,
    Outline,
    bounds,
    distinct_characters,
    fill,
    fonts_digest,
    grown,
    open_faces,
)
from shortlist.errors import DataError
from shortlist.seeds import derived_seed

VERSION = 2  # of the rendering: raise it with every change to the pixels
SIZE = 48  # pixels, both ways
SAMPLES = 4  # to a pixel, both ways
MARGIN = 2  # pixels that stay free on every side, for the stroke
SMALLEST, LARGEST = 28, 42  # pixels of the character's longer side
HALF_TURN = 0.1763  # tangent of 10 degrees, half of the largest rotation
PATTERN = 102  # of 255: how far the background goes from its first colour to its second
NOISE = 24  # the most that is added to a channel, each way


def glyphs(
    cache: Path | None = None,
    seed: int = 0,
    classes: int = 300,
    per_class: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Catalog:
    """The benchmark, rendered if this is the first time.

    Args:
        cache: where it is kept; the user's cache if None.
        seed: with the two numbers below, all that the images depend on.
        classes: characters, half of them (rounded up) to train on and the others to test.
        per_class: images of each.
        progress: called with (images done, images in all) while rendering.

    Raises:
        DataError: there are not that many different characters, or the cache cannot be used.
    """
    if classes < 2 or per_class < 1:
        raise DataError(f"glyphs needs at least 2 classes of 1 image, not {classes} of {per_class}.")
    key = f"glyphs-v{VERSION}-seed{seed}-{classes}x{per_class}-{fonts_digest()}"
    folder = cache_folder(key) if cache is None else Path(cache) / key
    build_once(folder, lambda partial: _render(partial, seed, classes, per_class, progress))
    return _catalog(folder, classes * per_class)


def _catalog(folder: Path, expected: int) -> Catalog:
    files = sorted(folder.glob("*/*/*.bmp"), key=lambda file: (file.parent.name, file.name))
    if len(files) != expected:
        raise DataError(
            f"{folder} should hold {expected} images and holds {len(files)}. Delete it: it is rendered again."
        )
    names, labels = np.unique([file.parent.name for file in files], return_inverse=True)
    return Catalog(
        name="glyphs",
        root=folder,
        paths=np.array([file.relative_to(folder).as_posix() for file in files], dtype=object),
        labels=labels,
        class_names=tuple(names.tolist()),
        splits=np.array([file.parent.parent.name for file in files]),
    )


def _render(folder: Path, seed: int, classes: int, per_class: int, progress: Callable[[int, int], None] | None) -> None:
    faces = open_faces()
    splits = choose(distinct_characters(faces), seed, classes)
    for done, (character, split) in enumerate(splits.items()):
        home = folder / split / class_name(character)
        home.mkdir(parents=True)
        for number, pixels in enumerate(images(character, faces, seed, per_class)):
            (home / f"{number:02d}.bmp").write_bytes(bmp(pixels))
            if progress:
                progress(done * per_class + number + 1, classes * per_class)


def choose(characters: list[str], seed: int, classes: int) -> dict[str, str]:
    """As many characters as asked for, drawn at random, each with its split."""
    if classes > len(characters):
        raise DataError(f"glyphs has {len(characters)} different characters, so it cannot give {classes} classes.")
    drawn = [characters[index] for index in stream("classes", seed).permutation(len(characters))[:classes]]
    return {character: "train" if place < (classes + 1) // 2 else "test" for place, character in enumerate(drawn)}


def class_name(character: str) -> str:
    """Readable, and a file name on every system.

    >>> class_name("A")
    '0041 LATIN CAPITAL LETTER A'
    """
    return f"{ord(character):04X} {unicodedata.name(character)}"


def stream(*key: int | str) -> np.random.RandomState:
    """Random numbers for one purpose; numpy promises that RandomState's never change (Generator's may)."""
    return np.random.RandomState(derived_seed("glyphs", *key) % 2**32)


def images(character: str, faces: dict[str, Face], seed: int, count: int) -> list[NDArray[np.uint8]]:
    """A character in as many fonts as there are, then again from the first."""
    able = [face for face in faces.values() if ord(character) in face.characters]
    order = stream("fonts", seed, character).permutation(len(able))
    chosen = [able[order[number % len(able)]] for number in range(count)]
    return [draw(face.outline(character), stream("image", seed, character, n)) for n, face in enumerate(chosen)]


def draw(outline: Outline, random: np.random.RandomState) -> NDArray[np.uint8]:
    """One image (SIZE, SIZE, 3)."""
    ink = stroke(fill(placed(outline, random), SIZE * SAMPLES), random)
    rows = ink.reshape(SIZE, SAMPLES, -1).view(np.uint8).sum(axis=1, dtype=np.uint8)
    coverage = rows.reshape(SIZE, SIZE, SAMPLES).sum(axis=2, dtype=np.int64)[..., None]  # 0 to SAMPLES squared
    paper, second, pen = colour(156, 256, random), colour(156, 256, random), colour(0, 100, random)
    pattern = background(random)[..., None]  # 0 to 255
    ground = (paper * (255 - pattern) + second * pattern) // 255
    clean = (pen * coverage + ground * (SAMPLES**2 - coverage)) // SAMPLES**2
    level = random.randint(NOISE // 4, NOISE + 1)
    noise = np.frombuffer(random.bytes(2 * clean.size), np.uint8).reshape(2, *clean.shape).sum(axis=0, dtype=np.int64)
    pixels: NDArray[np.uint8] = np.clip(clean + (noise - 255) * level // 255, 0, 255).astype(np.uint8)
    return pixels


def colour(low: int, high: int, random: np.random.RandomState) -> NDArray[np.int64]:
    """Red, green and blue from `low` to below `high`, half way to grey."""
    vivid = random.randint(low, high, 3).astype(np.int64)
    return (3 * vivid + int(vivid.sum())) // 6


def placed(outline: Outline, random: np.random.RandomState) -> NDArray[np.int64]:
    """The outline turned, scaled and moved within the image, on the grid of `fill`."""
    half, size, right, down = random.random_sample(4)
    tangent = HALF_TURN * (2 * half - 1)
    cosine, sine = (1 - tangent * tangent) / (1 + tangent * tangent), 2 * tangent / (1 + tangent * tangent)
    x, y = outline[..., 0], outline[..., 1]
    turned = np.stack((cosine * x - sine * y, sine * x + cosine * y), axis=-1)
    low, high = bounds(turned)
    scale = (SMALLEST + (LARGEST - SMALLEST) * size) / (high - low).max()
    free = SIZE - 2 * MARGIN - (high - low) * scale
    pixels = (turned - low) * scale + free * (right, down) + MARGIN
    on_grid: NDArray[np.int64] = np.rint(pixels * (SAMPLES * UNITS)).astype(np.int64)
    return on_grid


def stroke(mask: NDArray[np.bool_], random: np.random.RandomState) -> NDArray[np.bool_]:
    """The character as the font has it, or thickened."""
    thicken, width = random.randint(2), random.randint(3, 6)
    return grown(mask, width) if thicken else mask


def background(random: np.random.RandomState) -> NDArray[np.int64]:
    """How much of the second colour is where, 0 to PATTERN: flat, a gradient, stripes or dots; (SIZE, SIZE)."""
    kind, period, across, down = random.randint(4), random.randint(6, 13), *random.randint(-8, 9, 2)
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.int64)
    slope = x * across + y * (down or 1)
    share = np.zeros((SIZE, SIZE), dtype=np.int64)
    if kind == 1:
        share = PATTERN * (slope - slope.min()) // (slope.max() - slope.min())
    elif kind == 2:
        share[slope // 8 % period < period // 2] = PATTERN
    elif kind == 3:
        distance = ((x + across) % period - period // 2) ** 2 + ((y + down) % period - period // 2) ** 2
        share[distance * 12 < period**2] = PATTERN
    return share


def bmp(pixels: NDArray[np.uint8]) -> bytes:
    """An uncompressed 24-bit BMP file of (height, width, 3); the width a multiple of 4, as rows have no padding."""
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels[::-1, :, ::-1]).tobytes()  # from the lowest row, blue green red
    header = struct.pack("<2sIHHI", b"BM", 54 + len(rows), 0, 0, 54)
    return header + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(rows), 2835, 2835, 0, 0) + rows
