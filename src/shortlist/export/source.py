"""The run that a model is exported from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.config import RunConfig
from shortlist.data import Catalog
from shortlist.data.images import ImageDataset
from shortlist.encoding import Encoder
from shortlist.encoding.conversion import NUM_SAMPLES, Samples, reference_samples, synthetic_samples
from shortlist.encoding.pretrained import TIMM
from shortlist.errors import DataError, ShortlistError
from shortlist.evaluation import Evaluation
from shortlist.progress import Display
from shortlist.training import RunFolder
from shortlist.training.datasets import open_eval_sets, open_run_images
from shortlist.training.run_evaluation import is_run


@dataclass(frozen=True)
class ExportSource:
    """The model that is exported: a run, an encoder saved by `Encoder.save`, or another name of `open_encoder`.

    Args:
        path: The folder.
        display: Shows the progress.
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
        return RunFolder(self.path) if is_run(self.path) else None

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

    def evaluations(self, *, before: bool = False) -> list[Evaluation]:
        """Read the results of the run, after or before training; empty if the file does not exist."""
        folder = self.folder
        if folder is None or not (folder.before_file if before else folder.evaluation_file).is_file():
            return []
        return folder.evaluations(before=before)

    def facts(self) -> dict[str, Any]:
        """Read the facts of the run; empty if the file does not exist."""
        return self.folder.facts().model_dump() if self.folder and self.folder.facts_file.is_file() else {}

    def unreadable(self) -> int:
        """Return the number of images that were left out of the run because they cannot be read."""
        return 0 if self.folder is None else len(self.folder.unreadable())

    def samples(self, encoder: Encoder) -> Samples:
        """Return some of the run's test images, or synthetic images if they cannot be opened, on the CPU."""
        try:
            catalog = self._test_images()
            chosen = np.unique(np.linspace(0, len(catalog) - 1, NUM_SAMPLES).round().astype(int)).tolist()
            dataset = ImageDataset(catalog, encoder.transform)
            images = [dataset[0, index] for index in chosen]
        except (ShortlistError, OSError):
            return synthetic_samples(encoder)
        return reference_samples(encoder, images, f"images of {catalog.name}")

    def _test_images(self) -> Catalog:
        """Return the images of the run's first test, or its training images if it has no test."""
        if self.config is None:
            raise DataError(f"{self.path} is not a run, so its images are not known.")
        eval_sets = open_eval_sets(self.config, self.display, self._run_images)
        return eval_sets[0].catalog if eval_sets else self._run_images()

    def _run_images(self) -> Catalog:
        if self.catalog is None:
            raise DataError(f"The images of {self.path} cannot be opened.")
        return self.catalog
