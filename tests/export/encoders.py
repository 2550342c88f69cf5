"""Encoders of every kind that can be exported."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from shortlist.data import FitTransform, TestTransform, Transform
from shortlist.encoding import Encoder
from shortlist.model import Embedder
from tests.data.pictures import picture

SQUARE, WHOLE = TestTransform(64, 72), FitTransform(160)
SCALES = (1.0, 2**-0.5)
# The fewest blocks of a ResNet, for `backbone_args`: a conversion takes time in proportion to the number of layers.
FEW_BLOCKS = {"layers": (1, 1, 0, 0), "channels": (16, 24, 24, 24)}


def encoder(
    backbone: str = "test_resnet", transform: Transform = SQUARE, scales: tuple[float, ...] = (1.0,), **model: Any
) -> Encoder:
    """Build an encoder whose weights all differ from their initial values: omitting a part changes the vectors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        embedder = Embedder(backbone, **{"dim": 8, "image_size": 64, **model}).eval()
        for name, value in embedder.state_dict().items():
            if value.is_floating_point() and not name.startswith("pooling"):
                value += (torch.rand_like(value) - 0.5) * 0.05  # including norms, biases and statistics
        if hasattr(embedder.pooling, "p"):
            embedder.pooling.p.data.fill_(2.5)
    return Encoder(embedder, transform, scales)


def pictures() -> list[Image.Image]:
    """Images of several shapes, none of which is that of the example images of the exporters."""
    return [picture(width, height, seed=width) for width, height in ((80, 64), (64, 96), (200, 96), (96, 96))]
