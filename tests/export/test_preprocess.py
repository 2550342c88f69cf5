"""The preprocessing of exported models, with Pillow alone, gives the same pixels as the run."""

from __future__ import annotations

import inspect
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shortlist.data import FitTransform, TestTransform, Transform
from shortlist.data.images import upright_rgb
from shortlist.data.transforms import INTERPOLATIONS, transform_image
from shortlist.export.metadata import preprocess, preprocessing_settings
from tests.data.pictures import picture
from tests.export.encoders import encoder

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
SIDES = st.integers(1, 300)
TRANSFORMS = st.one_of(
    st.builds(
        lambda size, more, interpolation: TestTransform(size, size + more, interpolation),
        st.integers(1, 80),
        st.integers(0, 40),
        st.sampled_from(sorted(INTERPOLATIONS)),
    ),
    st.builds(FitTransform, st.integers(1, 200), interpolation=st.sampled_from(sorted(INTERPOLATIONS))),
)
ENCODER = encoder()


def pixels_of_the_run(image: Image.Image, transform: Transform) -> np.ndarray:
    return transform_image(upright_rgb(image), transform, Random(0)).numpy()


def settings_of(transform: Transform) -> dict:
    object.__setattr__(ENCODER, "transform", transform)
    return preprocessing_settings(ENCODER)


@settings(deadline=None)
@given(width=SIDES, height=SIDES, transform=TRANSFORMS)
def test_any_shape(width: int, height: int, transform: Transform) -> None:
    image = picture(width, height)
    np.testing.assert_array_equal(preprocess(image, settings_of(transform)), pixels_of_the_run(image, transform))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_any_mode(mode: str) -> None:
    image, transform = picture(50, 40).convert(mode), TestTransform(24, 32)
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    np.testing.assert_array_equal(preprocess(image, settings_of(transform)), pixels_of_the_run(image, transform))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(50, 40).save(tmp_path / "image.png", exif=exif)
    transform = FitTransform(32)
    with Image.open(tmp_path / "image.png") as image:
        np.testing.assert_array_equal(preprocess(image, settings_of(transform)), pixels_of_the_run(image, transform))


def test_the_docs_show_the_function() -> None:
    annotated = ": Image.Image, settings: Mapping[str, Any]) -> np.ndarray[Any, Any]:"
    shown = inspect.getsource(preprocess).replace(annotated, ", settings):")
    assert shown in DOCS.read_text(encoding="utf-8")
