"""Constants of the galleries that the tests create."""

from __future__ import annotations

from collections.abc import Callable

from shortlist.gallery import Gallery

DIM = 8
CLASSES = {"bolt": 5, 'nut "M8"': 4, "washer's": 3}
NUMBER = sum(CLASSES.values())
Open = Callable[..., Gallery]
