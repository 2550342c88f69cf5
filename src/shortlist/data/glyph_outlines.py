"""Characters as outlines: read from the fonts that matplotlib ships, filled, and told apart.

Nothing here leaves room for another result on another machine: font units are integers, there is no hinting, fractions
only meet the operations that IEEE 754 rounds in one way (no sine, no matrix library), and the fill is in integers.
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
FEWEST_FACES = 12  # a character that fewer of them have is not used
UNITS = 64  # of the fill's grid to a sample, as in a rasteriser's 26.6 numbers
CURVE_STEPS = 4  # straight pieces to a curve; more are not seen at this size

Outline = NDArray[np.float64]  # (edges, 2 ends, x and y), y downwards


class Face(NamedTuple):
    """One font file, opened."""

    characters: dict[int, str]  # code point -> the font's name of its glyph
    glyphs: Any  # fontTools' table of outlines

    def outline(self, character: str) -> Outline:
        """The closed contours of a character as straight edges, in font units."""
        coordinates, ends, flags = self.glyphs[self.characters[ord(character)]].getCoordinates(self.glyphs)[:3]
        points = np.array(coordinates.array, dtype=np.float64).reshape(-1, 2) * (1, -1)
        on_curve = np.array(flags, dtype=np.uint8) & 1 == 1
        starts = [0, *(end + 1 for end in ends[:-1])]
        contours = [slice(start, end + 1) for start, end in zip(starts, ends, strict=True)]
        return np.concatenate([_edges(points[contour], on_curve[contour]) for contour in contours])


def font_files() -> list[Path]:
    """The file of each face, in the order of FACES. Raises DataError where one is missing."""
    with extra("report", "Drawing glyphs"):
        import matplotlib  # here, because it takes a while to import

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = [folder / f"{name}.ttf" for name in FACES]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"matplotlib's fonts in {folder} lack {', '.join(missing)}. Install matplotlib from PyPI.")
    return files


def fonts_digest() -> str:
    """Tells one set of fonts from another, for a distribution may have put its own in matplotlib's place."""
    digest = hashlib.sha256()
    for file in font_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def open_faces() -> dict[str, Face]:
    with extra("report", "Drawing glyphs"):
        from fontTools.ttLib import TTFont

    files = [io.BytesIO(file.read_bytes()) for file in font_files()]  # in memory: fontTools would keep a file open
    fonts = {name: TTFont(file, lazy=True) for name, file in zip(FACES, files, strict=True)}
    return {name: Face(font.getBestCmap(), font["glyf"]) for name, font in fonts.items()}


def _edges(points: NDArray[np.float64], on_curve: NDArray[np.bool_]) -> Outline:
    """A TrueType contour (n, 2) as straight edges: a point off the curve bends it between its neighbours' middles."""
    last, following = (
        np.arange(len(points)) - 1,
        np.arange(len(points)) + 1 - len(points),
    )  # indices below 0 wrap around
    start = np.where(on_curve[last, None], points[last], (points[last] + points) / 2)
    end = np.where(on_curve[following, None], points[following], (points[following] + points) / 2)
    t = np.arange(CURVE_STEPS + 1)[:, None] / CURVE_STEPS
    curves = (1 - t) * (1 - t) * start[:, None] + 2 * t * (1 - t) * points[:, None] + t * t * end[:, None]  # (n, 5, 2)
    curves[on_curve] = points[on_curve][:, None]
    needed = ~on_curve[:, None] | (t[:, 0] == 0)  # of a point on the curve, once
    path = curves[needed]
    return np.stack((path, path[np.arange(len(path)) + 1 - len(path)]), axis=1)


def fill(edges: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Which samples (size, size) lie inside, by the non-zero winding rule; edges in UNITS to a sample, all within."""
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    winding = np.sign(y1 - y0)
    x0, x1 = np.where(winding < 0, x1, x0), np.where(winding < 0, x0, x1)
    y0, y1 = np.minimum(y0, y1), np.maximum(y0, y1)
    first, stop = (y0 + UNITS // 2 - 1) // UNITS, (y1 + UNITS // 2 - 1) // UNITS  # rows whose middle has y0 <= y < y1
    rows = stop - first
    edge = np.repeat(np.arange(len(edges)), rows)  # one entry for each crossing of an edge and a row
    row = np.arange(len(edge)) - np.repeat(np.cumsum(rows) - rows, rows) + first[edge]
    rise = row * UNITS + UNITS // 2 - y0[edge]
    x = x0[edge] + rise * (x1 - x0)[edge] // (y1 - y0)[edge]
    column = (x + UNITS // 2 - 1) // UNITS
    steps = np.bincount(row * (size + 1) + column, weights=winding[edge], minlength=size * (size + 1))
    inside: NDArray[np.bool_] = steps.reshape(size, size + 1)[:, :size].cumsum(axis=1) != 0
    return inside


def bounds(outline: Outline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The upper left and the lower right corner of the box around it."""
    return outline.min(axis=(0, 1)), outline.max(axis=(0, 1))


def grown(mask: NDArray[np.bool_], by: int) -> NDArray[np.bool_]:
    """The mask (..., height, width) and all within `by` samples of it: an octagon, of squares and crosses in turn."""
    for step in range(by):
        wide = mask.copy()
        wide[..., 1:] |= mask[..., :-1]
        wide[..., :-1] |= mask[..., 1:]
        spread = mask if step % 2 else wide  # upwards and downwards: a cross, or a square
        grown_mask = wide.copy()
        grown_mask[..., 1:, :] |= spread[..., :-1, :]
        grown_mask[..., :-1, :] |= spread[..., 1:, :]
        mask = grown_mask
    return mask


def distinct_characters(faces: dict[str, Face]) -> list[str]:
    """Letters, digits and currency signs that a person can tell apart whatever their size, in the order of Unicode.

    Left out are letters with accents (they have a decomposition), shapes like a bar, and any that looks like one before
    it in one of the compared faces: Greek Alpha is A, and o is O, since size says nothing.
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
    unicode = unicodedata.ucd_3_2_0  # frozen: the same categories under every Python
    counts = Counter(code for face in faces.values() for code in face.characters)
    common = [chr(code) for code, faces_with_it in sorted(counts.items()) if faces_with_it >= FEWEST_FACES]
    kinds = ("Lu", "Ll", "Lo", "Nd", "Sc")
    return [one for one in common if unicode.category(one) in kinds and not unicode.decomposition(one)]


def _shapes(face: Face, characters: list[str], size: int = 24) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Each character as large as fits (n, size, size), empty where the face lacks it; its shorter / its longer side."""
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
    """Pairs of shapes of which nearly all the ink of each lies on or beside the ink of the other."""
    ink = shapes.reshape(len(shapes), -1).astype(np.float32)
    near = grown(shapes, by=1).reshape(len(shapes), -1).astype(np.float32)
    covered = ink @ near.T  # counts of samples: whole numbers, exact in float32 in any order
    enough = covered > share * ink.sum(axis=1, keepdims=True)
    both: NDArray[np.bool_] = enough & enough.T
    return both
