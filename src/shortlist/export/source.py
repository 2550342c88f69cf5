"""The run that a model is exported from, and the comparison of an exported file with it."""

from __future__ import annotations

from collections.abc import Callable
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
from shortlist.encoding.pretrained import TIMM
from shortlist.errors import DataError, ModelError, ShortlistError
from shortlist.files import read_json
from shortlist.progress import Display
from shortlist.training import RunFolder
from shortlist.training.datasets import open_eval_sets, open_run_images

NUM_SAMPLES = 8  # images whose vectors are compared
_SYNTHETIC_SIZES = ((640, 480), (480, 640), (500, 500), (800, 300))

Model = Callable[[Tensor], Tensor]  # uint8 (B, 3, H, W) -> vectors (B, d)


class Samples(NamedTuple):
    """Preprocessed images, and the vectors that the run's own network computes for them.

    Args:
        images: Images, uint8 (3, H, W) each.
        vectors: Vectors, (n, d).
        source: Description of the images.
    """

    images: list[Tensor]
    vectors: Tensor
    source: str


@dataclass(frozen=True)
class ExportSource:
    """The model that is exported: a run, an encoder saved by `Encoder.save`, or another name of `open_encoder`.

    Args:
        path: The folder.
        display: Where progress is shown.
    """

    path: Path
    display: Display

    @property
    def name(self) -> str:
        """Name of the run's folder, or of the model."""
        return self.path.absolute().name.removeprefix(TIMM)

    @cached_property
    def folder(self) -> RunFolder | None:
        """The run's folder; None for a saved encoder."""
        folder = RunFolder(self.path)
        return folder if folder.config_file.is_file() else None

    @cached_property
    def config(self) -> RunConfig | None:
        """The run's configuration; None for a saved encoder."""
        return None if self.folder is None else self.folder.config()

    @cached_property
    def catalog(self) -> Catalog | None:
        """The run's own images; None if they cannot be opened or have changed."""
        if self.folder is None or self.config is None:
            return None
        try:
            return open_run_images(self.config, self.display, self.folder).catalog
        except (ShortlistError, OSError):
            return None

    def evaluations(self, *, before: bool = False) -> list[dict[str, Any]]:
        """Read the results of the run, after or before training; there are none if the file does not exist."""
        folder = self.folder
        if folder is None or not (folder.before_file if before else folder.evaluation_file).is_file():
            return []
        return [each.to_dict() for each in folder.evaluations(before=before)]

    def facts(self) -> dict[str, Any]:
        """Read the facts of the run; there are none if the file does not exist."""
        return self.folder.facts().model_dump() if self.folder and self.folder.facts_file.is_file() else {}

    def unreadable(self) -> int:
        """Return the number of images that were left out of the run because they cannot be read."""
        file = None if self.folder is None else self.folder.unreadable_file
        return len(read_json(file, list[tuple[str, str]])) if file is not None and file.is_file() else 0

    def samples(self, encoder: Encoder) -> Samples:
        """Return some of the run's test images, or synthetic images if these cannot be opened; on the CPU."""
        try:
            catalog = self._test_images()
            chosen = np.unique(np.linspace(0, len(catalog) - 1, NUM_SAMPLES).round().astype(int)).tolist()
            dataset = ImageDataset(catalog, encoder.transform)
            images, source = [dataset[0, index] for index in chosen], f"images of {catalog.name}"
        except (ShortlistError, OSError):
            images = [_synthetic_image(seed, encoder.transform) for seed in range(NUM_SAMPLES)]
            source = "synthetic images"
        with torch.inference_mode():
            return Samples(images, by_size(encoder.network, images), f"{len(images)} {source}")

    def _test_images(self) -> Catalog:
        """Return the images of the run's first test, or its training images if it has no test."""
        if self.config is None:
            raise DataError(f"{self.path} is not a run, so its images are not known")
        eval_sets = open_eval_sets(self.config, self.display, self._run_images)
        return eval_sets[0].catalog if eval_sets else self._run_images()

    def _run_images(self) -> Catalog:
        if self.catalog is None:
            raise DataError(f"the images of {self.path} cannot be opened")
        return self.catalog


def verify(model: Model, samples: Samples, tolerance: float, kind: str) -> dict[str, Any]:
    """Compare the vectors of an exported model with those of the run, in batches and for a single image.

    Args:
        model: The exported model, opened by its own runtime.
        samples: Images and expected vectors.
        tolerance: Largest allowed absolute difference of a vector's component.
        kind: Kind of file, for error messages.

    Returns:
        The images used, the largest difference and the tolerance.

    Raises:
        ModelError: The model fails on an image, or its vectors differ by more than `tolerance`.
    """
    with torch.inference_mode():
        try:
            vectors = by_size(model, samples.images)
            single = model(samples.images[0][None])
        except Exception as error:  # runtimes raise any kind of exception
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"the {kind} file fails on some images ({reason}), so it was not written") from error
        expected = samples.vectors
        difference = max((vectors - expected).abs().max().item(), (single - expected[:1]).abs().max().item())
    if not difference <= tolerance:
        raise ModelError(
            f"the {kind} file gives other vectors than PyTorch (largest difference {difference:.2g}, tolerance "
            f"{tolerance:g}), so it was not written: use another format"
        )
    return {"images": samples.source, "largest_difference": difference, "tolerance": tolerance}


def _synthetic_image(seed: int, transform: Transform) -> Tensor:
    """Return coarse coloured noise, whose features are not constant."""
    size = _SYNTHETIC_SIZES[seed % len(_SYNTHETIC_SIZES)]
    coarse = torch.randint(256, (6, 8, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    image = Image.fromarray(coarse.numpy()).resize(size, Image.Resampling.BICUBIC)
    return apply_crop(image, transform.crop(*size, Random(0)), transform.interpolation)
