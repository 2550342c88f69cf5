"""The images that a config names: to train on, to validate with, and to be tested on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shortlist.config import RunConfig
from shortlist.config.schema import DataConfig, TestConfig
from shortlist.data import BENCHMARKS, Catalog, half_validation, open_catalog
from shortlist.data.inspection import drop_unreadable
from shortlist.errors import ConfigError, translate_arguments
from shortlist.files import read_json, write_text_atomically
from shortlist.progress import Display
from shortlist.training.folder import RunFolder

K = (1, 2, 4, 8)
Source = TypeVar("Source", DataConfig, TestConfig)


class Opened(NamedTuple):
    catalog: Catalog
    unreadable: list[tuple[str, str]]  # images left out, and why


@dataclass(frozen=True)
class EvalSet:
    """What an embedder is measured on.

    Args:
        catalog: of the images that count, and no others. Its name is that of the figures in `paper`.
        k: cut-offs to report.
        distractors: more images for its gallery; it is then measured without them, and with them.
        on_missing: what becomes of distractors that cannot be read.
    """

    catalog: Catalog
    k: tuple[int, ...]
    distractors: Catalog | None = None
    on_missing: str = "error"

    @property
    def name(self) -> str:
        return self.catalog.name

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of its images."""
        return self.catalog.remarks + (() if self.distractors is None else self.distractors.remarks)


def open_images(config: RunConfig, display: Display, folder: RunFolder | None = None) -> Opened:
    """The catalog that a config names and, with `data.on_missing: skip`, the unreadable images that were left out."""
    data = config.data
    with display.task(f"opening {data.source}", "images") as progress:
        catalog = open_catalog(
            data.source,
            root=data.root,
            on_missing=data.on_missing,
            train_share=data.train_share,
            split_seed=data.split_seed,
            progress=progress,
        )
    if data.on_missing == "error":
        return Opened(catalog, [])
    missing = len(catalog.missing)
    if folder is not None and folder.unreadable_file.exists():
        unreadable = [(path, why) for path, why in read_json(folder.unreadable_file)]
    else:
        with display.task("looking for unreadable images", "images") as progress:
            _, unreadable = drop_unreadable(catalog, progress=progress)
        if folder is not None:
            write_text_atomically(folder.unreadable_file, json.dumps(unreadable, indent=2) + "\n")
    left_out = {path for path, _ in unreadable}
    left = catalog.subset([path not in left_out for path in catalog.paths])
    return Opened(_with_remark(left, missing, len(unreadable)), unreadable)


def open_own(config: RunConfig, display: Display, folder: RunFolder | None = None) -> Opened:
    """A run's own images, split as it trains, validates and is tested on them.

    Raises:
        OtherImages: they are not those that the run in `folder` began with.
    """
    catalog, unreadable = open_images(config, display, folder)
    if config.data.validation == "half":
        catalog = half_validation(catalog)
    if folder is not None:
        folder.check_images(catalog.fingerprint())
    return Opened(catalog, unreadable)


def _with_remark(catalog: Catalog, missing: int, unreadable: int = 0) -> Catalog:
    """The catalog, which says how many of its images were left out."""
    if not missing and not unreadable:
        return catalog
    text = f"{catalog.name}, left out as on_missing=skip says: {missing} missing, {unreadable} unreadable images"
    return replace(catalog, remarks=(*catalog.remarks, text))


def open_eval_sets(config: RunConfig, display: Display, own: Callable[[], Catalog]) -> tuple[EvalSet, ...]:
    """What a run is tested on: what `evaluation.tests` names or, without any, the test classes of its own images.

    Args:
        config: the run's.
        display: for progress.
        own: gives the catalog of the run's own images; asked only if it is needed.

    Raises:
        DataError: images that are not there, or without a test split.
    """
    if not config.evaluation.tests:
        catalog = own()
        return (_eval_set(config, config.data.source, catalog, "test"),) if "test" in catalog.splits else ()
    with translate_arguments({name: f"the {name} in evaluation.tests" for name in ("root", "distractors")}):
        return tuple(open_eval_set(config, test, display, own) for test in config.evaluation.tests)


