"""Small pictures inside a page, each of them once however often it is shown."""

from __future__ import annotations

import base64
import io
import sys
from math import isnan
from random import Random

from PIL import Image, ImageOps
from torch import Tensor

from shortlist.data import Catalog, FitTransform, load_image
from shortlist.data.images import ImageError, load_crop
from shortlist.report.markup import Html, tag

SIDE = 96  # pixels: sharp at the 72 that a page shows, and 2 kB
_WHOLE = FitTransform(sys.maxsize)


class Album:
    """The thumbnails of a page, in the order in which they were first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int | None] = {}
        self.pictures: list[str] = []  # WebP in base64

    def show(self, catalog: Catalog, index: int, alt: str) -> Html:
        """An image element for row `index` of a catalog; where it cannot be read, a word that says so."""
        box = None if catalog.boxes is None else catalog.boxes[index]
        key = str(catalog.file(index)), str(box)
        if key not in self._numbers:
            self._numbers[key] = self._add(catalog, index)
        number = self._numbers[key]
        if number is None:
            return tag("span", "cannot be read", class_="gone", role="img", aria_label=f"{alt}: cannot be read")
        return tag("img", data_picture=number, alt=alt)

    def _add(self, catalog: Catalog, index: int) -> int | None:
        try:
            picture = thumbnail(catalog, index)
        except ImageError:
            return None
        content = io.BytesIO()
        picture.save(content, format="WEBP", quality=72, method=4)
        self.pictures.append(base64.b64encode(content.getvalue()).decode("ascii"))
        return len(self.pictures) - 1


def thumbnail(catalog: Catalog, index: int, side: int = SIDE) -> Image.Image:
    """What counts of an image, no side longer than `side`.

    Raises:
        ImageError: it cannot be read.
    """
    if _box(catalog, index) is None:
        picture = load_image(catalog.file(index), at_least=side)
    else:
        picture = Image.fromarray(pixels(catalog, index).permute(1, 2, 0).numpy())
    return picture if max(picture.size) <= side else ImageOps.contain(picture, (side, side))


def pixels(catalog: Catalog, index: int) -> Tensor:
    """What counts of an image, uint8 (3, height, width)."""
    return load_crop(catalog.file(index), _WHOLE, Random(0), _box(catalog, index))


def _box(catalog: Catalog, index: int) -> list[float] | None:
    box = None if catalog.boxes is None else catalog.boxes[index].tolist()
    return None if box is None or isnan(box[0]) else box
