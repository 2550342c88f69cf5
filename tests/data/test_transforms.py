"""Crops match torchvision in distribution and in pixels; they are a function of seed, epoch and image."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.transforms import v2

from shortlist.data import (
    Catalog,
    FitTransform,
    ImageDataset,
    ImageError,
    TestTransform,
    TrainTransform,
    images,
)
from shortlist.data.images import load_crop, load_crops, load_image
from shortlist.data.transforms import INTERPOLATIONS, Crop, apply_crop, augmentation_rng, transform_image
from shortlist.errors import ConfigError
from tests.data.pictures import class_folders, picture, write

MODES = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}
sides = st.integers(1, 300)


def distance(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


# Randomness


def test_random_numbers_are_a_function_of_seed_epoch_and_index():
    first = [augmentation_rng(1, 2, 3).random() for _ in range(2)]
    assert first[0] == first[1]
    keys = [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1), (12, 3, 0), (1, 23, 0)]
    assert len({augmentation_rng(*key).random() for key in keys}) == len(keys)


def test_random_numbers_are_stable():
    rng = augmentation_rng(0, 1, 2)
    assert [round(rng.random(), 12) for _ in range(3)] == [0.71376185533, 0.947779446908, 0.060679805068]


def test_numpy_integers_give_the_same_random_numbers():
    expected = augmentation_rng(1, 2, 3).random()
    assert augmentation_rng(np.int64(1), np.int32(2), np.uint8(3)).random() == expected


def test_neighbouring_images_are_unrelated():
    draws = np.array([[augmentation_rng(0, epoch, index).random() for index in range(200)] for epoch in range(20)])
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.06  # 3.7 standard errors
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.06
    assert abs(draws.mean() - 0.5) < 0.02


# The training crop


def crops(transform: TrainTransform, width: int, height: int, number: int) -> np.ndarray:
    """Return (number, 5): left, top, right, bottom, flip."""
    found = [transform.crop(width, height, augmentation_rng(0, 0, index)) for index in range(number)]
    return np.array([(*crop.box, crop.flip) for crop in found])


def torchvision_crops(width: int, height: int, number: int) -> np.ndarray:
    transform = v2.RandomResizedCrop(10, antialias=True)
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [transform.make_params([image]) for _ in range(number)]
    return np.array([(d["left"], d["top"], d["left"] + d["width"], d["top"] + d["height"]) for d in drawn])


@pytest.mark.parametrize(("width", "height"), [(90, 120), (300, 40)])
def test_crops_have_the_distribution_of_torchvision(width: int, height: int):
    number = 3000
    ours, theirs = crops(TrainTransform(10), width, height, number), torchvision_crops(width, height, number)
    for name, measure in {
        "left": lambda box: box[:, 0],
        "top": lambda box: box[:, 1],
        "area": lambda box: (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]),
        "log ratio": lambda box: np.log((box[:, 2] - box[:, 0]) / (box[:, 3] - box[:, 1])),
    }.items():
        a, b = np.sort(measure(ours)), np.sort(measure(theirs))
        grid = np.unique(np.concatenate([a, b]))
        gap = np.abs(np.searchsorted(a, grid, "right") - np.searchsorted(b, grid, "right")).max() / number
        assert gap < 0.05, name  # two-sample Kolmogorov-Smirnov, p = 0.001


def test_crops_keep_to_scale_and_ratio():
    boxes = crops(TrainTransform(10, scale=(0.2, 0.5), ratio=(0.5, 2)), 400, 300, 500)
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    share, ratio = width * height / (400 * 300), width / height
    assert 0.195 < share.min() < 0.22
    assert 0.48 < share.max() < 0.505
    assert 0.49 < ratio.min() < 0.55
    assert 1.85 < ratio.max() < 2.02
    assert abs(np.log(ratio).mean()) < 0.08  # the logarithm is uniform: wide and high crops are equally frequent


def test_the_probability_of_a_flip():
    for flip in (0.0, 0.5, 1.0):
        share = crops(TrainTransform(10, flip=flip), 40, 30, 1000)[:, 4].mean()
        assert abs(share - flip) < 0.06 * (0 < flip < 1) + 1e-9


@given(width=sides, height=sides, index=st.integers(0, 10))
def test_crops_are_inside_the_image(width: int, height: int, index: int):
    left, top, right, bottom = TrainTransform(8).crop(width, height, augmentation_rng(0, 0, index)).box
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@pytest.mark.parametrize(("width", "height"), [(1000, 20), (20, 1000), (999, 7)])
def test_a_very_long_image_gives_its_centre(width: int, height: int):
    boxes = crops(TrainTransform(10, scale=(0.5, 1)), width, height, 20)[:, :4]
    assert (boxes == torchvision_fallback(width, height)).all()


def torchvision_fallback(width: int, height: int) -> np.ndarray:
    transform = v2.RandomResizedCrop(10, scale=(0.5, 1.0), antialias=True)
    drawn = transform.make_params([torch.zeros(3, height, width, dtype=torch.uint8)])
    return np.array([drawn["left"], drawn["top"], drawn["left"] + drawn["width"], drawn["top"] + drawn["height"]])


@pytest.mark.parametrize("interpolation", MODES)
@pytest.mark.parametrize("flip", [False, True])
def test_the_pixels_of_a_crop_match_torchvision(interpolation: str, flip: bool):
    image = picture(140, 110)
    box = (20, 10, 116, 90)  # 96 x 80 -> 64 x 64
    ours = apply_crop(image, Crop(box, (64, 64), flip), interpolation)
    theirs = v2.functional.resized_crop(
        image, 10, 20, 80, 96, [64, 64], interpolation=MODES[interpolation], antialias=True
    )
    theirs = v2.functional.pil_to_tensor(v2.functional.horizontal_flip(theirs) if flip else theirs)
    assert ours.shape == (3, 64, 64)
    assert ours.dtype == torch.uint8
    assert ours.is_contiguous()
    # At the border, pixels outside of the crop contribute here, but not in torchvision.
    assert distance(ours[:, 2:-2, 2:-2], theirs[:, 2:-2, 2:-2]) <= 1
    assert distance(ours, theirs) < 16
    assert distance(ours.flip(2), theirs) > 50  # control: the measure detects a flip


@pytest.mark.parametrize("interpolation", MODES)
@pytest.mark.parametrize("size", [64, 100])
def test_training_crops_match_torchvision_up_to_the_border(interpolation: str, size: int):
    image, transform = picture(140, 110), TrainTransform(size, interpolation=interpolation)
    for index in range(5):
        left, top, right, bottom = transform.crop(*image.size, augmentation_rng(0, 0, index)).box
        flip = transform.crop(*image.size, augmentation_rng(0, 0, index)).flip
        theirs = v2.functional.resized_crop(
            image, top, left, bottom - top, right - left, [size, size], MODES[interpolation], antialias=True
        )
        theirs = v2.functional.pil_to_tensor(v2.functional.horizontal_flip(theirs) if flip else theirs)
        ours = transform_image(image, transform, augmentation_rng(0, 0, index))
        assert ours.is_contiguous()
        assert distance(ours, theirs) <= (1 if interpolation == "bilinear" else 2)
        assert distance(ours.flip(2), theirs) > 20  # control: the measure detects a flip


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("transform", [TestTransform(56, 64), FitTransform(100)])
def test_test_transforms_resize_with_pillow(transform: TestTransform | FitTransform, interpolation: str):
    image, transform = picture(140, 110), replace(transform, interpolation=interpolation)
    crop = transform.crop(*image.size, Random(0))
    pillow = image.resize(crop.size, INTERPOLATIONS[interpolation], box=crop.box, reducing_gap=1.5)
    assert torch.equal(transform_image(image, transform, Random(0)), v2.functional.pil_to_tensor(pillow))
    if isinstance(transform, FitTransform):  # control: the other method would give other pixels
        assert not torch.equal(
            apply_crop(image, replace(crop, fast=True), interpolation), transform_image(image, transform, Random(0))
        )


def test_upscaling_a_tiny_image():
    for size in ((1, 1), (1, 50), (3, 2)):
        pixels = transform_image(picture(*size), TrainTransform(16), Random(0))
        assert pixels.shape == (3, 16, 16)
    pixels = transform_image(Image.new("RGB", (1, 1), (9, 8, 7)), TrainTransform(16), Random(0))
    assert pixels[:, 5, 5].tolist() == [9, 8, 7]


def test_crops_depend_on_seed_epoch_and_index(tmp_path: Path):
    from shortlist.data import open_catalog

    catalog = open_catalog(class_folders(tmp_path, {"a": 2, "b": 2}))
    transform = TrainTransform(16)
    first = ImageDataset(catalog, transform, seed=0)[0, 0]
    assert torch.equal(ImageDataset(catalog, transform, seed=0)[0, 0], first)
    assert not torch.equal(ImageDataset(catalog, transform, seed=1)[0, 0], first)
    assert not torch.equal(ImageDataset(catalog, transform, seed=0)[1, 0], first)
    assert not torch.equal(ImageDataset(catalog, transform, seed=0)[0, 1], first)
    still = ImageDataset(catalog, TestTransform(16, 18), seed=0)
    assert torch.equal(still[0, 0], still[1, 0])
    assert len(still) == 4


# The test crop


@pytest.mark.parametrize("interpolation", MODES)
@pytest.mark.parametrize("image", [(300, 200), (131, 177), (64, 64), (40, 33), (257, 64), (20, 90)])
@pytest.mark.parametrize(("size", "resize"), [(56, 64), (64, 64), (33, 64)])
def test_resize_and_centre_crop_match_torchvision(image: tuple[int, int], size: int, resize: int, interpolation: str):
    whole = picture(*image)
    mode = MODES[interpolation]
    theirs = v2.Compose([v2.Resize(resize, interpolation=mode, antialias=True), v2.CenterCrop(size), v2.PILToTensor()])
    ours = transform_image(whole, TestTransform(size, resize, interpolation), Random(0))
    assert ours.shape == (3, size, size)
    # Large images are first reduced by an integer factor (REDUCING_GAP); others may differ by rounding.
    assert distance(ours, theirs(whole)) <= (1 if min(image) < 1.5 * 2 * resize else 3)
    if image != (64, 64):
        assert distance(ours, theirs(picture(*image, seed=1))) > 50


@given(width=sides, height=sides, size=st.integers(1, 80), more=st.integers(0, 40))
def test_the_test_crop_is_inside_the_image(width: int, height: int, size: int, more: int):
    left, top, right, bottom = TestTransform(size, size + more).crop(width, height).box
    assert -1e-9 <= left < right <= width + 1e-6
    assert -1e-9 <= top < bottom <= height + 1e-6


@given(width=sides, height=sides, size=st.integers(1, 40), more=st.integers(0, 20))
def test_every_size_gives_a_square(width: int, height: int, size: int, more: int):
    image = Image.new("RGB", (width, height), (10, 200, 30))
    for transform in (TestTransform(size, size + more), TrainTransform(size)):
        pixels = transform_image(image, transform, Random(0))
        assert pixels.shape == (3, size, size)
        assert (pixels == torch.tensor([10, 200, 30]).view(3, 1, 1)).all()


# Images that keep their aspect ratio


@pytest.mark.parametrize(
    ("image", "output"),
    [
        ((300, 200), (100, 67)),
        ((200, 300), (67, 100)),
        ((100, 100), (100, 100)),
        ((99, 40), (99, 40)),  # smaller images are not enlarged
        ((101, 101), (100, 100)),
    ],
)
@pytest.mark.parametrize("interpolation", MODES)
def test_the_longer_side_shrinks_and_the_aspect_ratio_is_kept(
    image: tuple[int, int], output: tuple[int, int], interpolation: str
):
    whole = picture(*image)
    ours = transform_image(whole, FitTransform(100, interpolation=interpolation), Random(0))
    assert ours.shape == (3, output[1], output[0])
    mode = MODES[interpolation]
    theirs = v2.functional.pil_to_tensor(v2.functional.resize(whole, list(output[::-1]), mode, antialias=True))
    assert distance(ours, theirs) <= (0 if image == output else 3)
    assert distance(ours, theirs.flip(1)) > 50
    flat = transform_image(picture(1000, 2), FitTransform(100), Random(0))
    assert flat.shape == (3, 1, 100)  # a side has at least one pixel


def test_only_flips_are_random():
    image = picture(60, 40)
    still, mirrored = (transform_image(image, FitTransform(30, flip=flip), Random(0)) for flip in (0.0, 1.0))
    assert torch.equal(mirrored, still.flip(2))
    assert not torch.equal(mirrored, still)
    flips = [FitTransform(30, flip=0.5).crop(60, 40, augmentation_rng(0, 0, index)).flip for index in range(1000)]
    assert abs(np.mean(flips) - 0.5) < 0.06
    assert len({FitTransform(30, flip=0.5).crop(60, 40, augmentation_rng(0, 0, index)).box for index in range(9)}) == 1


@given(width=sides, height=sides, max_side=st.integers(1, 100))
def test_no_side_exceeds_the_maximum(width: int, height: int, max_side: int):
    crop = FitTransform(max_side).crop(width, height, Random(0))
    assert 1 <= min(crop.size) <= max(crop.size) == min(max_side, max(width, height))
    assert crop.box == (0, 0, width, height)
    by = min(1, max_side / max(width, height))
    assert all(
        abs(new - old * by) <= 0.5 + 1e-9 or new == 1 for new, old in zip(crop.size, (width, height), strict=True)
    )


# Boxes


@pytest.mark.parametrize("transform", [FitTransform(60), TestTransform(24, 28), TrainTransform(24)])
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_box_is_cut_out_first(tmp_path: Path, transform: FitTransform | TestTransform | TrainTransform, ending: str):
    file = write(tmp_path / f"a.{ending}", picture(600, 400))
    found = load_crop(file, transform, Random(1), (100.4, 50, 339.6, 210))  # rounded to 100 ... 340
    whole = load_image(file)
    part = whole.crop((100, 50, 340, 210))
    if isinstance(transform, FitTransform):  # shrunk by 10, the factor of the whole image
        assert found.shape == (3, 16, 24)
        exact = v2.functional.pil_to_tensor(part.resize((24, 16), Image.Resampling.BILINEAR))
        assert distance(found, exact) <= 3
        assert transform_image(part, transform, Random(1)).shape == (3, 40, 60)  # the size without the larger image
    else:
        assert torch.equal(found, transform_image(part, transform, Random(1)))
    if isinstance(transform, FitTransform):
        assert not torch.equal(found, load_crop(file, transform, Random(1), (100, 60, 340, 220)))
    assert distance(found, load_crop(file, transform, Random(1), (10, 220, 250, 380))) > 20


def test_pixels_outside_a_box_have_no_influence(tmp_path: Path):
    image = Image.new("RGB", (400, 400), "white")
    image.paste((0, 0, 0), (100, 100, 300, 300))
    file = write(tmp_path / "a.png", image)
    for transform in (FitTransform(37), TestTransform(16, 16), TrainTransform(16, scale=(1, 1))):
        assert load_crop(file, transform, Random(0), (100, 100, 300, 300)).max() == 0
        assert load_crop(file, transform, Random(0), (98, 98, 302, 302)).max() > 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [300, 20])
def test_a_box_is_in_pixels_of_the_upright_image(tmp_path: Path, orientation: int, size: int):
    """This also holds for a JPEG that would be decoded at a fraction of its size without a box."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = write(tmp_path / "big.jpg", picture(601, 457), quality=95, subsampling=0, exif=exif)
    upright = load_image(file)
    box = (40, 100, 300, 320)
    found = load_crop(file, FitTransform(size), Random(0), box)
    by = min(1, size / 601)
    shape = (round(260 * by), round(220 * by))
    assert found.shape == (3, shape[1], shape[0])
    exact = v2.functional.pil_to_tensor(upright.crop(box).resize(shape, Image.Resampling.BILINEAR))
    assert distance(found, exact) <= 3
    moved = v2.functional.pil_to_tensor(upright.crop((60, 100, 320, 320)).resize(shape, Image.Resampling.BILINEAR))
    assert distance(found, moved) > 3


