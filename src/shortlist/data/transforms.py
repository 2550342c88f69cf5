"""From a decoded image to what the network sees of it. Randomness depends on seed, epoch and image alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shortlist.errors import ConfigError, did_you_mean
from shortlist.seeds import derived_seed

INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# An image that is to shrink much is first shrunk coarsely, by a whole number, but never below this many times the size
# wanted: nearly twice as fast for photographs, and on average less than 1 of 255 from the exact resampling.
COARSE = 1.5
_TRIES = 10  # as torchvision


def augmentation_rng(seed: int, epoch: int, index: int) -> Random:
    """The random numbers of an image in an epoch, whoever decodes it. Take only `.random()`: it is promised to stay."""
    return Random(derived_seed("augment", int(seed), int(epoch), int(index)))


@dataclass(frozen=True)
class Crop:
    """The part of an image (left, top, right, bottom in its pixels) that becomes the output, mirrored or not."""

    box: tuple[float, float, float, float]
    size: tuple[int, int]  # width and height of the output
    flip: bool = False

    @property
    def shrinks(self) -> float:
        """How many pixels of the part become one of the output, the smaller of both directions."""
        left, top, right, bottom = self.box
        return min((right - left) / self.size[0], (bottom - top) / self.size[1])

    def scaled(self, by: float, x: float = 0.0, y: float = 0.0) -> Crop:
        """The same part of the image at `by` times its size, whose corner is then at (x, y)."""
        left, top, right, bottom = self.box
        return replace(self, box=(x + left * by, y + top * by, x + right * by, y + bottom * by))


class Transform(Protocol):
    """Chooses a part of an image from its size alone, so that a decoder can be told how much of it is needed."""

    @property
    def size(self) -> int | None:
        """Side of the squares that it makes; None where images keep their shapes."""

    @property
    def interpolation(self) -> str: ...

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        """The part of an image of this size; `whole` is the size of what the image was itself cut from, if it was."""


def cut(image: Image.Image, crop: Crop, interpolation: str) -> Tensor:
    """The part `crop` of an RGB image as a uint8 tensor (3, height, width)."""
    right, bottom = min(crop.box[2], image.width), min(crop.box[3], image.height)  # may be off by a rounding error
    box = (*crop.box[:2], right, bottom)
    part = np.asarray(image.resize(crop.size, INTERPOLATIONS[interpolation], box=box, reducing_gap=COARSE))
    return torch.from_numpy((part[:, ::-1] if crop.flip else part).transpose(2, 0, 1).copy())


@dataclass(frozen=True)
class TrainTransform:
    """A random part of an image, stretched to a square and perhaps mirrored (torchvision's RandomResizedCrop and flip).

    Args:
        size: side of the square.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width / height of the part; its logarithm is uniform.
        flip: probability of a mirror image.
        interpolation: bilinear or bicubic.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check(self.size, self.interpolation)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"`scale` must be two shares of the area, 0 < low <= high <= 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ConfigError(f"`ratio` must be two numbers, 0 < low <= high, not {self.ratio}")
        _check_flip(self.flip)

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        """The random part of an image of this size."""
        flip = rng.random() < self.flip
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_TRIES):
            area = width * height * (self.scale[0] + (self.scale[1] - self.scale[0]) * rng.random())
            ratio = math.exp(low + (high - low) * rng.random())
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left = int(rng.random() * (width - across + 1))
                top = int(rng.random() * (height - down + 1))
                return Crop((left, top, left + across, top + down), (self.size, self.size), flip)
        return Crop(self._centre(width, height), (self.size, self.size), flip)

    def __call__(self, image: Image.Image, rng: Random) -> Tensor:
        """An RGB image of any size as a uint8 tensor (3, size, size)."""
        return cut(image, self.crop(*image.size, rng), self.interpolation)

    def _centre(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The largest part in the middle whose ratio is allowed: for images too long for any random one."""
        across = min(width, max(1, round(height * self.ratio[1])))
        down = min(height, max(1, round(width / self.ratio[0])))
        left, top = (width - across) // 2, (height - down) // 2
        return left, top, left + across, top + down


@dataclass(frozen=True)
class TestTransform:
    """The shorter side becomes `resize`, and of that the square of `size` in the middle is kept. Nothing is random.

    The result is resampled from the original at once, and equals the two steps.
    """

    __test__ = False  # the name looks like a test's

    size: int
    resize: int
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check(self.size, self.interpolation)
        if self.resize < self.size:
            raise ConfigError(
                f"test images are resized to {self.resize} and cropped to {self.size}: `resize` must be at least `size`"
            )

    def crop(self, width: int, height: int, rng: Random | None = None, whole: tuple[int, int] | None = None) -> Crop:
        """The part in the middle of an image of this size."""
        shorter = min(width, height)
        new_width, new_height = self.resize * width // shorter, self.resize * height // shorter
        left, top = round((new_width - self.size) / 2), round((new_height - self.size) / 2)
        x, y = width / new_width, height / new_height
        return Crop((left * x, top * y, (left + self.size) * x, (top + self.size) * y), (self.size, self.size))

    def __call__(self, image: Image.Image, rng: Random | None = None) -> Tensor:
        """An RGB image of any size as a uint8 tensor (3, size, size)."""
        return cut(image, self.crop(*image.size), self.interpolation)


@dataclass(frozen=True)
class FitTransform:
    """The whole image in its own shape: one with a side longer than `max_side` shrinks, none grows.

    What was cut from a larger image shrinks as that one would.
    """

    max_side: int
    flip: float = 0.0  # probability of a mirror image
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check(self.max_side, self.interpolation)
        _check_flip(self.flip)

    @property
    def size(self) -> None:
        """Images have different sizes."""
        return

    def crop(self, width: int, height: int, rng: Random, whole: tuple[int, int] | None = None) -> Crop:
        """All of an image of this size."""
        by = min(1.0, self.max_side / max(whole or (width, height)))
        size = max(1, round(width * by)), max(1, round(height * by))
        return Crop((0, 0, width, height), size, rng.random() < self.flip)

    def __call__(self, image: Image.Image, rng: Random) -> Tensor:
        """An RGB image of any size as a uint8 tensor (3, height, width)."""
        return cut(image, self.crop(*image.size, rng), self.interpolation)


def _check(size: int, interpolation: str) -> None:
    if size < 1:
        raise ConfigError(f"`size` must be at least 1 pixel, not {size}")
    if interpolation not in INTERPOLATIONS:
        raise ConfigError(f"unknown `interpolation` {interpolation!r}: {did_you_mean(interpolation, INTERPOLATIONS)}")


def _check_flip(flip: float) -> None:
    if not 0 <= flip <= 1:
        raise ConfigError(f"`flip` must be a probability from 0 to 1, not {flip}")
