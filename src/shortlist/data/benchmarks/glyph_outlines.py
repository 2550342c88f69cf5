"""Outlines of characters: read from the fonts that matplotlib ships, filled, and compared.

The results are the same on every machine: font units are integers, there is no hinting, floating-point numbers are used
only in operations that IEEE 754 rounds exactly (no sine, no matrix library), and outlines are filled in integers.
Pillow's drawing functions are not used here, because their pixels may differ between versions of Pillow and FreeType.
"""

from __future__ import annotations

import hashlib
import io
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError
from shortlist.extras import extra

FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
)
COMPARED = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralItalic")
MIN_FACES = 12  # characters that exist in fewer faces are not used
UNITS = 64  # grid units of `fill` per sample, as in the 26.6 format of rasterisers
CURVE_STEPS = 4  # line segments per curve; more are not visible at this size

Outline = NDArray[np.float64]  # (edges, 2 end points, x and y); y points down


class Face(NamedTuple):
    """An opened font file."""

    characters: dict[int, str]  # code point -> name of its glyph in the font
    glyphs: Any  # table of outlines, of fontTools

    def outline(self, character: str) -> Outline:
        """Return the closed contours of a character as straight edges, in font units."""
        coordinates, ends, flags = self.glyphs[self.characters[ord(character)]].getCoordinates(self.glyphs)[:3]
        points = np.array(coordinates.array, dtype=np.float64).reshape(-1, 2) * (1, -1)
        on_curve = np.array(flags, dtype=np.uint8) & 1 == 1
        starts = [0, *(end + 1 for end in ends[:-1])]
        contours = [slice(start, end + 1) for start, end in zip(starts, ends, strict=True)]
        return np.concatenate([_edges(points[contour], on_curve[contour]) for contour in contours])


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


def fonts_digest() -> str:
    """Return a digest of the font files, since a distribution may replace the fonts of matplotlib by its own."""
    digest = hashlib.sha256()
    for file in font_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def open_faces() -> dict[str, Face]:
    """Open all fonts of FACES, by name."""
    with extra("report", "Rendering glyphs"):
        from fontTools.ttLib import TTFont

    files = [io.BytesIO(file.read_bytes()) for file in font_files()]  # fontTools would keep a file on disk open
    fonts = {name: TTFont(file, lazy=True) for name, file in zip(FACES, files, strict=True)}
    return {name: Face(font.getBestCmap(), font["glyf"]) for name, font in fonts.items()}


def _edges(points: NDArray[np.float64], on_curve: NDArray[np.bool_]) -> Outline:
    """Convert a TrueType contour (n, 2) to straight edges.

    A point off the curve is the control point of a quadratic curve, which starts and ends at the neighbouring points
    or, if these are off the curve as well, half way to them.
    """
    previous, following = np.arange(len(points)) - 1, np.arange(len(points)) + 1 - len(points)  # negative: wraps around
    start = np.where(on_curve[previous, None], points[previous], (points[previous] + points) / 2)
    end = np.where(on_curve[following, None], points[following], (points[following] + points) / 2)
    t = np.arange(CURVE_STEPS + 1)[:, None] / CURVE_STEPS
    curves = (1 - t) * (1 - t) * start[:, None] + 2 * t * (1 - t) * points[:, None] + t * t * end[:, None]  # (n, 5, 2)
    curves[on_curve] = points[on_curve][:, None]
    needed = ~on_curve[:, None] | (t[:, 0] == 0)  # a point on the curve is needed only once
    path = curves[needed]
    return np.stack((path, path[np.arange(len(path)) + 1 - len(path)]), axis=1)