def test_a_box_is_clipped_to_the_image(tmp_path: Path):
    file = write(tmp_path / "a.png", picture(50, 40))
    assert load_crop(file, FitTransform(100), Random(0), (-3.2, 20, 30, 77)).shape == (3, 20, 30)
    whole = load_crop(file, FitTransform(100), Random(0))
    assert torch.equal(load_crop(file, FitTransform(100), Random(0), (-9, -9, 99, 99)), whole)


@pytest.mark.parametrize("box", [(50, 0, 60, 10), (5, 5, 5, 9), (0, -8, 10, 0), (9, 9, 4, 20)])
def test_a_box_outside_of_the_image_is_rejected(tmp_path: Path, box: tuple[int, int, int, int]):
    file = write(tmp_path / "a.jpg", picture(50, 40))
    with pytest.raises(ImageError, match=r"a\.jpg: it has 50 x 40 pixels, none of them in its box"):
        load_crop(file, FitTransform(100), Random(0), box)


def test_boxes_of_a_catalog(tmp_path: Path):
    root = class_folders(tmp_path, {"a": 2}, ending="png")  # 24 x 18 pixels
    nothing = [math.nan] * 4
    catalog = Catalog("a", root, ["a/0.png", "a/1.png"], [0, 0], ("a",), ["test"] * 2, boxes=[nothing, [2, 3, 12, 10]])
    dataset = ImageDataset(catalog, FitTransform(100))
    assert torch.equal(dataset[0, 0], v2.functional.pil_to_tensor(load_image(catalog.file(0))))
    assert torch.equal(dataset[0, 1], v2.functional.pil_to_tensor(load_image(catalog.file(1)).crop((2, 3, 12, 10))))


