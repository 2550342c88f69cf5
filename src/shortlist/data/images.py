"""Decode image files to upright RGB images, with errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from shortlist.data.catalog import Catalog
from shortlist.data.transforms import REDUCING_GAP, Crop, Transform, apply_crop, augmentation_rng, resize_pixels
from shortlist.errors import DataError, ShortlistError
from shortlist.locations import as_url, open_binary, size_and_mtime
from shortlist.seeds import derived_seed

# Formats that Pillow decodes in this process. For others, such as EPS, it would start external programs. TGA is last,
# because its files have no signature.
COMMON_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # also for uploads
IMAGE_FORMATS = (*COMMON_FORMATS, "JPEG2000", "PPM", "TGA")

Key = tuple[int, int]  # epoch, index of the image in its catalog

_TRANSPOSE = {  # EXIF orientation -> operation that turns the stored image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(DataError):
    """Error for an image that cannot be read.

    Args:
        path: Path of the image.
        reason: What is wrong with it.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(path, reason)  # both arguments, so that the exception can be pickled
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"Cannot read the image {as_url(self.path)}: {self.reason}"


def load_image(path: Path | str, at_least: int | None = None) -> Image.Image:
    """Load an image, upright and in RGB.

    Args:
        path: File in one of `IMAGE_FORMATS`. Transparent pixels become white, and 16 bits are scaled to 8.
        at_least: Minimum length of the shorter side in pixels. A JPEG may then be decoded at 1/2, 1/4 or 1/8 of its
            size, which is much faster. None decodes at full size.

    Raises:
        ImageError: If the file does not exist, is truncated or is not an image.
    """
    with open_image(path) as image:
        if at_least is not None:
            image.draft(None, (at_least, at_least))
        return upright_rgb(image)


@contextmanager
def open_image(
    path: Path | str, content: BinaryIO | None = None, formats: tuple[str, ...] = IMAGE_FORMATS
) -> Iterator[Image.Image]:
    """Open an image and read its header, but not its pixels. Exceptions in the `with` block become ImageErrors.

    Args:
        path: The file.
        content: Content of the file, if it has already been read.
        formats: Allowed formats, `IMAGE_FORMATS` or some of them. The format is recognised by the content.

    Raises:
        ImageError: If the file does not exist, is not a regular file, is truncated or is not an image.
    """
    try:
        with (
            open_binary(Path(path)) if content is None else nullcontext(content) as file,
            Image.open(file, formats=readable(formats)) as image,
        ):
            yield image
    except ShortlistError:
        raise
    except FileNotFoundError as error:
        raise ImageError(path, "the file does not exist") from error
    except UnidentifiedImageError as error:
        empty = not ((size_and_mtime(Path(path)) or (0,))[0] if content is None else content.seek(0, os.SEEK_END))
        unknown = f"it is not an image, or its format is not one of {', '.join(readable(formats))}"
        raise ImageError(path, "the file is empty" if empty else unknown) from error
    except Exception as error:  # Pillow's decoders raise almost any exception for damaged files
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise ImageError(path, reason) from error


@cache
def readable(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Return the formats that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in formats if name in Image.OPEN)


def as_image(pixels: Image.Image | Tensor | NDArray[Any]) -> Image.Image:
    """Convert pixels in memory to an upright RGB image.

    Args:
        pixels: A PIL image; a tensor (3, H, W) or (1, H, W), as in torchvision; or an array (H, W, 3) or (H, W), as in
            NumPy. Values are uint8, or floating-point numbers from 0 to 1.

    Raises:
        DataError: The shape, type or range of the values is not supported.
    """
    if isinstance(pixels, Image.Image):
        return upright_rgb(pixels)
    if isinstance(pixels, Tensor):
        values, expected = pixels.detach().cpu().numpy(), "a tensor (3, height, width)"
        values = np.moveaxis(values, 0, -1) if values.ndim == 3 else values[..., None, None]  # the latter is refused
    else:
        values, expected = np.asarray(pixels), "an array (height, width, 3)"
        values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[2] not in (1, 3) or 0 in values.shape:
        raise DataError(f"An image in memory must be {expected}, not of shape {tuple(pixels.shape)}.")
    if np.issubdtype(values.dtype, np.floating) and values.min() >= 0 and values.max() <= 1:
        values = (values * 255).round().astype(np.uint8)
    if values.dtype != np.uint8:
        raise DataError(
            f"The pixels of an image must be uint8, or numbers from 0 to 1 that are not normalised, not {values.dtype} "
            f"from {values.min():g} to {values.max():g}."
        )
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], 3))))