def fill(edges: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Return a mask (size, size) of the samples inside of an outline, by the non-zero winding rule.

    Args:
        edges: (n, 2, 2) end points, in UNITS per sample; all must be inside the image.
        size: Number of samples along each side.
    """
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    winding = np.sign(y1 - y0)
    x0, x1 = np.where(winding < 0, x1, x0), np.where(winding < 0, x0, x1)
    y0, y1 = np.minimum(y0, y1), np.maximum(y0, y1)
    first, stop = (y0 + UNITS // 2 - 1) // UNITS, (y1 + UNITS // 2 - 1) // UNITS  # rows with y0 <= centre < y1
    rows = stop - first
    edge = np.repeat(np.arange(len(edges)), rows)  # one entry per crossing of an edge and a row
    row = np.arange(len(edge)) - np.repeat(np.cumsum(rows) - rows, rows) + first[edge]
    rise = row * UNITS + UNITS // 2 - y0[edge]
    x = x0[edge] + rise * (x1 - x0)[edge] // (y1 - y0)[edge]
    column = (x + UNITS // 2 - 1) // UNITS
    steps = np.bincount(row * (size + 1) + column, weights=winding[edge], minlength=size * (size + 1))
    inside: NDArray[np.bool_] = steps.reshape(size, size + 1)[:, :size].cumsum(axis=1) != 0
    return inside


def bounds(outline: Outline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the upper left and the lower right corner of the bounding box."""
    return outline.min(axis=(0, 1)), outline.max(axis=(0, 1))


def dilate(mask: NDArray[np.bool_], by: int) -> NDArray[np.bool_]:
    """Dilate a mask (..., height, width) by `by` samples, with an octagon made of alternating squares and crosses."""
    for step in range(by):
        wide = mask.copy()
        wide[..., 1:] |= mask[..., :-1]
        wide[..., :-1] |= mask[..., 1:]
        spread = mask if step % 2 else wide  # spread vertically: a cross or a square
        dilated = wide.copy()
        dilated[..., 1:, :] |= spread[..., :-1, :]
        dilated[..., :-1, :] |= spread[..., 1:, :]
        mask = dilated
    return mask


def distinct_characters(faces: dict[str, Face]) -> list[str]:
    """Return letters, digits and currency signs that look different at any size, in the order of Unicode.

    Excluded are letters with accents (which have a decomposition), shapes like a bar, and every character that looks
    like an earlier one in one of the compared faces: Greek Alpha looks like A, and o like O, since sizes vary.
    """
    characters = _candidates(faces)
    alike = np.zeros((len(characters), len(characters)), dtype=bool)
    bar = np.zeros(len(characters), dtype=bool)
    for name in COMPARED:
        shapes, narrowness = _shapes(faces[name], characters)
        alike |= _alike(shapes)
        bar |= narrowness < 0.25
    chosen: list[int] = []
    for index in np.flatnonzero(~bar):
        if not alike[index, chosen].any():
            chosen.append(int(index))
    return [characters[index] for index in chosen]


def _candidates(faces: dict[str, Face]) -> list[str]:
    unicode = unicodedata.ucd_3_2_0  # frozen, so that categories are the same in every Python version
    counts = Counter(code for face in faces.values() for code in face.characters)
    common = [chr(code) for code, faces_with_it in sorted(counts.items()) if faces_with_it >= MIN_FACES]
    kinds = ("Lu", "Ll", "Lo", "Nd", "Sc")
    return [one for one in common if unicode.category(one) in kinds and not unicode.decomposition(one)]


def _shapes(face: Face, characters: list[str], size: int = 24) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return masks (n, size, size) of the characters at full size, empty if the face lacks them, and their narrowness.

    Narrowness (n,) is the shorter side divided by the longer side.
    """
    shapes, narrowness = np.zeros((len(characters), size, size), dtype=bool), np.ones(len(characters))
    for index, character in enumerate(characters):
        if ord(character) not in face.characters:
            continue
        outline = face.outline(character)
        low, high = bounds(outline)
        sides = high - low
        centred = (outline - (low + high) / 2) * (size / sides.max()) + size / 2
        shapes[index] = fill(np.rint(centred * UNITS).astype(np.int64), size)
        narrowness[index] = sides.min() / sides.max()
    return shapes, narrowness


def _alike(shapes: NDArray[np.bool_], share: float = 0.95) -> NDArray[np.bool_]:
    """Return a mask (n, n) of the pairs in which almost all ink of each shape is on or next to ink of the other."""
    ink = shapes.reshape(len(shapes), -1).astype(np.float32)
    near = dilate(shapes, by=1).reshape(len(shapes), -1).astype(np.float32)
    covered = ink @ near.T  # numbers of samples: integers, which are exact in float32 in any order
    enough = covered > share * ink.sum(axis=1, keepdims=True)
    both: NDArray[np.bool_] = enough & enough.T
    return both