# Loading from files


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_decoded_at_reduced_size_gives_the_same_image(tmp_path: Path, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = write(tmp_path / "big.jpg", picture(601, 457), quality=95, subsampling=0, exif=exif)
    whole = load_image(file)
    still, random = (TestTransform(32, 36), TestTransform(100, 110)), (TrainTransform(32), FitTransform(60, flip=0.5))
    for transform, draws in [*((each, 1) for each in still), *((each, 3) for each in random)]:
        for index in range(draws):
            small = load_crop(file, transform, augmentation_rng(0, 0, index))
            exact = transform_image(whole, transform, augmentation_rng(0, 0, index))
            assert small.shape == exact.shape
            assert distance(small, exact) <= 5
            assert (small.int() - exact.int()).abs().float().mean() < 1
        other = transform_image(ImageOps.invert(whole), transform, augmentation_rng(0, 0, index))
        assert distance(small, other) > 50  # control: the measure detects another image


def test_a_large_jpeg_is_decoded_at_reduced_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "shortlist.data.images.apply_crop", lambda image, *_: sizes.append(image.size) or torch.zeros(1)
    )
    file = write(tmp_path / "big.jpg", picture(800, 600))
    for size in (500, 200, 90, 20):
        load_crop(file, TestTransform(size, size), Random(0))
    assert sizes == [(800, 600), (400, 300), (200, 150), (100, 75)]
    load_crop(file, FitTransform(200), Random(0))
    load_crop(file, FitTransform(1024), Random(0))
    assert sizes[4:] == [(400, 300), (800, 600)]


