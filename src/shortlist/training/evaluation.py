"""The numbers of a run: on its own test classes, or on other images."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from shortlist.config import RunConfig
from shortlist.config.arguments import ARGUMENTS
from shortlist.config.schema import TestConfig
from shortlist.data import Catalog
from shortlist.data.presence import check_on_missing
from shortlist.encoding import Encoder, NotFinite, embed_images, embed_to_file, left_out
from shortlist.encoding.encoder import FILE as DESCRIBER
from shortlist.errors import ConfigError, DataError, RunError, translate_arguments
from shortlist.evaluation import Evaluation, evaluate
from shortlist.model import Embedder
from shortlist.progress import Advance, Display, default_display
from shortlist.search import Vectors, open_vectors
from shortlist.training.folder import RunFolder
from shortlist.training.opening import EvalSet, open_eval_set, open_eval_sets, open_images, open_own
from shortlist.training.parts import build_transforms
from shortlist.training.plan import decoding_workers, images_at_once


@translate_arguments({name: key for name, key in ARGUMENTS.items() if name not in ("on_missing", "root")})
def evaluate_run(
    path: Path | str,
    data: str | None = None,
    *,
    root: Path | None = None,
    distractors: Path | None = None,
    on_missing: str | None = None,
    display: Display | None = None,
) -> list[Evaluation]:
    """Evaluate a run's embedder on all that its config names; a test with distractors gives two evaluations.

    Args:
        path: the run's folder.
        data: other images than the config's; where they have no splits, all of them are the test.
        root: of `data`, as in `open_catalog`.
        distractors: a folder with R1M, for `data`.
        on_missing: in place of the config's `data.on_missing`.
        display: for progress.

    Raises:
        ConfigError: an argument goes with `data` only, or cannot be.
        DataError: the run's images have no test classes.
        RunError: the run is not finished.
        OtherImages: its own images have changed since: some that it trained on might count as test.
    """
    for name, value in {"root": root, "distractors": distractors}.items():
        if value is not None and data is None:
            raise ConfigError(f"`{name}` says where other images are: it goes with `data`.")
    folder, display = RunFolder.open(Path(path)), display or default_display()
    config = folder.config()
    if on_missing is not None:
        check_on_missing(on_missing)
        config = _missing_as(on_missing, config)
    embedder = open_embedder(folder).to(Accelerator().device)

    @translate_arguments({"root": "data.root"})
    def own() -> Catalog:
        if on_missing is not None:  # then others may be left out
            return open_images(config, display).catalog
        return open_own(config, display, folder).catalog

    eval_sets: tuple[EvalSet, ...]
    if data is not None:
        eval_sets = (open_eval_set(config, TestConfig(source=data, root=root, distractors=distractors), display, own),)
    else:
        eval_sets = open_eval_sets(config, display, own)
    if not eval_sets:
        raise DataError(f"{config.data.source} has no test images, and evaluation.tests of the run names no others")
    return [each for eval_set in eval_sets for each in evaluate_embedder(embedder, eval_set, config, display, folder)]


def _missing_as(on_missing: str, config: RunConfig) -> RunConfig:
    """The config with `on_missing` for all its images."""
    change = {"on_missing": on_missing}
    tests = tuple(test.model_copy(update=change) for test in config.evaluation.tests)
    evaluation = config.evaluation.model_copy(update={"tests": tests})
    return config.model_copy(update={"data": config.data.model_copy(update=change), "evaluation": evaluation})


def evaluate_embedder(
    embedder: Embedder,
    eval_set: EvalSet,
    config: RunConfig,
    display: Display,
    folder: RunFolder | None = None,
    *,
    validation: bool = False,
) -> list[Evaluation]:
    """Measure an embedder; with a folder and distractors, once without and once with the distractors.

    Args:
        embedder: on its device.
        eval_set: what to measure it on.
        config: resolutions, bootstrap, and the figures of the paper.
        display: for progress.
        folder: where the distractors' vectors are kept, since there are many.
        validation: only to compare with others of its run: at one resolution, without intervals.

    Raises:
        NotFinite: an embedding is not finite.
    """
    encoder = build_encoder(config, embedder, validation=validation)
    workers = decoding_workers(config)
    with display.task(f"embedding {eval_set.name}", "images") as progress:
        vectors = embed_test(encoder, eval_set.catalog, workers, None if validation else folder, progress)
    vectors = vectors.to(next(embedder.parameters()).device)
    bootstrap = 0 if validation else config.evaluation.bootstrap
    galleries: list[tuple[dict[str, Vectors], tuple[str, ...]]] = [({}, ())]
    if eval_set.distractors is not None and folder is not None:
        galleries.append(_distractors(encoder, eval_set.distractors, eval_set.on_missing, folder, display, workers))
    found = []
    for distractors, remarks in galleries:
        with display.task(f"ranking {'+'.join((eval_set.name, *distractors))}") as progress:
            measured = evaluate(
                vectors, eval_set.catalog, k=eval_set.k, bootstrap=bootstrap, distractors=distractors, progress=progress
            )
        paper = config.paper.get(measured.data, {})
        found.append(replace(measured, paper=paper, remarks=measured.remarks + remarks))
    return found


def embed_test(encoder: Encoder, catalog: Catalog, workers: int, folder: RunFolder | None, progress: Advance) -> Tensor:
    """The vectors of all images of a test; they are kept in the run's folder, where that can be written to."""
    settings: dict[str, Any] = {"batch_size": encoder.batch_size, "workers": workers, "progress": progress}
    path = None if folder is None else folder.vectors / f"{catalog.name}.npy"
    writable = folder is not None and os.access(folder.path, os.W_OK)
    if path is not None and (writable or path.exists()):
        try:
            file = embed_to_file(encoder.network, catalog, encoder.transform, path, dtype=np.float32, **settings)
            return torch.from_numpy(np.array(open_vectors(file)))
        except OSError:  # they are others', and new ones cannot be kept
            if writable:
                raise
    vectors = embed_images(encoder.network, catalog, encoder.transform, **settings)
    if not vectors.isfinite().all():
        raise NotFinite("The embeddings are not finite.")
    return vectors