def load_crop(
    path: Path | str,
    transform: Transform,
    rng: Random,
    box: Sequence[float] | None = None,
    content: BinaryIO | None = None,
) -> Tensor:
    """Load an image and transform it.

    A large JPEG is decoded at a fraction of its size if the output is small.

    Args:
        path: The file.
        transform: Transform that is applied to the image, or to the part of it inside the box.
        rng: Random generator for the transform.
        box: Left, top, right, bottom in pixels of the upright image, rounded to integers. Pixels outside of it have no
            influence on the result.
        content: Content of the file, if it has already been read.

    Returns:
        Tensor (3, height, width), uint8.

    Raises:
        ImageError: If the image cannot be read, or does not overlap the box.
    """
    (pixels,) = load_crops(path, transform, [rng], box, content)
    return pixels


def load_crops(
    path: Path | str,
    transform: Transform,
    rngs: Sequence[Random],
    box: Sequence[float] | None = None,
    content: BinaryIO | None = None,
) -> list[Tensor]:
    """Load an image once, at the size that the most detailed crop needs, and transform it with each generator.

    Args and errors are those of `load_crop`.
    """
    with open_image(path, content) as image:
        if box is not None:  # boxes are rare, so this path is exact instead of fast: it decodes at full size
            whole = upright_rgb(image)
            part = whole.crop(_intersection(box, whole.size))
            crops = [transform.crop(*part.size, rng, whole.size) for rng in rngs]
        elif image.format not in ("JPEG", "MPO"):
            part = upright_rgb(image)
            crops = [transform.crop(*part.size, rng) for rng in rngs]
        else:
            size = upright_size(image)
            crops = [transform.crop(*size, rng) for rng in rngs]
            reduction = max(1, int(min(crop.reduction for crop in crops) / REDUCING_GAP))
            if reduction == 1 and all(crop.fast for crop in crops) and (pixels := _decode_fast(image)) is not None:
                boxes = [tuple(map(int, crop.box)) for crop in crops]
                parts = [pixels[top:bottom, left:right] for left, top, right, bottom in boxes]
                return [resize_pixels(*each, transform.interpolation) for each in zip(parts, crops, strict=True)]
            part, crops = _decode_reduced(image, crops, reduction)
    return [apply_crop(part, crop, transform.interpolation) for crop in crops]