def open_eval_set(config: RunConfig, test: TestConfig, display: Display, own: Callable[[], Catalog]) -> EvalSet:
    """What one test names. Where that is the run's own source, it is the test classes: the others are trained on."""
    test = _absolute(test)
    on_missing = test.on_missing or config.data.on_missing
    catalog = own() if _is_own(config, test) else _open_other(config, test, display)
    distractors = None
    if test.distractors is not None:
        with (
            display.task("opening the distractors", "images") as progress,
            translate_arguments({"root": "`distractors`"}),
        ):
            distractors = open_catalog("r1m", root=test.distractors, on_missing=on_missing, progress=progress)
        distractors = _with_remark(distractors, len(distractors.missing))
    return replace(_eval_set(config, test.source, catalog, "test", distractors), on_missing=on_missing)


def _is_own(config: RunConfig, test: TestConfig) -> bool:
    return test.source == config.data.source and test.root in (None, config.data.root)


def open_validation(config: RunConfig, display: Display, own: Catalog) -> EvalSet | None:
    """What chooses the best epoch: what `data.validation_source` names, or the validation split of its own images."""
    other = config.data.validation_source
    if other is None:
        return _eval_set(config, config.data.source, own, "validation") if "validation" in own.splits else None
    with translate_arguments({"root": "data.validation_source.root"}):
        catalog = _open_other(config, other, display)
    return _eval_set(config, other.source, catalog, "validation" if "validation" in catalog.splits else "test")


def _eval_set(
    config: RunConfig, source: str, catalog: Catalog, split: str, distractors: Catalog | None = None
) -> EvalSet:
    if distractors is not None and not catalog.judgements:
        raise ConfigError(
            f"{catalog.name} cannot be tested with distractors: they go with judged queries, as of roxford5k."
        )
    return EvalSet(catalog.split(split), reported_k(config, source), distractors)


def reported_k(config: RunConfig, source: str) -> tuple[int, ...]:
    """The cut-offs to report for a source: the config's, or the benchmark's own."""
    benchmark = BENCHMARKS.get(source)
    return config.evaluation.k or (benchmark and benchmark.k) or K


def _open_other(config: RunConfig, test: TestConfig, display: Display) -> Catalog:
    """Images that are none of the training's; where they have no splits, all of them are the test."""
    known = [each.root for each in config.evaluation.tests if each.source == test.source]
    root = next(filter(None, [test.root, *known]), config.data.root if test.source in BENCHMARKS else None)
    other = {"source": test.source, "root": root, "train_share": 0.0}
    if test.on_missing is not None:
        other["on_missing"] = test.on_missing
    return open_images(config.model_copy(update={"data": config.data.model_copy(update=other)}), display).catalog


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config of a run that can be gone on with and evaluated from any folder."""
    data, model, evaluation = config.data, config.model, config.evaluation
    file = Path(model.weights or "none").expanduser()
    own = file.is_file() or (file / "embedder.json").is_file()
    validation = data.validation_source and _absolute(data.validation_source)
    changes = {
        "data": _absolute(data).model_copy(update={"validation_source": validation}),
        "model": model.model_copy(update={"weights": str(file.absolute()) if own else model.weights}),
        "evaluation": evaluation.model_copy(update={"tests": tuple(map(_absolute, evaluation.tests))}),
    }
    return config.model_copy(update=changes)


def _absolute(named: Source) -> Source:
    source = Path(named.source).expanduser()
    paths: dict[str, Any] = {
        name: place.expanduser().absolute()
        for name in ("root", "distractors")
        if (place := getattr(named, name, None)) is not None
    }
    if named.source not in BENCHMARKS and source.exists():
        paths["source"] = str(source.absolute())
    return named.model_copy(update=paths)