WAYS_TO_STORE: list[dict[str, object]] = [
    *({"subsampling": subsampling, "quality": quality} for subsampling in (0, 1, 2) for quality in (30, 95)),
    {"progressive": True},
    {"keep_rgb": True},
    {"optimize": True, "restart_marker_rows": 2},
]


@pytest.mark.parametrize("options", WAYS_TO_STORE, ids=str)
def test_simplejpeg_gives_the_same_pixels_as_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
):
    noise = np.random.default_rng(0).integers(0, 256, (77, 91, 3), dtype=np.uint8)
    file = write(tmp_path / "a.jpg", Image.blend(picture(91, 77), Image.fromarray(noise), 0.3), **options)
    transform = TrainTransform(32)
    keys = [augmentation_rng(0, 0, index) for index in range(3)]
    ours = load_crops(file, transform, keys)
    decoded = image_decoded_with_simplejpeg(file)
    assert decoded is not None
    assert np.array_equal(decoded, np.asarray(Image.open(file)))
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert image_decoded_with_simplejpeg(file) is None
    for mine, index in zip(ours, range(3), strict=True):
        assert torch.equal(mine, load_crop(file, transform, augmentation_rng(0, 0, index)))


def image_decoded_with_simplejpeg(file: Path) -> np.ndarray | None:
    with Image.open(file) as image:
        return images._decode_fast(image)


