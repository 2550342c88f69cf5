"""Crop, resize and flip decoded images. All randomness is a function of seed, epoch and image index."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from shortlist.errors import ConfigError, did_you_mean
from shortlist.seeds import derived_seed

INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# Pillow's `reducing_gap`: an image that shrinks a lot is first reduced by an integer factor, but never below this
# multiple of the final size. For photographs this is almost twice as fast as exact resampling, and the mean difference
# is below 1 of 255.
REDUCING_GAP = 1.5
_CROP_ATTEMPTS = 10  # the same as torchvision


def augmentation_rng(seed: int, epoch: int, index: int) -> Random:
    """Return the random generator of one image in one epoch; it is the same in every process.

    Draw only with `.random()`, whose sequence Python guarantees to be stable.
    """
    return Random(derived_seed("augment", seed, epoch, index))


@dataclass(frozen=True)
class Crop:
    """A rectangle of an image, the size that it is resized to, and whether the result is flipped.

    Args:
        box: Left, top, right and bottom in pixels of the image.
        size: Width and height of the output.
        flip: Whether to flip the output horizontally.
        fast: Whether to resize with torch, which is faster than Pillow on processors with AVX2, if the box consists of
            whole pixels. The results differ by 1 or 2 of 255, and more only at the border of the box, where Pillow
            also uses pixels outside of it. For training; test images are resized with Pillow, as in exported models.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]
    flip: bool = False
    fast: bool = False

    @property
    def reduction(self) -> float:
        """Number of input pixels per output pixel along one side; the smaller value of both sides."""
        left, top, right, bottom = self.box
        return min((right - left) / self.size[0], (bottom - top) / self.size[1])

    def scaled(self, by: float, x: float = 0.0, y: float = 0.0) -> Crop:
        """Return the same crop of the image resized by the factor `by` and then moved to (x, y)."""
        left, top, right, bottom = self.box
        return replace(self, box=(x + left * by, y + top * by, x + right * by, y + bottom * by))


class Transform(Protocol):
    """Chooses a crop from the size of an image alone, so that a decoder knows in advance how many pixels it needs."""

    @property
    def size(self) -> int | None:
        """Side length of the square output. None if outputs keep the aspect ratio of their images."""

    @property
    def interpolation(self) -> str:
        """Name of the interpolation: one of INTERPOLATIONS."""

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        """Return the crop for an image.

        Args:
            width: Width of the image in pixels.
            height: Height of the image in pixels.
            rng: Random generator, for random transforms.
            whole: Width and height of the larger image that this one was cut from, if any.
        """


def transform_image(image: Image.Image, transform: Transform, rng: Random) -> Tensor:
    """Transform an RGB image of any size. Returns a uint8 tensor (3, height, width)."""
    return apply_crop(image, transform.crop(*image.size, rng), transform.interpolation)


def apply_crop(image: Image.Image, crop: Crop, interpolation: str) -> Tensor:
    """Crop, resize and flip an RGB image. Returns a uint8 tensor (3, height, width)."""
    right, bottom = min(crop.box[2], image.width), min(crop.box[3], image.height)  # may exceed it by rounding
    box = (*crop.box[:2], right, bottom)
    if crop.fast and all(side == int(side) for side in box):
        return resize_pixels(np.array(image.crop(box)), crop, interpolation)
    pixels = np.asarray(image.resize(crop.size, INTERPOLATIONS[interpolation], box=box, reducing_gap=REDUCING_GAP))
    return torch.from_numpy((pixels[:, ::-1] if crop.flip else pixels).transpose(2, 0, 1).copy())


def resize_pixels(pixels: NDArray[np.uint8], crop: Crop, interpolation: str) -> Tensor:
    """Resize and flip the pixels (height, width, 3) inside the box of a fast crop; otherwise like `apply_crop`.

    The arithmetic is in integers, so that the result does not depend on vector instructions or the number of threads.
    """
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    resized: Tensor = functional.interpolate(images, crop.size[::-1], mode=interpolation, antialias=True)[0]
    return resized.flip(-1) if crop.flip else resized


