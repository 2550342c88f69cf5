"""Decoding: whatever a file holds, upright and in RGB, or an error that names the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from random import Random
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from shortlist.data.catalog import Catalog
from shortlist.data.transforms import COARSE, Crop, Transform, augmentation_rng, cut
from shortlist.errors import DataError, ShortlistError

Key = tuple[int, int]  # epoch, index of the image in its catalog

_UPRIGHT = {  # EXIF orientation -> what turns the stored picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(DataError):
    """One image that cannot be read. Knows its `path` and the `reason`."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(path, reason)  # both, so that it can be pickled
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot read the image {self.path}: {self.reason}"


def load_image(path: Path | str, at_least: int | None = None) -> Image.Image:
    """The image in a file, upright, in RGB.

    Args:
        path: any format that Pillow reads. Transparent parts become white, 16 bits are scaled to 8.
        at_least: a JPEG may be decoded at half, a quarter or an eighth of its size (far faster), as long as its shorter
            side keeps this many pixels.

    Raises:
        ImageError: the file is missing, truncated or no image.
    """
    with opened(path) as image:
        if at_least is not None:
            image.draft(None, (at_least, at_least))
        return upright_rgb(image)


@contextmanager
def opened(path: Path | str, content: BinaryIO | None = None) -> Iterator[Image.Image]:
    """An image whose header is read and whose pixels are not; any failure inside becomes an ImageError.

    Args:
        path: the file.
        content: what is in it, where someone has read it already.
    """
    try:
        with Image.open(path if content is None else content) as image:
            yield image
    except ShortlistError:
        raise
    except FileNotFoundError as error:
        raise ImageError(path, "there is no such file") from error
    except UnidentifiedImageError as error:
        empty = not (Path(path).stat().st_size if content is None else content.seek(0, os.SEEK_END))
        reason = "the file is empty" if empty else "it is not an image, or of a kind that Pillow does not know"
        raise ImageError(path, reason) from error
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise ImageError(path, reason) from error


def load_crop(
    path: Path | str,
    transform: Transform,
    rng: Random,
    box: Sequence[float] | None = None,
    content: BinaryIO | None = None,
) -> Tensor:
    """What `transform` makes of the image in a file: uint8 (3, height, width).

    A large JPEG of which only a small picture is wanted is decoded at a fraction of its size.

    Args:
        path: the file.
        transform: is given the whole image, or what is inside the box.
        rng: what a random transform draws from.
        box: left, top, right, bottom in pixels of the upright image, rounded to whole ones; nothing outside it is seen.
        content: what is in the file, where someone has read it already.
    """
    with opened(path, content) as image:
        if box is not None:  # rare, so that exact is better than fast: no JPEG at a fraction of its size
            whole = upright_rgb(image)
            part = whole.crop(_inside(box, whole.size))
            crop = transform.crop(*part.size, rng, whole.size)
        elif image.format not in ("JPEG", "MPO"):
            part = upright_rgb(image)
            crop = transform.crop(*part.size, rng)
        else:
            crop = transform.crop(*upright_size(image), rng)
            part, crop = _drafted(image, crop, max(1, int(crop.shrinks / COARSE)))
    return cut(part, crop, transform.interpolation)


def _inside(box: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The whole pixels of a box that the image has."""
    left, top, right, bottom = (round(float(side)) for side in box)
    inside = max(0, left), max(0, top), min(size[0], right), min(size[1], bottom)
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(f"nothing of it is inside its box {(left, top, right, bottom)}: it has {size[0]} x {size[1]}")
    return inside


def _drafted(image: Image.Image, crop: Crop, shrink: int) -> tuple[Image.Image, Crop]:
    """A JPEG, upright, at 1, 1/2, 1/4 or 1/8 of its size (not below 1 / shrink), and where the crop is in it."""
    (width, height), orientation = upright_size(image), _orientation(image)
    stored = image.width
    drafted = image.draft(None, (max(1, image.width // shrink), max(1, image.height // shrink)))
    by = drafted[1][2] / stored if drafted else 1.0
    whole = upright_rgb(image)
    # 601 pixels become 301, of which the last is half empty: upright, it may be the first.
    left = whole.width - width * by if orientation in (2, 3, 6, 7) else 0.0
    top = whole.height - height * by if orientation in (3, 4, 7, 8) else 0.0
    return whole, crop.scaled(by, left, top)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height that an opened image will have when it is upright."""
    turned = _orientation(image) >= 5 and image.format != "TIFF"  # whose size is upright already
    return image.size[::-1] if turned else image.size


def upright_rgb(image: Image.Image) -> Image.Image:
    """Decode an opened image and turn it upright, into RGB."""
    image.load()
    turn = _UPRIGHT.get(_orientation(image))  # after loading: some formats turn themselves, and then say so
    rgb = _to_rgb(image)
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged metadata do not spoil the picture
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _grey(image, 65535)
    if image.mode == "F":
        return _grey(image, 1 if np.asarray(image).max() <= 1 else 255)
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey(image: Image.Image, white: int) -> Image.Image:
    """An image of wide numbers from 0 to `white`; Pillow's own conversion would clip them at 255."""
    values = np.asarray(image, dtype=np.float64)
    if not (values.min() >= 0 and values.max() <= white):
        raise ValueError(f"its values go from {values.min():g} to {values.max():g}, not from 0 to {white}")
    return Image.fromarray((values * (255 / white)).round().astype(np.uint8)).convert("RGB")


class ImageDataset(Dataset[Tensor]):
    """The images of a catalog, or what is inside their boxes, transformed: `dataset[epoch, index]` is uint8 (3, H, W).

    The same key gives the same pixels in any process. Normalise on the device, where it is cheap.
    """

    def __init__(self, catalog: Catalog, transform: Transform, seed: int = 0) -> None:
        self.catalog, self.transform, self.seed = catalog, transform, seed

    def __len__(self) -> int:
        return len(self.catalog)

    def __getitem__(self, key: Key) -> Tensor:
        epoch, index = key
        box = None if self.catalog.boxes is None else self.catalog.boxes[index]
        rng = augmentation_rng(self.seed, epoch, index)
        return load_crop(self.catalog.file(index), self.transform, rng, None if box is None or isnan(box[0]) else box)
