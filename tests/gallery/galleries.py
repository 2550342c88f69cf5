"""Constants and the model of the galleries that the tests create."""

from __future__ import annotations

from collections.abc import Callable

from shortlist.gallery import Gallery
from shortlist.model import Embedder

DIM = 8
CLASSES = {"bolt": 5, 'nut "M8"': 4, "washer's": 3}
NUMBER = sum(CLASSES.values())
Open = Callable[..., Gallery]


def small_embedder(dim: int = DIM) -> Embedder:
    """A convolutional network of two blocks with random weights."""
    args = {"layers": (1, 1, 0, 0), "channels": (16, 24, 24, 24)}
    return Embedder("test_resnet", dim=dim, backbone_args=args).eval()
