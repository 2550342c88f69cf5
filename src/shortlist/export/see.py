"""What a network sees of an image, with Pillow and NumPy alone: this file's text goes into every package's load.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageOps


def see(image: Image.Image, how: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The uint8 array (3, height, width) that the network takes; `how` is the file's `preprocessing`."""
    image = ImageOps.exif_transpose(image).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    width, height = image.size
    if how["kind"] == "fit":  # the whole image; one with a side longer than max_side shrinks
        by = min(1.0, how["max_side"] / max(width, height))
        size, box = (max(1, round(width * by)), max(1, round(height * by))), (0.0, 0.0, width, height)
    else:  # the shorter side becomes `resize`, and of that the square of `size` in the middle is kept
        across, down = (how["resize"] * side // min(width, height) for side in (width, height))
        left, top = round((across - how["size"]) / 2), round((down - how["size"]) / 2)
        x, y = width / across, height / down
        right, bottom = min((left + how["size"]) * x, width), min((top + how["size"]) * y, height)
        size, box = (how["size"], how["size"]), (left * x, top * y, right, bottom)
    kind = Image.Resampling[how["interpolation"].upper()]
    seen = image.resize(size, kind, box=box, reducing_gap=how["reducing_gap"])
    return np.moveaxis(np.array(seen), 2, 0)
