"""Evaluate a run on its own test classes or on other images, and open its embedder and encoder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from timm import is_model
from torch import Tensor, nn

from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.config.schema import TestConfig
from shortlist.data import BENCHMARKS, Catalog
from shortlist.data.missing_files import check_on_missing
from shortlist.data.sources import check_label_separator
from shortlist.distributed import current_processes
from shortlist.encoding import CachedFeatures, Encoder, NonFiniteError, Parts, Shard, embed_images, left_out_images
from shortlist.encoding.embed import write_embeddings
from shortlist.encoding.encoder import ENCODER_FILE
from shortlist.encoding.pretrained import CONFIG, TIMM, is_pretrained, is_timm
from shortlist.encoding.shards import encode_to_file
from shortlist.errors import ConfigError, DataError, RunError, translate_arguments
from shortlist.evaluation import Evaluation, evaluate
from shortlist.evaluation.protocols import DEFAULT_K
from shortlist.model import Embedder
from shortlist.progress import Advance, Display, default_display
from shortlist.search import Vectors, open_vectors
from shortlist.training.components import build_transforms
from shortlist.training.datasets import (
    EvalImages,
    EvalSet,
    is_whole,
    open_eval_set,
    open_eval_sets,
    open_images,
    open_labelled,
    open_run_images,
    reported_k,
)
from shortlist.training.folder import RunFolder
from shortlist.training.interim_tests import with_interim_tests
from shortlist.training.plan import inference_batch_size, run_workers

FEATURES = 8192  # number of images whose pooled features are embedded at once
OWN_IMAGES = EvalImages()  # the test sets of a run


@translate_arguments({name: key for name, key in CONFIG_KEYS.items() if name not in ("on_missing", "root")})
def evaluate_run(
    path: Path | str,
    images: EvalImages = OWN_IMAGES,
    *,
    model: nn.Module | None = None,
    parts: Path | str | None = None,
    display: Display | None = None,
) -> list[Evaluation]:
    """Evaluate the embedder of a run on the test sets of its configuration, or on other images.

    Args:
        path: Folder of the run.
        images: The images.
        model: The model, if it was given in Python; see `Encoder.from_run`.
        parts: Folder of the parts that `embed_run_shard` has written, which are merged and then deleted.
        display: Display for progress.

    Returns:
        One evaluation per test set, or two (without and with distractors) for a test set with distractors.

    Raises:
        ConfigError: An argument is invalid, or requires `data`.
        DataError: The images of the run have no test classes.
        IncompletePartsError: The parts do not contain every image.
        RunError: The run is not finished.
        ImagesChangedError: The images of the run have changed, so that training images might become test images.
    """
    display = display or default_display()
    opened = _open_tests(path, images, model, display)
    from_parts = None if parts is None else Path(parts)
    found: list[Evaluation] = []
    for eval_set in opened.eval_sets:
        found += evaluate_embedder(opened.embedder, eval_set, opened.config, display, opened.folder, parts=from_parts)
    return with_interim_tests(found, opened.folder.metrics()) if images.data is None else found


@translate_arguments({name: key for name, key in CONFIG_KEYS.items() if name not in ("on_missing", "root")})
def embed_run_shard(
    path: Path | str,
    shard: Shard,
    parts: Path | str,
    images: EvalImages = OWN_IMAGES,
    *,
    model: nn.Module | None = None,
    display: Display | None = None,
) -> list[Path]:
    """Embed one of several shards of the images that `evaluate_run` needs with the same arguments.

    Args:
        path: Folder of the run.
        shard: The shard.
        parts: Folder to write the parts to.
        images: The images.
        model: The model, if it was given in Python; see `Encoder.from_run`.
        display: Display for progress.

    Returns:
        The parts: one per test set, and one for its distractors.
    """
    display = display or default_display()
    opened = _open_tests(path, images, model, display)
    encoder = build_encoder(opened.config, opened.embedder)
    workers = run_workers(opened.config, current_processes().on_this_machine)
    written = []
    for eval_set in opened.eval_sets:
        jobs = [(Parts(parts, encoder, eval_set.catalog), "error")]
        if eval_set.distractors is not None:
            jobs.append((Parts(parts, encoder, eval_set.distractors, np.float16), eval_set.on_missing))
        for job, missing in jobs:
            with display.task(f"embedding {job.catalog.name}, shard {shard}", "images") as progress:
                written.append(job.embed(shard, on_missing=missing, workers=workers, progress=progress))
    return written


@dataclass(frozen=True)
class _Tests:
    """A run, and the images to evaluate it on."""

    folder: RunFolder
    config: RunConfig
    embedder: Embedder
    eval_sets: tuple[EvalSet, ...]


def _open_tests(path: Path | str, images: EvalImages, model: nn.Module | None, display: Display) -> _Tests:
    """Open a run and the images to evaluate it on; see `evaluate_run`."""
    data, on_missing = images.data, images.on_missing
    given = {name: getattr(images, name) for name in ("root", "distractors", "label_separator")}
    for name, value in given.items():
        if value is not None and data is None:
            raise ConfigError(f"`{name}` requires `data`: it applies to images other than those of the run.")
        if value is not None and isinstance(data, Catalog):
            raise ConfigError(f"`{name}` has no effect on a catalog.")
    folder = RunFolder.open(Path(path))
    config = folder.config()
    if on_missing is not None:
        check_on_missing(on_missing)
        config = _with_on_missing(config, on_missing)
    embedder = open_embedder(folder, model).to(Accelerator().device)

    @translate_arguments({"root": "data.root"})
    def own() -> Catalog:
        if on_missing is not None:  # the images that are left out may differ from those of the run
            return open_images(config, display).catalog
        return open_run_images(config, display, folder).catalog

    eval_sets: tuple[EvalSet, ...]
    if isinstance(data, Catalog):
        eval_sets = (EvalSet(_test_images(data), reported_k(config, data.name)),)
    elif data is not None:
        check_label_separator(images.label_separator)
        test = TestConfig.model_validate({"source": str(data), **given})
        eval_sets = (open_eval_set(config, test, display, own),)
    else:
        eval_sets = open_eval_sets(config, display, own)
    if not eval_sets:
        raise DataError(f"{config.data.source} has no test images, and evaluation.tests of the run is empty.")
    return _Tests(folder, config, embedder, eval_sets)


def evaluate_encoder(
    encoder: Encoder | Path | str, images: EvalImages, display: Display | None = None
) -> list[Evaluation]:
    """Evaluate an encoder that need not belong to a run. It is given as an object, or by a name as in `open_encoder`.

    `images.data` is required.
    """
    display = display or default_display()
    _, eval_set, vectors = embed_labelled(encoder, images, display)
    with display.task(f"ranking {eval_set.name}") as progress:
        return [eval_set.with_split_name(evaluate(vectors, eval_set.catalog, k=eval_set.k, progress=progress))]


def embed_labelled(
    encoder: Encoder | Path | str, images: EvalImages, display: Display
) -> tuple[Encoder, EvalSet, Tensor]:
    """Open and embed images to evaluate an encoder on; see `evaluate_encoder`.

    Returns:
        The encoder, the test images, and their vectors.
    """
    data = open_labelled(images, display)
    test = _test_images(data)
    if not isinstance(encoder, Encoder):
        encoder = open_encoder(encoder)  # after the images, because errors in these are found faster
    with display.task(f"embedding {test.name}", "images") as progress:
        vectors = embed_test(encoder, test, None, None, progress)
    k = BENCHMARKS[data.name].k if data.name in BENCHMARKS else DEFAULT_K
    return encoder, EvalSet(test, k, whole=is_whole(data)), vectors


def _test_images(catalog: Catalog) -> Catalog:
    """Return the test images of a catalog, or all of them if it has no splits."""
    return catalog.split("test") if catalog.splits.any() else catalog


def _with_on_missing(config: RunConfig, on_missing: str) -> RunConfig:
    """Set `on_missing` for all images."""
    change = {"on_missing": on_missing}
    tests = tuple(test.model_copy(update=change) for test in config.evaluation.tests)
    return config.with_changes(data=change, evaluation={"tests": tests})


def evaluate_embedder(
    embedder: Embedder,
    eval_set: EvalSet,
    config: RunConfig,
    display: Display,
    folder: RunFolder | None = None,
    *,
    features: Callable[[Catalog], CachedFeatures] | None = None,
    validation: bool = False,
    intervals: bool = True,
    parts: Path | None = None,
) -> list[Evaluation]:
    """Evaluate an embedder on one set of images.

    Args:
        embedder: Embedder on its device.
        eval_set: Images to evaluate on.
        config: Configuration, for scales, bootstrap and the results in the paper.
        display: Display for progress.
        folder: Folder of the run, where embeddings are kept. Required for distractors, because there are many.
        features: Function that returns the pooled features of the images, if the backbone is frozen. Embeddings at a
            single scale are computed from them.
        validation: Whether to evaluate at one scale and without intervals, to compare epochs of a run.
        intervals: Whether to compute confidence intervals, if `evaluation.bootstrap` is not 0.
        parts: Folder of parts that contain the embeddings.

    Returns:
        One evaluation, or two (without and with distractors) if there are distractors and a folder.

    Raises:
        NonFiniteError: An embedding is not finite.
    """
    encoder = build_encoder(config, embedder, validation=validation)
    workers = run_workers(config, current_processes().on_this_machine)
    kept_in = None if validation else folder
    if features is not None and encoder.network is embedder:
        vectors = embed_features(encoder, eval_set.catalog, features(eval_set.catalog), kept_in)
    else:
        with display.task(f"embedding {eval_set.name}", "images") as progress:
            vectors = embed_test(encoder, eval_set.catalog, workers, kept_in, progress, parts)
    vectors = vectors.to(next(embedder.parameters()).device)
    bootstrap = config.evaluation.bootstrap if intervals and not validation else 0
    galleries: list[tuple[dict[str, Vectors], tuple[str, ...]]] = [({}, ())]
    if eval_set.distractors is not None and folder is not None:
        galleries.append(_distractors(encoder, eval_set, folder, display, workers, parts))
    found = []
    for distractors, remarks in galleries:
        with display.task(f"ranking {'+'.join((eval_set.name, *distractors))}") as progress:
            measured = evaluate(
                vectors, eval_set.catalog, k=eval_set.k, bootstrap=bootstrap, distractors=distractors, progress=progress
            )
        paper = config.paper.get(measured.data, {})
        found.append(replace(eval_set.with_split_name(measured), paper=paper, remarks=measured.remarks + remarks))
    return found


def embed_test(
    encoder: Encoder,
    catalog: Catalog,
    workers: int | None,
    folder: RunFolder | None,
    progress: Advance,
    parts: Path | None = None,
) -> Tensor:
    """Embed all images of a test set (n, d); the vectors are kept in the folder of the run if it is writable."""
    settings: dict[str, Any] = {"workers": workers, "progress": progress}
    path = None if folder is None else folder.vectors / f"{catalog.name}.npy"
    writable = folder is not None and os.access(folder.path, os.W_OK)
    merged = None if parts is None else Parts(parts, encoder, catalog)
    if path is not None and (writable or merged is not None or path.exists()):
        try:
            file = encode_to_file(encoder, catalog, path, on_missing="error", parts=merged, **settings)
            if merged is not None:
                merged.remove()
            return torch.from_numpy(np.array(open_vectors(file)))
        except OSError:  # the existing file is outdated, and a new one cannot be written
            if writable or merged is not None:
                raise
    vectors = embed_images(encoder.network, catalog, encoder.transform, batch_size=encoder.batch_size, **settings)
    if not vectors.isfinite().all():
        raise NonFiniteError("The embeddings are not finite.")
    return vectors


def embed_features(encoder: Encoder, catalog: Catalog, features: CachedFeatures, folder: RunFolder | None) -> Tensor:
    """Compute the same vectors and write the same file as `embed_test`, from the pooled features of the images."""
    embedder, images = encoder.embedder, np.arange(len(catalog))
    head, device = embedder.head(), next(embedder.parameters()).device
    with torch.inference_mode():
        blocks = (images[start : start + FEATURES] for start in range(0, len(images), FEATURES))
        vectors = torch.cat([head(features.take(each, np.zeros_like(each)).to(device)).cpu() for each in blocks])
    if not vectors.isfinite().all():
        raise NonFiniteError("The embeddings are not finite.")
    if folder is not None:
        write_embeddings(vectors, encoder.network, catalog, encoder.transform, folder.vectors / f"{catalog.name}.npy")
    return vectors.clone()  # outside inference mode


def _distractors(
    encoder: Encoder, eval_set: EvalSet, folder: RunFolder, display: Display, workers: int, parts: Path | None
) -> tuple[dict[str, Vectors], tuple[str, ...]]:
    """Embed distractors into a file in the folder of the run; return the vectors by name, and remarks."""
    catalog, dtype = eval_set.distractors, np.float16
    assert catalog is not None
    merged = None if parts is None else Parts(parts, encoder, catalog, dtype)
    with display.task(f"embedding {catalog.name}", "images") as progress:
        file = encode_to_file(
            encoder,
            catalog,
            folder.vectors / f"{catalog.name}.npy",
            dtype=dtype,
            on_missing=eval_set.on_missing,
            workers=workers,
            progress=progress,
            parts=merged,
        )
    if merged is not None:
        merged.remove()
    unreadable = len(left_out_images(file))
    text = f"{catalog.name}: left out {unreadable} unreadable images (on_missing=skip; see vectors/{file.name}.json)"
    return {catalog.name: open_vectors(file)}, (*catalog.remarks, *([text] if unreadable else []))


def build_encoder(config: RunConfig, embedder: Embedder, *, validation: bool = False) -> Encoder:
    """Build the encoder of a run; for validation, at one scale only."""
    scales = (1.0,) if validation else config.evaluation.scales
    return Encoder(embedder, build_transforms(config, embedder)[1], scales, inference_batch_size(config))


def open_encoder(name: Path | str, model: nn.Module | None = None) -> Encoder:
    """Open an encoder by a name, as in all commands, and move it to the default device.

    Args:
        name: Folder of a finished run, of a saved encoder or of an exported package; `OWNER/NAME`, a package on the
            Hugging Face Hub; or `timm:NAME`, a pretrained model of timm. See `Encoder.from_pretrained`.
        model: See `Encoder.from_run`.

    Raises:
        RunError: The run is not finished, or there is no such run or model.
        ModelError: The model cannot be opened.
    """
    path, name = Path(name), str(name)
    if (path / ENCODER_FILE).is_file():
        return Encoder.from_run(path, model=model)
    if is_run(name):
        folder = RunFolder.open(path)
        return build_encoder(folder.config(), open_embedder(folder, model)).to()
    if is_pretrained(name):
        with translate_arguments({"pretrained": f"{name}@"}, "{name}{value}"):
            return Encoder.from_pretrained(name)
    known = is_model(name) and not path.exists()
    advice = (
        f"The pretrained model of timm is {TIMM}{name}."
        if known
        else f"Give the folder of a run, or {TIMM}NAME for a pretrained model."
    )
    found = f": it contains no {RunFolder(path).config_file.name} and no {CONFIG}" if path.is_dir() else ""
    raise RunError(f"No run found in {name}, and no exported model{found}. {advice}")


def no_test_images(name: Encoder | Path | str, advice: str) -> ConfigError:
    """Return the error for a model that is not a run, and for which no labelled images are given."""
    if isinstance(name, Encoder):
        problem = "An encoder is not a run"
    elif is_timm(str(name)) or Path(name).exists():
        problem = f"{name} is not a run"
    else:
        problem = f"No run found in {name}"
    return ConfigError(f"{problem}, and only a run has test images of its own: {advice}")


def is_run(name: Path | str) -> bool:
    """Return whether a name for `open_encoder` is the folder of a run, which has test images of its own."""
    return RunFolder(Path(name)).config_file.is_file()


def open_embedder(folder: RunFolder, model: nn.Module | None = None) -> Embedder:
    """Open the embedder of a finished run, on the CPU.

    Args:
        folder: Folder of the run.
        model: See `Encoder.from_run`.

    Raises:
        RunError: The run is not finished.
    """
    if not (folder.path / "embedder.json").exists() and not folder.evaluation_file.exists():
        raise RunError(
            f"The run in {folder.path} is not finished and has no embedder yet. Resume it with: {folder.resume_command}"
        )
    return Embedder.load(folder.path, model)
