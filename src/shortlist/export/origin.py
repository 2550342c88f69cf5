"""Where a encoder comes from: the run's own facts, and images to check a file with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shortlist.batches.sizes import by_size
from shortlist.config import RunConfig
from shortlist.data import Catalog, Transform
from shortlist.data.images import ImageDataset
from shortlist.data.transforms import apply_crop
from shortlist.encoding import Encoder
from shortlist.errors import DataError, ShortlistError
from shortlist.files import read_json
from shortlist.progress import Display
from shortlist.training import RunFolder
from shortlist.training.datasets import open_eval_sets, open_run_images

CHECKED = 8  # images; of each, every number of its vector is compared
_SHAPES = ((640, 480), (480, 640), (500, 500), (800, 300))  # of synthetic images


class Samples(NamedTuple):
    """What the network sees of a few images, and what it makes of them."""

    images: list[Tensor]  # uint8 (3, H, W)
    vectors: Tensor  # (n, d)
    source: str


@dataclass(frozen=True)
class Origin:
    """A run, or the folder of a saved encoder, of which no more is known.

    Args:
        path: the folder.
        display: for progress.
    """

    path: Path
    display: Display

    @cached_property
    def folder(self) -> RunFolder | None:
        folder = RunFolder(self.path)
        return folder if folder.config_file.is_file() else None

    @cached_property
    def config(self) -> RunConfig | None:
        return None if self.folder is None else self.folder.config()

    @cached_property
    def catalog(self) -> Catalog | None:
        """The run's own images, where they are still there and the same."""
        if self.folder is None or self.config is None:
            return None
        try:
            return open_run_images(self.config, self.display, self.folder).catalog
        except (ShortlistError, OSError):
            return None

    def read(self, name: str) -> Any:
        """What is in one of the run's JSON files; None where there is none."""
        file = self.path / name
        return read_json(file) if self.folder and file.is_file() else None

    def samples(self, encoder: Encoder) -> Samples:
        """A few of the run's test images or, where these cannot be opened, synthetic ones; on the CPU."""
        try:
            catalog = self._tested()
            chosen = np.unique(np.linspace(0, len(catalog) - 1, CHECKED).round().astype(int)).tolist()
            dataset = ImageDataset(catalog, encoder.transform)
            images, source = [dataset[0, index] for index in chosen], f"images of {catalog.name}"
        except (ShortlistError, OSError):
            images, source = [_synthetic(seed, encoder.transform) for seed in range(CHECKED)], "synthetic images"
        with torch.inference_mode():
            return Samples(images, by_size(encoder.network, images), f"{len(images)} {source}")

    def _tested(self) -> Catalog:
        """What the run was tested on; without a test, what it was trained on."""
        if self.config is None:
            raise DataError(f"{self.path} is not a run, so its images are not known")
        eval_sets = open_eval_sets(self.config, self.display, self._own)
        return eval_sets[0].catalog if eval_sets else self._own()

    def _own(self) -> Catalog:
        if self.catalog is None:
            raise DataError(f"the images of {self.path} cannot be opened")
        return self.catalog


def _synthetic(seed: int, transform: Transform) -> Tensor:
    """Coarse coloured noise, which no network takes for flat."""
    size = _SHAPES[seed % len(_SHAPES)]
    coarse = torch.randint(256, (6, 8, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    image = Image.fromarray(coarse.numpy()).resize(size, Image.Resampling.BICUBIC)
    return apply_crop(image, transform.crop(*size, Random(0)), transform.interpolation)
