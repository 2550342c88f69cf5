"""Glyphs: an embedded retrieval benchmark that is rendered on first use, without a download.

Each class is a character. Images of a class differ in font, size, position, rotation, stroke width and background, and
have noise. The characters of the test split are not in the training split. The same seed gives the same bytes on every
machine: outlines are filled in integer arithmetic, colours are integers, random numbers come from the frozen generator
of NumPy, and BMP files are not compressed.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shortlist.cache import build_once, cache_folder
from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.glyph_outlines import (
    UNITS,
    Face,
    Outline,
    bounds,
    dilate,
    distinct_characters,
    fill,
    fonts_digest,
    open_faces,
)
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError
from shortlist.progress import Progress
from shortlist.seeds import derived_seed

VERSION = 2  # of the rendering; increase it with every change of the pixels
SIZE = 48  # side length of an image in pixels
SAMPLES = 4  # samples per pixel along each side
MARGIN = 2  # empty pixels at each side, which leave room for thicker strokes
MIN_GLYPH, MAX_GLYPH = 28, 42  # range of the character's longer side in pixels
MAX_HALF_TANGENT = 0.1763  # tangent of 10 degrees, half of the largest rotation
PATTERN = 102  # of 255: largest weight of the background's second colour
NOISE = 24  # largest value that is added to or subtracted from a channel


def glyphs(
    cache: Path | None = None,
    seed: int = 0,
    classes: int = 300,
    per_class: int = 16,
    progress: Progress | None = None,
) -> Catalog:
    """Open the benchmark, and render it first if it is not in the cache.

    Args:
        cache: Folder to keep the images in. None uses the user's cache folder.
        seed: Seed of the images.
        classes: Number of characters; half of them, rounded up, are for training and the others for testing.
        per_class: Number of images per character.
        progress: Callback that is called with (images done, images in total) while rendering.

    Raises:
        DataError: If there are fewer distinct characters than `classes`, or the cache cannot be used.
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
            f"{folder} should contain {expected} images but contains {len(files)}. Delete it to render it again."
        )
    paths = [file.relative_to(folder).as_posix() for file in files]
    splits, classes, _ = zip(*(path.split("/") for path in paths), strict=True)
    return Catalog.from_classes("glyphs", folder, paths, classes, splits)


def _render(folder: Path, seed: int, classes: int, per_class: int, progress: Progress | None) -> None:
    faces = open_faces()
    splits = choose_characters(distinct_characters(faces), seed, classes)
    for done, (character, split) in enumerate(splits.items()):
        class_folder = folder / split / class_name(character)
        class_folder.mkdir(parents=True)
        for number, pixels in enumerate(images(character, faces, seed, per_class)):
            # The resolution is only metadata; fixing it keeps the bytes of the file independent of Pillow's default.
            Image.fromarray(pixels).save(class_folder / f"{number:02d}.bmp", dpi=(72, 72))
            if progress:
                progress(done * per_class + number + 1, classes * per_class)


def choose_characters(characters: list[str], seed: int, classes: int) -> dict[str, str]:
    """Draw `classes` characters at random, and return the split of each."""
    if classes > len(characters):
        raise DataError(f"glyphs has {len(characters)} distinct characters, which is not enough for {classes} classes.")
    drawn = [characters[index] for index in random_state("classes", seed).permutation(len(characters))[:classes]]
    return {character: "train" if place < (classes + 1) // 2 else "test" for place, character in enumerate(drawn)}


def class_name(character: str) -> str:
    """Return a readable class name that is a valid folder name on every system.

    >>> class_name("A")
    '0041 LATIN CAPITAL LETTER A'
    """
    return f"{ord(character):04X} {unicodedata.name(character)}"


def random_state(*key: int | str) -> np.random.RandomState:
    """Return the random generator for a key. NumPy guarantees that RandomState never changes; Generator may."""
    return np.random.RandomState(derived_seed("glyphs", *key) % 2**32)


def images(character: str, faces: dict[str, Face], seed: int, count: int) -> list[NDArray[np.uint8]]:
    """Render `count` images of a character, each in another font; fonts repeat if there are fewer of them."""
    available = [face for face in faces.values() if ord(character) in face.characters]
    order = random_state("fonts", seed, character).permutation(len(available))
    chosen = [available[order[number % len(available)]] for number in range(count)]
    return [render(face.outline(character), random_state("image", seed, character, n)) for n, face in enumerate(chosen)]


def render(outline: Outline, random: np.random.RandomState) -> NDArray[np.uint8]:
    """Render one image (SIZE, SIZE, 3)."""
    ink = stroke(fill(place(outline, random), SIZE * SAMPLES), random)
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
    """Draw red, green and blue from `low` up to but excluding `high`, and move them half way to grey."""
    vivid = random.randint(low, high, 3).astype(np.int64)
    return (3 * vivid + int(vivid.sum())) // 6


def place(outline: Outline, random: np.random.RandomState) -> NDArray[np.int64]:
    """Rotate, scale and move an outline at random within the image. Returns edges on the integer grid of `fill`."""
    half, size, right, down = random.random_sample(4)
    tangent = MAX_HALF_TANGENT * (2 * half - 1)
    cosine, sine = (1 - tangent * tangent) / (1 + tangent * tangent), 2 * tangent / (1 + tangent * tangent)
    x, y = outline[..., 0], outline[..., 1]
    turned = np.stack((cosine * x - sine * y, sine * x + cosine * y), axis=-1)
    low, high = bounds(turned)
    scale = (MIN_GLYPH + (MAX_GLYPH - MIN_GLYPH) * size) / (high - low).max()
    free = SIZE - 2 * MARGIN - (high - low) * scale
    pixels = (turned - low) * scale + free * (right, down) + MARGIN
    on_grid: NDArray[np.int64] = np.rint(pixels * (SAMPLES * UNITS)).astype(np.int64)
    return on_grid


def stroke(mask: NDArray[np.bool_], random: np.random.RandomState) -> NDArray[np.bool_]:
    """Return the mask of a character unchanged or, in half of the cases, with thicker strokes."""
    thicken, width = random.randint(2), random.randint(3, 6)
    return dilate(mask, width) if thicken else mask


def background(random: np.random.RandomState) -> NDArray[np.int64]:
    """Return the weight of the second colour, (SIZE, SIZE) from 0 to PATTERN: flat, a gradient, stripes or dots."""
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


BENCHMARK = Benchmark(
    name="glyphs",
    about="characters in many fonts, rendered on first use",
    read=glyphs,
    protocol="leave-one-out",
    k=(1, 2, 4, 8),
    download="nothing to download",
    expects=None,
    counts={"train": ImageCount(2_400, 150), "test": ImageCount(2_400, 150)},
    writes=True,
)