def test_pillow_decodes_what_simplejpeg_does_not(tmp_path: Path):
    whole, transform, exif = picture(90, 70), TrainTransform(64), Image.Exif()
    exif[0x0112] = 6
    for name, image, options in (("rotated", whole, {"exif": exif}), ("grey", whole.convert("L"), {})):
        file = write(tmp_path / f"{name}.jpg", image, **options)
        assert image_decoded_with_simplejpeg(file) is None
        assert torch.equal(
            load_crop(file, transform, Random(1)), transform_image(load_image(file), transform, Random(1))
        )
    content = write(tmp_path / "whole.jpg", whole).read_bytes()
    (tmp_path / "part.jpg").write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageError, match=r"part\.jpg: .*truncated"):
        load_crop(tmp_path / "part.jpg", transform, Random(1))


def test_a_png_is_the_same_from_the_file(tmp_path: Path):
    file = write(tmp_path / "a.png", picture(90, 70))
    for transform in (TestTransform(32, 36), TrainTransform(32), FitTransform(80)):
        assert torch.equal(
            load_crop(file, transform, Random(3)), transform_image(picture(90, 70), transform, Random(3))
        )


# Invalid arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainTransform(0), "at least 1 pixel"),
        (lambda: TrainTransform(8, scale=(0.5, 0.2)), "`scale` must be"),
        (lambda: TrainTransform(8, scale=(0, 1)), "`scale` must be"),
        (lambda: TrainTransform(8, scale=(0.5, 2)), "`scale` must be"),
        (lambda: TrainTransform(8, ratio=(2, 1)), "`ratio` must be"),
        (lambda: TrainTransform(8, ratio=(0, math.inf)), "`ratio` must be"),
        (lambda: TrainTransform(8, flip=1.5), "`flip` must be"),
        (lambda: TrainTransform(8, interpolation="bicubik"), "did you mean 'bicubic'"),
        (lambda: TestTransform(8, 7), "resized to 7 and cropped to 8"),
        (lambda: TestTransform(0, 7), "at least 1 pixel"),
        (lambda: TestTransform(8, 8, "x"), "known: bicubic, bilinear"),
        (lambda: FitTransform(0), "at least 1 pixel"),
        (lambda: FitTransform(8, flip=-0.1), "`flip` must be"),
        (lambda: FitTransform(8, interpolation="bilineal"), "did you mean 'bilinear'"),
    ],
)
def test_invalid_transforms_are_rejected(make: object, message: str):
    with pytest.raises(ConfigError, match=message):
        make()
