"""Training with a frozen backbone: cached features take the place of images, in steps, whitening and evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from shortlist.data import Catalog
from shortlist.encoding import CachedFeatures, FeatureCache, Views
from shortlist.progress import Clock, Display, Progress
from shortlist.seeds import derived_seed
from shortlist.training.components import build_transforms
from shortlist.training.durations import describe_parts, seconds_per_step
from shortlist.training.folder import RunFolder
from shortlist.training.initial_whitening import linear_input, sample_images, whiten
from shortlist.training.learner import Learner
from shortlist.training.plan import Plan, inference_batch_size, run_workers

MEASURED_SECONDS = 2.0  # time of encoding after which the remaining time is estimated


class FrozenBackbone:
    """Features that the frozen backbone of a run computes for its images, cached in files.

    Training images are encoded under `data.views` augmentations, in half precision. Validation and test images are
    encoded once, without augmentation, and in full precision, so that evaluations give the usual results.

    Args:
        plan: Plan of the run.
        folder: Folder of the run, which contains the cache by default.
        learner: The embedder, with its final backbone.
        display: Display for progress.
    """

    def __init__(self, plan: Plan, folder: RunFolder, learner: Learner, display: Display) -> None:
        self.plan, self.learner, self.display = plan, learner, display
        self.config = config = plan.config
        self.cache = FeatureCache(config.data.view_cache or folder.views, display.message)
        train, self._test = build_transforms(config, learner.embedder)
        self._augmented = Views(train, config.data.number_of_views, config.data.view_seed, "float16")
        self._test_features: dict[Catalog, CachedFeatures] = {}
        self.views = self._encode_views()

    def _encode_views(self) -> CachedFeatures:
        number = self._augmented.number
        name = f"{number} views of {len(self.plan.train):,} images"
        with self.display.task(f"encoding {name}", "images", later=True) as progress:
            others = self.plan.images_without_views / number  # in units of training images, which have several views
            estimate = _Estimate(f"encoding {name}", others, self._training_time(), progress, self.display)
            found = self._features(self.plan.train, self._augmented, estimate)
        old = len(found) - found.encoded
        cached = "" if not old else f", {old:,} found in {self.cache.folder}"
        self.display.message(f"{name}: {found.encoded:,} encoded{cached}", encoded=found.encoded, views=number)
        return found

    def _training_time(self) -> dict[str, float]:
        """Return the duration of all steps, if it is known, by their description."""
        steps, seconds = self.plan.total_steps, seconds_per_step(self.learner, self.plan.first_labels())
        return {} if seconds is None else {f"{steps:,} steps": steps * seconds}

    def _features(self, catalog: Catalog, views: Views, progress: Progress) -> CachedFeatures:
        size, workers = inference_batch_size(self.config), run_workers(self.config)
        embedder = self.learner.embedder
        return self.cache.features(embedder, catalog, views, batch_size=size, workers=workers, progress=progress)

    def test_features(self, catalog: Catalog) -> CachedFeatures:
        """Return the features of validation or test images."""
        if catalog not in self._test_features:
            with self.display.task(f"encoding {catalog.name}", "images", later=True) as progress:
                self._test_features[catalog] = self._features(catalog, Views(self._test), progress)
        return self._test_features[catalog]

    def batches(
        self, first_step: int, parts: Callable[[Tensor], Iterable[Tensor]]
    ) -> Iterator[tuple[Tensor, Iterator[Tensor]]]:
        """Iterate over the batches from `first_step` on: image indices, and the features of parts of them.

        The view of an image depends only on the seed and the epoch.

        Args:
            first_step: Step of the first batch.
            parts: Function that returns the parts of a batch whose features are needed.
        """
        drawn = -1
        for epoch, batch in self.plan.batches(first_step):
            if epoch != drawn:
                drawn, views = epoch, self._draw_views(epoch)
            indices = (part.numpy() for part in parts(batch))
            drawn_views = views  # features are read within the step, so that its duration includes this
            yield batch, (self.views.take(images, drawn_views[images]) for images in indices)

    def _draw_views(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Draw a view of each training image."""
        random = torch.Generator().manual_seed(derived_seed("views", self.config.training.seed, epoch))
        return torch.randint(self._augmented.number, (len(self.views),), generator=random).numpy()

    def learn_whitening(self) -> tuple[Tensor, Tensor]:
        """Learn the weight and bias of the linear layer from the views of training images; see `learn_whitening`.

        At most `model.whitening_images` views are used: one of each image, then another one of each, and so on.
        """
        model, labels = self.config.model, self.plan.train.labels
        images = sample_images(labels, model.whitening_images, derived_seed("whitening", self.config.training.seed))
        number = min(self._augmented.number, max(1, model.whitening_images // len(images)))
        images, views = np.tile(images, number), np.repeat(np.arange(number), len(images))
        features = linear_input(self.learner.embedder, self.views.take(images, views))
        return whiten(self.config, features, torch.from_numpy(labels[images]))


class _Estimate:
    """Progress callback that reports once, after some seconds, how long encoding and training will take.

    Args:
        encoding: Description of the encoding.
        others: Images that are encoded later, counted in encoded training images.
        training: Duration of the training that follows, by its description.
        progress: Callback that is called as well.
        display: Display for the message.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        encoding: str,
        others: float,
        training: Mapping[str, float],
        progress: Progress,
        display: Display,
        clock: Clock = time.monotonic,
    ) -> None:
        self.encoding, self.others, self.training = encoding, others, training
        self.progress, self.display, self.clock, self.reported = progress, display, clock, False
        self._first: tuple[float, int] | None = None  # time and number of images of the first call

    def __call__(self, done: int, total: int) -> None:
        self.progress(done, total)
        now = self.clock()
        started, before = self._first = self._first or (now, done)
        if now - started >= MEASURED_SECONDS and not self.reported:
            self.reported = True
            seconds = (total + self.others) * (now - started) / (done - before)
            text = f"measured time until the end: {describe_parts({self.encoding: seconds, **self.training})}"
            self.display.message(text, seconds=round(seconds, 1))
