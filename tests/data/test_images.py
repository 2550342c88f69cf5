"""Image files are decoded upright and in RGB, or rejected with an error that names them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shortlist.data import ImageError, load_image
from shortlist.data.images import open_image, upright_size
from shortlist.errors import DataError
from tests.data.pictures import picture, pixels, write

RGB = picture(24, 18)
GREY = RGB.convert("L")
ALPHA = Image.fromarray(np.linspace(0, 255, 24 * 18).reshape(18, 24).round().astype(np.uint8))


def on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return colours * share + 255 * (1 - share)


def difference(file: Path, expected: np.ndarray) -> float:
    image = load_image(file)
    assert image.mode == "RGB"
    values = pixels(image)
    assert values.shape == expected.shape
    return float(np.abs(values - expected).max())


# Modes


def test_rgb_is_unchanged(tmp_path: Path):
    assert difference(write(tmp_path / "a.png", RGB), pixels(RGB)) == 0
    assert difference(write(tmp_path / "a.jpg", RGB, quality=95, subsampling=0), pixels(RGB)) < 12
    assert difference(write(tmp_path / "b.png", RGB), pixels(picture(seed=1))) > 50  # control: another image


def test_grey_and_black_and_white(tmp_path: Path):
    grey = np.repeat(pixels(GREY)[..., None], 3, axis=2)
    assert difference(write(tmp_path / "grey.png", GREY), grey) == 0
    assert difference(write(tmp_path / "grey.jpg", GREY, quality=95), grey) < 8
    assert difference(write(tmp_path / "bits.png", GREY.convert("1")), pixels(GREY.convert("1").convert("RGB"))) == 0


def test_transparent_becomes_white(tmp_path: Path):
    rgba, la = RGB.copy(), GREY.copy()
    rgba.putalpha(ALPHA)
    la.putalpha(ALPHA)
    assert la.mode == "LA"
    expected = on_white(pixels(RGB), pixels(ALPHA))
    assert difference(write(tmp_path / "rgba.png", rgba), expected) <= 1
    assert difference(write(tmp_path / "rgba.webp", rgba, lossless=True, exact=True), expected) <= 1
    grey = on_white(np.repeat(pixels(GREY)[..., None], 3, axis=2), pixels(ALPHA))
    assert difference(write(tmp_path / "la.png", la), grey) <= 1
    assert np.abs(expected - pixels(RGB)).max() > 100  # control: without alpha, pixels would differ


def test_palette(tmp_path: Path):
    palette = RGB.quantize(16)
    assert palette.mode == "P"
    assert difference(write(tmp_path / "p.png", palette), pixels(palette.convert("RGB"))) == 0
    assert difference(write(tmp_path / "p.gif", palette), pixels(palette.convert("RGB"))) == 0


@pytest.mark.parametrize("kind", ["one colour", "a table"])
def test_palette_with_transparency(tmp_path: Path, kind: str):
    palette = RGB.quantize(16)
    alpha = np.full(16, 255)
    alpha[3] = 0
    if kind == "a table":
        alpha[5] = 128
    transparency = 3 if kind == "one colour" else bytes(alpha.tolist())
    expected = on_white(pixels(palette.convert("RGB")), alpha[pixels(palette)])
    assert difference(write(tmp_path / "p.png", palette, transparency=transparency), expected) <= 1
    assert np.abs(expected - pixels(palette.convert("RGB"))).max() > 50


def test_a_transparent_colour_without_an_alpha_channel(tmp_path: Path):
    flat = Image.new("RGB", (4, 4), (10, 20, 30))
    flat.putpixel((1, 1), (200, 0, 0))
    file = write(tmp_path / "t.png", flat, transparency=(10, 20, 30))
    values = pixels(load_image(file))
    assert values[0, 0].tolist() == [255, 255, 255]
    assert values[1, 1].tolist() == [200, 0, 0]


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_16_bits_are_scaled(tmp_path: Path, ending: str):
    values = np.linspace(0, 65535, 24 * 18).reshape(18, 24).round().astype(np.uint16)
    file = write(tmp_path / f"deep.{ending}", Image.fromarray(values))
    expected = np.repeat((values / 257).round()[..., None], 3, axis=2)
    assert difference(file, expected) <= 1
    assert len(np.unique(pixels(load_image(file)))) > 200  # with clipping, almost all values would be 255


def test_16_bits_of_the_other_byte_order(tmp_path: Path):
    values = np.array([[0, 257, 65535]], dtype=">u2")
    Image.frombytes("I;16B", (3, 1), values.tobytes()).save(tmp_path / "big.tif")
    assert pixels(load_image(tmp_path / "big.tif"))[0, :, 0].tolist() == [0, 1, 255]


def test_floats(tmp_path: Path):
    unit = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    expected = np.repeat((unit * 255).round()[..., None], 3, axis=2)
    assert difference(write(tmp_path / "unit.tif", Image.fromarray(unit)), expected) == 0
    assert difference(write(tmp_path / "bytes.tif", Image.fromarray(unit * 255)), expected) == 0
    for name, values in {"wide": unit * 1e6, "negative": unit - 0.5, "nan": unit * np.float32("nan")}.items():
        with pytest.raises(ImageError, match=rf"{name}\.tif: its values range from"):
            load_image(write(tmp_path / f"{name}.tif", Image.fromarray(values)))


def test_cmyk(tmp_path: Path):
    cmyk = RGB.convert("CMYK")
    assert difference(write(tmp_path / "c.tif", cmyk), pixels(RGB)) <= 1
    assert difference(write(tmp_path / "c.jpg", cmyk, quality=95, subsampling=0), pixels(RGB)) < 30
    assert np.abs(255 - 2 * pixels(RGB)).max() > 60  # control: inverted values, as stored, would differ


def test_other_colour_spaces(tmp_path: Path):
    assert difference(write(tmp_path / "y.tif", RGB.convert("YCbCr")), pixels(RGB)) <= 3
    neutral = write(tmp_path / "lab.tif", Image.new("LAB", (4, 4), (128, 128, 128)))
    assert difference(neutral, np.full((4, 4, 3), 119)) <= 2


# Orientation

SMALL = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 12
STORED = {  # how a camera stores the upright image for each EXIF orientation
    1: SMALL,
    2: SMALL[:, ::-1],
    3: SMALL[::-1, ::-1],
    4: SMALL[::-1],
    5: SMALL.transpose(1, 0, 2),
    6: SMALL.transpose(1, 0, 2)[::-1],
    7: SMALL.transpose(1, 0, 2)[::-1, ::-1],
    8: SMALL.transpose(1, 0, 2)[:, ::-1],
}


def oriented(file: Path, stored: np.ndarray, orientation: int, **options: object) -> Path:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return write(file, Image.fromarray(np.ascontiguousarray(stored)), exif=exif, **options)


@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", STORED)
def test_upright_whatever_the_orientation(tmp_path: Path, orientation: int, ending: str):
    options = {"lossless": True, "exact": True} if ending == "webp" else {}
    file = oriented(tmp_path / f"o.{ending}", STORED[orientation], orientation, **options)
    assert difference(file, SMALL) == 0
    with open_image(file) as image:
        assert upright_size(image) == (3, 2)


@pytest.mark.parametrize("orientation", STORED)
def test_an_upright_jpeg(tmp_path: Path, orientation: int):
    big = np.kron(SMALL, np.ones((16, 16, 1), dtype=np.uint8))
    stored = np.kron(STORED[orientation], np.ones((16, 16, 1), dtype=np.uint8))
    file = oriented(tmp_path / "o.jpg", stored, orientation, quality=95, subsampling=0)
    assert difference(file, big) < 12
    with open_image(file) as image:
        assert upright_size(image) == (48, 32)
    if orientation != 1:  # control: without the tag, the image is not upright
        plain = pixels(load_image(write(tmp_path / "plain.jpg", Image.fromarray(stored), quality=95, subsampling=0)))
        assert plain.shape != big.shape or np.abs(plain - big).max() > 50


def test_orientations_that_do_not_exist_are_ignored(tmp_path: Path):
    for orientation in (0, 9, 65535):
        assert difference(oriented(tmp_path / f"{orientation}.png", SMALL, orientation), SMALL) == 0


@pytest.mark.filterwarnings("ignore:.*EXIF")
def test_images_with_damaged_metadata_are_decoded(tmp_path: Path):
    write(tmp_path / "a.jpg", RGB, exif=b"Exif\0\0II*\0\xff\xff\xff\xff nonsense", quality=95, subsampling=0)
    assert difference(tmp_path / "a.jpg", pixels(RGB)) < 12


# Decoding at reduced size


def test_a_jpeg_keeps_the_minimum_size(tmp_path: Path):
    file = write(tmp_path / "big.jpg", picture(400, 300))
    assert load_image(file).size == (400, 300)
    assert load_image(file, at_least=150).size == (200, 150)
    assert load_image(file, at_least=151).size == (400, 300)
    assert load_image(file, at_least=1).size == (50, 38)
    assert load_image(file, at_least=1000).size == (400, 300)
    assert load_image(write(tmp_path / "big.png", picture(400, 300)), at_least=10).size == (400, 300)


# Files that are not images


def reason(file: Path) -> str:
    with pytest.raises(ImageError) as caught:
        load_image(file)
    error = caught.value
    assert isinstance(error, DataError)
    assert error.path == file
    assert str(error) == f"Cannot read the image {file}: {error.reason}"
    assert "\n" not in str(error)
    return error.reason


def test_a_missing_file(tmp_path: Path):
    assert reason(tmp_path / "ä ö.jpg") == "the file does not exist"
    assert "directory" in reason(tmp_path)


def test_text_files_and_empty_files(tmp_path: Path):
    (tmp_path / "text.jpg").write_text("this is a text")
    (tmp_path / "empty.jpg").touch()
    assert reason(tmp_path / "text.jpg").startswith("it is not an image")
    assert reason(tmp_path / "empty.jpg") == "the file is empty"


@pytest.mark.parametrize("ending", ["jpg", "png", "gif", "tif", "webp", "bmp"])
def test_truncated_files(tmp_path: Path, ending: str):
    file = write(tmp_path / f"cut.{ending}", picture(200, 150))
    load_image(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert reason(file)


def test_a_damaged_png(tmp_path: Path):
    file = write(tmp_path / "a.png", picture(200, 150))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    assert reason(file)


def test_the_error_can_be_pickled(tmp_path: Path):
    error = ImageError(tmp_path / "a b.jpg", "it is broken")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ImageError
    assert (str(again), again.path, again.reason) == (str(error), error.path, error.reason)