@dataclass(frozen=True)
class TrainTransform:
    """Random resized crop with a random horizontal flip, with the distribution of torchvision's transforms.

    Args:
        size: Side length of the output in pixels.
        scale: Range of the crop's share of the image area.
        ratio: Range of the crop's aspect ratio, width / height; its logarithm is uniform.
        flip: Probability of a horizontal flip.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ConfigError: If an argument is out of range.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check(self.size, self.interpolation)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"`scale` must be two shares of the area, 0 < low <= high <= 1, not {self.scale}.")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ConfigError(f"`ratio` must be two numbers, 0 < low <= high, not {self.ratio}.")
        _check_flip(self.flip)

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        """Return a random crop for an image of this size; see `Transform.crop`."""
        flip = rng.random() < self.flip
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_CROP_ATTEMPTS):
            area = width * height * (self.scale[0] + (self.scale[1] - self.scale[0]) * rng.random())
            ratio = math.exp(low + (high - low) * rng.random())
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                left = int(rng.random() * (width - crop_width + 1))
                top = int(rng.random() * (height - crop_height + 1))
                box = (left, top, left + crop_width, top + crop_height)
                break
        else:
            box = self._centre_box(width, height)
        return Crop(box, (self.size, self.size), flip, fast=True)

    def _centre_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return the largest centred box with an allowed ratio: the fallback for very elongated images."""
        crop_width = min(width, max(1, round(height * self.ratio[1])))
        crop_height = min(height, max(1, round(width / self.ratio[0])))
        left, top = (width - crop_width) // 2, (height - crop_height) // 2
        return left, top, left + crop_width, top + crop_height


@dataclass(frozen=True)
class TestTransform:
    """Resizes the shorter side and then takes the centre crop; deterministic.

    The output is resampled from the original in one step, which gives the same result as two steps.

    Args:
        size: Side length of the output in pixels.
        resize: Length in pixels that the shorter side is resized to; at least `size`.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ConfigError: If an argument is out of range.
    """

    __test__ = False  # keeps pytest from collecting the class as a test

    size: int
    resize: int
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check(self.size, self.interpolation)
        if self.resize < self.size:
            raise ConfigError(
                f"Test images are resized to {self.resize} and cropped to {self.size}: "
                "`resize` must be at least `size`."
            )

    def crop(self, width: int, height: int, rng: Random | None = None, whole: tuple[int, int] | None = None) -> Crop:
        """Return the centre crop for an image of this size; see `Transform.crop`."""
        shorter = min(width, height)
        new_width, new_height = self.resize * width // shorter, self.resize * height // shorter
        left, top = round((new_width - self.size) / 2), round((new_height - self.size) / 2)
        x, y = width / new_width, height / new_height
        return Crop((left * x, top * y, (left + self.size) * x, (top + self.size) * y), (self.size, self.size))


@dataclass(frozen=True)
class FitTransform:
    """Shrinks the whole image so that its longer side is at most `max_side`; the aspect ratio is kept.

    Smaller images are not enlarged. An image that was cut from a larger one is shrunk by the larger one's factor.

    Args:
        max_side: Maximum length of the longer side in pixels.
        flip: Probability of a horizontal flip.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ConfigError: If an argument is out of range.
    """

    max_side: int
    flip: float = 0.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check(self.max_side, self.interpolation)
        _check_flip(self.flip)

    @property
    def size(self) -> None:
        """None: outputs keep the aspect ratio of their images."""
        return

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        """Return the crop that contains the whole image; see `Transform.crop`."""
        by = min(1.0, self.max_side / max(whole or (width, height)))
        size = max(1, round(width * by)), max(1, round(height * by))
        return Crop((0, 0, width, height), size, rng.random() < self.flip)


def _check(size: int, interpolation: str) -> None:
    if size < 1:
        raise ConfigError(f"`size` must be at least 1 pixel, not {size}.")
    if interpolation not in INTERPOLATIONS:
        raise ConfigError(f"Unknown `interpolation` {interpolation!r}: {did_you_mean(interpolation, INTERPOLATIONS)}")


def _check_flip(flip: float) -> None:
    if not 0 <= flip <= 1:
        raise ConfigError(f"`flip` must be a probability from 0 to 1, not {flip}.")