def _intersection(box: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the intersection of a box, rounded to whole pixels, and an image of this size."""
    left, top, right, bottom = (round(float(side)) for side in box)
    inside = max(0, left), max(0, top), min(size[0], right), min(size[1], bottom)
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(f"it has {size[0]} x {size[1]} pixels, none of them in its box {(left, top, right, bottom)}")
    return inside


def _decode_reduced(image: Image.Image, crops: list[Crop], reduction: int) -> tuple[Image.Image, list[Crop]]:
    """Decode a JPEG at 1, 1/2, 1/4 or 1/8 of its size, but not below 1 / reduction.

    Returns:
        The upright image, and the crops in its pixels.
    """
    (width, height), orientation = upright_size(image), _orientation(image)
    stored_width = image.width
    drafted = image.draft(None, (max(1, image.width // reduction), max(1, image.height // reduction)))
    by = drafted[1][2] / stored_width if drafted else 1.0
    whole = upright_rgb(image)
    # A width of 601 pixels becomes 301, and the last pixel is half empty. After a rotation or flip it may be the first.
    left = whole.width - width * by if orientation in (2, 3, 6, 7) else 0.0
    top = whole.height - height * by if orientation in (3, 4, 7, 8) else 0.0
    return whole, [crop.scaled(by, left, top) for crop in crops]


def _decode_fast(image: Image.Image) -> NDArray[np.uint8] | None:
    """Decode an opened JPEG with simplejpeg, which takes less time than Pillow and gives the same pixels.

    Returns:
        The pixels (height, width, 3). None if Pillow has to decode the image: simplejpeg is not installed, the image
        is not stored upright and in colour, or it is damaged (Pillow has better error messages).
    """
    if image.format != "JPEG" or image.mode != "RGB" or _orientation(image) != 1:
        return None
    try:
        from simplejpeg import decode_jpeg

        file: BinaryIO = image.fp  # type: ignore[attr-defined]
        file.seek(0)
        pixels: NDArray[np.uint8] = decode_jpeg(file.read())
    except (ModuleNotFoundError, ValueError):
        return None
    return pixels


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height that an opened image has once it is upright."""
    rotated = _orientation(image) >= 5 and image.format != "TIFF"  # Pillow gives the upright size of a TIFF
    return image.size[::-1] if rotated else image.size


def upright_rgb(image: Image.Image) -> Image.Image:
    """Decode an opened image, rotate it according to its EXIF orientation, and convert it to RGB."""
    image.load()
    transpose = _TRANSPOSE.get(_orientation(image))  # after loading: some formats rotate then and reset the tag
    rgb = _to_rgb(image)
    return rgb if transpose is None else rgb.transpose(transpose)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # an image with damaged metadata can still be decoded
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")  # without a copy of a large image
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _scale_to_8_bits(image, 65535)
    if image.mode == "F":
        return _scale_to_8_bits(image, 1 if np.asarray(image).max() <= 1 else 255)
    return image if image.mode == "RGB" else image.convert("RGB")


def _scale_to_8_bits(image: Image.Image, white: int) -> Image.Image:
    """Convert a grey image with values from 0 to `white` to RGB; Pillow's own conversion clips values at 255."""
    values = np.asarray(image, dtype=np.float64)
    if not (values.min() >= 0 and values.max() <= white):
        raise ValueError(f"its values range from {values.min():g} to {values.max():g}, not from 0 to {white}")
    return Image.fromarray((values * (255 / white)).round().astype(np.uint8)).convert("RGB")


class ImageDataset(Dataset[Tensor]):
    """Dataset of the transformed images of a catalog; `dataset[epoch, index]` is a uint8 tensor (3, H, W).

    An image with a box is cropped to the box first. The same key gives the same pixels in every process. Pixels are not
    normalised; do this on the device, where it is cheap.

    Args:
        catalog: The images.
        transform: Transform that is applied to each image.
        seed: Seed of the augmentation.
    """

    views = 1  # number of tensors per image that are embedded

    def __init__(self, catalog: Catalog, transform: Transform, seed: int = 0) -> None:
        self.catalog, self.transform, self.seed = catalog, transform, seed

    def __len__(self) -> int:
        return len(self.catalog)

    def __getitem__(self, key: Key) -> Tensor:
        epoch, index = key
        rng = augmentation_rng(self.seed, epoch, index)
        return load_crop(self.catalog.file(index), self.transform, rng, self.catalog.box(index))


class ViewDataset(ImageDataset):
    """Dataset of several augmentations (views) of each image; `dataset[view, index]` is a uint8 tensor (3, H, W).

    A file is decoded once for all views, which are read one after the other. Views depend on the path of an image and
    not on its position, so that they are the same in every catalog that contains the image.

    Args:
        catalog: The images.
        transform: Random transform.
        views: Number of views per image.
        seed: Seed of the augmentation.
    """

    def __init__(self, catalog: Catalog, transform: Transform, views: int, seed: int = 0) -> None:
        super().__init__(catalog, transform, seed)
        self.views = views
        self._loaded: tuple[int, list[Tensor]] = (-1, [])  # the last image: its index and its views

    def __getitem__(self, key: Key) -> Tensor:
        view, index = key
        if index != self._loaded[0]:
            path, box = self.catalog.paths[index], self.catalog.box(index)
            name = path if box is None else f"{path} {box}"
            rngs = [Random(derived_seed("view", self.seed, number, name)) for number in range(self.views)]
            self._loaded = index, load_crops(self.catalog.file(index), self.transform, rngs, box)
        return self._loaded[1][view]