def _distractors(
    encoder: Encoder, catalog: Catalog, on_missing: str, folder: RunFolder, display: Display, workers: int
) -> tuple[dict[str, Vectors], tuple[str, ...]]:
    """Their vectors, which are kept in the run's folder, and what one should know of them."""
    with display.task(f"embedding {catalog.name}", "images") as progress:
        file = embed_to_file(
            encoder.network,
            catalog,
            encoder.transform,
            folder.vectors / f"{catalog.name}.npy",
            on_missing=on_missing,
            batch_size=encoder.batch_size,
            workers=workers,
            progress=progress,
        )
    bad = len(left_out(file))
    text = f"{catalog.name}, left out as on_missing=skip says: {bad} unreadable images (vectors/{file.name}.json)"
    return {catalog.name: open_vectors(file)}, (*catalog.remarks, *([text] if bad else []))


def build_encoder(config: RunConfig, embedder: Embedder, *, validation: bool = False) -> Encoder:
    """What gives images their vectors; to validate, at one resolution."""
    scales = (1.0,) if validation else config.evaluation.scales
    return Encoder(embedder, build_transforms(config, embedder)[1], scales, images_at_once(config))


def open_encoder(path: Path | str) -> Encoder:
    """What gives images their vectors, of a finished run (or of any folder that `Encoder.save` wrote), on its device.

    Raises:
        RunError: the run is not finished.
    """
    if (Path(path) / DESCRIBER).is_file():
        encoder = Encoder.load(path)
    else:
        folder = RunFolder.open(Path(path))
        encoder = build_encoder(folder.config(), open_embedder(folder))
    encoder.embedder.to(Accelerator().device)
    return encoder


def open_embedder(folder: RunFolder) -> Embedder:
    """A finished run's embedder.

    Raises:
        RunError: the run is not finished.
    """
    if not (folder.path / "embedder.json").exists():
        raise RunError(
            f"The run in {folder.path} is not finished, so it has no embedder yet. Finish it: {folder.resume_command}"
        )
    return Embedder.load(folder.path)
