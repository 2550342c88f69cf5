"""The description that every exported file contains, and the preprocessing code for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from shortlist import __version__
from shortlist.data.transforms import REDUCING_GAP
from shortlist.encoding import Encoder
from shortlist.encoding.conversion import INPUT, OUTPUT

FORMAT = 1


def describe_export(encoder: Encoder, check: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describe an exported model: its input, output and preprocessing, and the result of its verification."""
    config = encoder.embedder.config
    sides = ["height", "width"] if encoder.transform.size is None else [encoder.transform.size] * 2
    return {
        "format": FORMAT,
        "made_by": f"shortlist {__version__}",
        "fingerprint": encoder.fingerprint,
        "input": {"name": INPUT, "dtype": "uint8", "shape": ["batch", 3, *sides], "channels": "RGB"},
        "preprocessing": preprocessing_settings(encoder),
        "in_the_graph": {"mean": config.mean, "std": config.std, "scales": list(encoder.scales)},
        "output": {"name": OUTPUT, "dtype": "float32", "shape": ["batch", encoder.dim], "length": 1},
        "check": check,
    }


def preprocessing_settings(encoder: Encoder) -> dict[str, Any]:
    """Return the settings that `preprocess` needs."""
    transform = encoder.transform
    settings = {name: value for name, value in asdict(transform).items() if name != "flip"}  # type: ignore[call-overload]
    return {"kind": "fit" if transform.size is None else "square", **settings, "reducing_gap": REDUCING_GAP}


# The source of this function is copied into the load.py of every package, so it uses only Pillow and NumPy.
def preprocess(image: Image.Image, settings: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Convert an image to a uint8 array (3, height, width) with the `preprocessing` settings of an exported model."""
    image = ImageOps.exif_transpose(image).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    width, height = image.size
    if settings["kind"] == "fit":  # the whole image, reduced if a side is longer than max_side
        scale = min(1.0, settings["max_side"] / max(width, height))
        size, box = (max(1, round(width * scale)), max(1, round(height * scale))), (0.0, 0.0, width, height)
    else:  # resize the shorter side to `resize`, then crop the central square of `size`
        side = settings["size"]
        columns, rows = (settings["resize"] * length // min(width, height) for length in (width, height))
        left, top = round((columns - side) / 2), round((rows - side) / 2)
        x, y = width / columns, height / rows
        size, box = (side, side), (left * x, top * y, min((left + side) * x, width), min((top + side) * y, height))
    filter_ = Image.Resampling[settings["interpolation"].upper()]
    resized = image.resize(size, filter_, box=box, reducing_gap=settings["reducing_gap"])
    return np.moveaxis(np.array(resized), 2, 0)
