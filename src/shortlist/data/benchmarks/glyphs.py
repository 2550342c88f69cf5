"""Glyphs: an embedded retrieval benchmark that is rendered on first use, without a download.

Each class is a character. Images of a class differ in font, size, position, rotation, stroke width and background, and
have noise. The characters of the test split are not in the training split.

Pillow draws the characters with the fonts that matplotlib ships. The same seed gives the same bytes with the same
fonts, the same versions of Pillow and FreeType, and the same kind of processor. Other fonts and versions may give other
pixels and even other characters, so a digest of them is part of the name of the folder in the cache.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps, features

from shortlist.cache import build_once, cache_folder
from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError
from shortlist.extras import extra
from shortlist.progress import Progress
from shortlist.seeds import derived_seed

VERSION = 3  # of the rendering; increase it with every change of the pixels
FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
)
COMPARED = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralItalic")
COMPARED_SIZE, MIN_SHARED_INK = 24, 0.96  # side length in pixels; share of the ink of characters that look alike
MIN_FACES = 12  # characters that exist in fewer faces are not used
FONT_SIZE = 128  # characters are drawn two to four times larger than in the images, and then scaled down
SIZE = 48  # side length of an image in pixels
MARGIN = 2  # empty pixels at each side
MIN_GLYPH, MAX_GLYPH = 28, 42  # range of the character's longer side in pixels
MAX_ROTATION = 20  # degrees
MIN_STROKE, MAX_STROKE = 2, 4  # range of the width that is added to each side of thicker strokes, for FONT_SIZE
PATTERN = 0.4  # largest weight of the background's second colour
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
    key = f"glyphs-v{VERSION}-seed{seed}-{classes}x{per_class}-{drawing_digest()}"
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
        for number, image in enumerate(images(character, faces, seed, per_class)):
            image.save(class_folder / f"{number:02d}.bmp")
            if progress:
                progress(done * per_class + number + 1, classes * per_class)


# Fonts and characters


class Face(NamedTuple):
    """An opened font file."""

    font: ImageFont.FreeTypeFont
    characters: frozenset[str]

    def draw(self, character: str, stroke_width: int = 0) -> Image.Image:
        """Draw a character in white on black, cropped to its ink."""
        image = Image.new("L", (3 * FONT_SIZE, 3 * FONT_SIZE))
        middle = (image.width // 2, image.height // 2)
        ImageDraw.Draw(image).text(middle, character, 255, self.font, anchor="mm", stroke_width=stroke_width)
        return image.crop(image.getbbox())


def font_files() -> list[Path]:
    """Return the file of each face, in the order of FACES.

    Raises:
        DataError: If a file is missing.
    """
    with extra("report", "Rendering glyphs"):
        import matplotlib  # imported here because it is slow to import

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = [folder / f"{name}.ttf" for name in FACES]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"matplotlib's fonts in {folder} do not include {', '.join(missing)}. Install matplotlib from PyPI."
        )
    return files


def drawing_digest() -> str:
    """Return a digest of the fonts, and of the versions of Pillow and FreeType that draw them."""
    digest = hashlib.sha256(f"Pillow {PIL.__version__}, FreeType {features.version('freetype2')}".encode())
    for file in font_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def open_faces() -> dict[str, Face]:
    """Open all fonts of FACES, by name."""
    files = [str(file) for file in font_files()]
    from matplotlib.ft2font import FT2Font  # Pillow does not tell which characters a font contains

    fonts = [ImageFont.truetype(file, FONT_SIZE, layout_engine=ImageFont.Layout.BASIC) for file in files]
    characters = [frozenset(map(chr, FT2Font(file).get_charmap())) for file in files]
    return dict(zip(FACES, map(Face, fonts, characters), strict=True))


def distinct_characters(faces: dict[str, Face]) -> list[str]:
    """Return letters, digits and currency signs that look different at any size, in the order of Unicode.

    Excluded are letters with accents (which have a decomposition), shapes like a bar, and every character that looks
    like an earlier one in one of the compared faces: Greek Alpha looks like A, and o like O, since sizes vary.
    """
    unicode = unicodedata.ucd_3_2_0  # frozen, so that categories are the same in every Python version
    counts = Counter(character for face in faces.values() for character in face.characters)
    characters = [
        character
        for character, count in sorted(counts.items())
        if count >= MIN_FACES
        and unicode.category(character) in ("Lu", "Ll", "Lo", "Nd", "Sc")
        and not unicode.decomposition(character)
    ]
    bar, alike = np.zeros(len(characters), bool), np.zeros((len(characters), len(characters)), bool)
    for name in COMPARED:
        present = np.flatnonzero([character in faces[name].characters for character in characters])
        drawn = [faces[name].draw(characters[index]) for index in present]
        bar[present] |= [min(ink.size) < 0.25 * max(ink.size) for ink in drawn]
        alike[np.ix_(present, present)] |= look_alike(drawn)
    chosen: list[int] = []
    for index in np.flatnonzero(~bar):
        if not alike[index, chosen].any():
            chosen.append(int(index))
    return [characters[index] for index in chosen]


def look_alike(drawn: list[Image.Image]) -> NDArray[np.bool_]:
    """Return a mask (n, n) of the pairs in which almost all ink of each is on or next to ink of the other."""
    shapes = [ImageOps.pad(ink, (COMPARED_SIZE, COMPARED_SIZE)) for ink in drawn]
    wider = [shape.filter(ImageFilter.MaxFilter(3)) for shape in shapes]
    ink = np.stack([np.asarray(shape).ravel() > 127 for shape in shapes]).astype(np.float32)
    near = np.stack([np.asarray(shape).ravel() > 127 for shape in wider]).astype(np.float32)
    covered = ink @ near.T > MIN_SHARED_INK * ink.sum(axis=1, keepdims=True)
    both: NDArray[np.bool_] = covered & covered.T
    return both


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


# Images


def images(character: str, faces: dict[str, Face], seed: int, count: int) -> list[Image.Image]:
    """Render `count` images of a character, each in another font; fonts repeat if there are fewer of them."""
    available = [face for face in faces.values() if character in face.characters]
    order = random_state("fonts", seed, character).permutation(len(available))
    chosen = [available[order[number % len(available)]] for number in range(count)]
    return [render(character, face, random_state("image", seed, character, n)) for n, face in enumerate(chosen)]


def render(character: str, face: Face, random: np.random.RandomState) -> Image.Image:
    """Render one image of SIZE x SIZE pixels: paper with a pattern, a character in a dark colour, and noise."""
    image = Image.new("RGB", (SIZE, SIZE), colour(156, 256, random))
    image.paste(colour(156, 256, random), mask=pattern(random))
    image.paste(colour(0, 100, random), mask=place(character, face, random))
    level = random.randint(NOISE // 4, NOISE + 1)
    noisy = np.asarray(image) + random.triangular(-level, 0, level, (SIZE, SIZE, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def colour(low: int, high: int, random: np.random.RandomState) -> tuple[int, int, int]:
    """Draw red, green and blue from `low` up to but excluding `high`, and move them half way to grey."""
    vivid = random.randint(low, high, 3)
    red, green, blue = (vivid + vivid.mean()).astype(int) // 2
    return red, green, blue


def place(character: str, face: Face, random: np.random.RandomState) -> Image.Image:
    """Draw a character at a random angle, size and position, in half of the cases with thicker strokes.

    Returns:
        A mask of SIZE x SIZE pixels: 255 where the character is, and 0 elsewhere.
    """
    thicker = random.randint(2) * random.randint(MIN_STROKE, MAX_STROKE + 1)
    angle, size = random.uniform(-MAX_ROTATION, MAX_ROTATION), random.randint(MIN_GLYPH, MAX_GLYPH + 1)
    turned = face.draw(character, thicker).rotate(angle, Image.Resampling.BILINEAR, expand=True)
    ink = ImageOps.contain(turned.crop(turned.getbbox()), (size, size))
    left, top = (random.randint(MARGIN, SIZE - MARGIN - side + 1) for side in ink.size)
    mask = Image.new("L", (SIZE, SIZE))
    mask.paste(ink, (left, top))
    return mask


def pattern(random: np.random.RandomState) -> Image.Image:
    """Return a mask of SIZE x SIZE pixels for the background's second colour: empty, a gradient, stripes or dots."""
    kind, period, angle = random.randint(4), random.randint(6, 13), random.uniform(0, 2 * np.pi)
    y, x = np.mgrid[:SIZE, :SIZE]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    gradient = (along - along.min()) / np.ptp(along)
    waves, crossing = np.sin(2 * np.pi / period * along), np.sin(2 * np.pi / period * across)
    weights = (np.zeros_like(along), gradient, waves > 0, waves + crossing > 1)[kind]
    return Image.fromarray((255 * PATTERN * weights).astype(np.uint8))


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
