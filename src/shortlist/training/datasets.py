"""Open the images that a configuration names, for training, validation and tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.config.schema import DataConfig, TestConfig
from shortlist.data import BENCHMARKS, Catalog, half_validation, open_catalog
from shortlist.data.inspection import find_unreadable
from shortlist.data.sources import check_source
from shortlist.encoding.feature_cache import image_keys
from shortlist.errors import ConfigError, DataError, translate_arguments
from shortlist.evaluation import Evaluation
from shortlist.evaluation.protocols import DEFAULT_K
from shortlist.locations import absolute_path
from shortlist.progress import Display
from shortlist.training.folder import RunFolder, read_unreadable, write_unreadable

EXAMPLE = "images"  # data.source in the recipes for the user's own images
Source = TypeVar("Source", DataConfig, TestConfig)


class OpenedImages(NamedTuple):
    """A catalog, and the unreadable images that were left out of it."""

    catalog: Catalog
    unreadable: list[tuple[str, str]]  # paths and reasons


@dataclass(frozen=True)
class EvalImages:
    """Which images to evaluate a model on; by default, the test sets of the configuration of a run.

    Args:
        data: Images to use instead of the test sets of a run: the test images, or all images if there are no splits.
        root: Root of `data`, as in `open_catalog`.
        distractors: Folder of R1M, whose images are added to the gallery of `data`. For runs only.
        on_missing: "error" or "skip", for missing images. Default: the setting of the run, or "error".
        label_separator: Separator of several labels of an image in `data`, a table. Default: that of the run, or one
            label per image.
    """

    data: str | Path | Catalog | None = None
    root: Path | str | None = None
    distractors: Path | str | None = None
    on_missing: str | None = None
    label_separator: str | None = None


@dataclass(frozen=True)
class EvalSet:
    """Images that an embedder is evaluated on.

    Args:
        catalog: Queries and gallery. Its name is the key of its results in `paper` and `measured`.
        k: Values of k to report.
        distractors: Additional gallery images; metrics are computed both without and with them.
        on_missing: What to do with distractors that cannot be read, `error` or `skip`.
        whole: Whether these are all images of the user's own source, which then has no training images.
    """

    catalog: Catalog
    k: tuple[int, ...]
    distractors: Catalog | None = None
    on_missing: str = "error"
    whole: bool = False

    @property
    def name(self) -> str:
        """Name of the catalog."""
        return self.catalog.name

    def with_split_name(self, measured: Evaluation) -> Evaluation:
        """Return an evaluation on these images, with the split "all" if they are not a part of their source."""
        return replace(measured, split="all") if self.whole else measured

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the images for the user, such as how many were left out."""
        return self.catalog.remarks + (() if self.distractors is None else self.distractors.remarks)


def open_images(config: RunConfig, display: Display, folder: RunFolder | None = None) -> OpenedImages:
    """Open the catalog that `data` names, without unreadable images if `data.on_missing` is `skip`.

    With `data.withhold_test`, the catalog has no test images, so that no result can depend on them.

    Args:
        config: Configuration of the run.
        display: Display for progress.
        folder: Folder of the run, where the list of unreadable images is kept so that it is determined only once.
    """
    data, catalog = config.data, _list_images(config, display)
    if data.on_missing == "error":
        return OpenedImages(catalog, [])
    lists = [] if folder is None else [folder.unreadable_file]
    if data.view_cache is not None:  # runs that share features also share this list
        digest = hashlib.sha256("".join(image_keys(catalog)).encode()).hexdigest()
        lists.append(data.view_cache / f"unreadable-{digest[:16]}.json")
    return _without_unreadable(catalog, lists, display)


def open_labelled(images: EvalImages, display: Display) -> Catalog:
    """Open images other than those of a run; if they define no splits, all of them are test images."""
    assert images.data is not None
    if isinstance(images.data, Catalog):
        return images.data
    on_missing = images.on_missing or "error"
    with display.task(f"opening {images.data}", "images") as progress:
        catalog = open_catalog(
            images.data,
            root=images.root,
            on_missing=on_missing,
            train_share=0,
            label_separator=images.label_separator,
            progress=progress,
        )
    return catalog if on_missing == "error" else _without_unreadable(catalog, [], display).catalog


def _list_images(config: RunConfig, display: Display) -> Catalog:
    """Open the catalog that `data` names, with unreadable images."""
    data = config.data
    _check_given(data)
    with display.task(f"opening {data.source}", "images") as progress:
        catalog = open_catalog(
            data.source,
            root=data.root,
            on_missing=data.on_missing,
            train_share=data.train_share,
            split_seed=data.split_seed,
            label_separator=data.label_separator,
            progress=progress,
        )
    return catalog.subset(catalog.splits != "test") if data.withhold_test else catalog


def _without_unreadable(catalog: Catalog, lists: list[Path], display: Display) -> OpenedImages:
    """Leave out unreadable images, and add a remark on these and on missing images; see `_find_unreadable`."""
    unreadable = _find_unreadable(catalog, lists, display)
    left_out = {path for path, _ in unreadable}
    left = catalog.subset([path not in left_out for path in catalog.paths])
    return OpenedImages(_with_left_out_remark(left, len(catalog.missing), len(unreadable)), unreadable)


def _find_unreadable(catalog: Catalog, lists: list[Path], display: Display) -> list[tuple[str, str]]:
    """Read the unreadable images, with reasons, from the first list that exists, or check all; write all lists."""
    known = next((file for file in lists if file.exists()), None)
    if known is not None:
        unreadable = read_unreadable(known)
    else:
        with display.task("checking for unreadable images", "images") as progress:
            unreadable = find_unreadable(catalog, progress=progress)
    for file in lists:
        if not file.exists():
            write_unreadable(file, unreadable)
    return unreadable


def open_run_images(config: RunConfig, display: Display, folder: RunFolder | None = None) -> OpenedImages:
    """Open the images of a run with its training, validation and test splits.

    Raises:
        ImagesChangedError: The images are not those that the run in `folder` started with.
    """
    opened, unreadable = open_images(config, display, folder)
    catalog = _split(config, opened)
    if folder is not None:
        folder.check_images(catalog.fingerprint())
    return OpenedImages(catalog, unreadable)


@translate_arguments(CONFIG_KEYS)
def list_run_images(config: RunConfig, display: Display) -> Catalog:
    """List the images of a run with their splits, without checking whether they are readable."""
    return _split(config, _list_images(config, display))


def _split(config: RunConfig, catalog: Catalog) -> Catalog:
    """Hold out classes for validation, if the configuration requires it."""
    return half_validation(catalog) if config.data.validation == "half" else catalog


def _with_left_out_remark(catalog: Catalog, missing: int, unreadable: int = 0) -> Catalog:
    """Add a remark on the number of images that were left out."""
    if not missing and not unreadable:
        return catalog
    text = f"{catalog.name}: left out {missing} missing and {unreadable} unreadable images (on_missing=skip)"
    return replace(catalog, remarks=(*catalog.remarks, text))


def open_eval_sets(config: RunConfig, display: Display, own: Callable[[], Catalog]) -> tuple[EvalSet, ...]:
    """Open the test sets of a run: those in `evaluation.tests`, or by default the test classes of its own images.

    Args:
        config: Configuration of the run.
        display: Display for progress.
        own: Function that returns the catalog of the run's own images. It is called only if they are needed.

    Raises:
        DataError: Images are missing, or have no test split.
    """
    if not config.evaluation.tests:
        catalog = own()
        return (_eval_set(config, config.data.source, catalog, "test"),) if "test" in catalog.splits else ()
    with translate_arguments({name: f"the {name} in evaluation.tests" for name in ("root", "distractors")}):
        return tuple(open_eval_set(config, test, display, own) for test in config.evaluation.tests)


def open_eval_set(config: RunConfig, test: TestConfig, display: Display, own: Callable[[], Catalog]) -> EvalSet:
    """Open one test set. If it is the run's own source, only the test classes are used; see `open_eval_sets`."""
    test = _absolute(test)
    on_missing, is_own = test.on_missing or config.data.on_missing, _is_same_source(test, config.data)
    if is_own and test.label_separator not in (None, config.data.label_separator):
        raise ConfigError(
            f"`label_separator`: {test.source} contains the training images of the run, so it is always opened with "
            f"the separator of the run ({config.data.label_separator!r}). Omit it."
        )
    catalog = own() if is_own else _open_other(config, test, display)
    distractors = None
    if test.distractors is not None:
        with (
            display.task("opening the distractors", "images") as progress,
            translate_arguments({"root": "`distractors`"}),
        ):
            distractors = open_catalog("r1m", root=test.distractors, on_missing=on_missing, progress=progress)
        distractors = _with_left_out_remark(distractors, len(distractors.missing))
        if not catalog.judgements:
            raise ConfigError(
                f"{catalog.name} cannot be tested with distractors: they require judged queries, as in roxford5k."
            )
    eval_set = _eval_set(config, test.source, catalog, "test")
    return replace(eval_set, distractors=distractors, on_missing=on_missing)


def _is_same_source(test: TestConfig, other: DataConfig | TestConfig) -> bool:
    return test.source == other.source and test.root in (None, other.root)


def open_validation(config: RunConfig, display: Display, own: Catalog) -> EvalSet | None:
    """Open the images that select the best epoch: `data.validation_source`, or the validation split of `own`."""
    other = config.data.validation_source
    if other is None:
        return _eval_set(config, config.data.source, own, "validation") if "validation" in own.splits else None
    with translate_arguments({"root": "data.validation_source.root"}):
        catalog = _open_other(config, other, display)
    return _eval_set(config, other.source, catalog, "validation" if "validation" in catalog.splits else "test")


def check_validation_source(config: RunConfig, display: Display) -> None:
    """Check that `data.validation_source` contains no test images of the run.

    Raises:
        ConfigError: It does.
    """
    if config.data.validation_source is None:
        return
    other = _absolute(config.data.validation_source)
    own = _list_images(config.with_changes(data={"withhold_test": False, "on_missing": "skip"}), display)
    tests = _files(own, "test")
    for test in map(_absolute, config.evaluation.tests):
        if _is_same_source(test, other):
            tests |= _files(_open_other(config, test, display), "test")
    validation = open_validation(config, display, own)
    assert validation is not None
    images = _files(validation.catalog)
    if common := sorted(images & tests):
        raise ConfigError(
            f"data.validation_source={other.source} contains test images of this recipe ({len(common)} of its "
            f"{len(images)} images), such as {common[0]}. Use other images, or remove it to hold out training classes."
        )


def _files(catalog: Catalog, split: str | None = None) -> set[str]:
    """Return the paths of the images of a split, or of all images."""
    return {absolute_path(catalog.file(row)) for row in range(len(catalog)) if split in (None, catalog.splits[row])}


def _eval_set(config: RunConfig, source: str, catalog: Catalog, split: str) -> EvalSet:
    return EvalSet(catalog.split(split), reported_k(config, source), whole=is_whole(catalog))


def is_whole(catalog: Catalog) -> bool:
    """Return whether all images of the user's own source are test images."""
    return catalog.name not in BENCHMARKS and bool((catalog.splits == "test").all())


def reported_k(config: RunConfig, source: str) -> tuple[int, ...]:
    """Return the values of k to report for a source: those of the configuration, or of the benchmark."""
    benchmark = BENCHMARKS.get(source)
    return config.evaluation.k or (benchmark and benchmark.k) or DEFAULT_K


def _open_other(config: RunConfig, test: TestConfig, display: Display) -> Catalog:
    """Open images other than those of the run; if they define no splits, all of them are test images."""
    roots = [each.root for each in config.evaluation.tests if each.source == test.source]
    root = next(filter(None, [test.root, *roots]), config.data.root if test.source in BENCHMARKS else None)
    other = {"source": test.source, "root": root, "train_share": 0.0, "withhold_test": False}
    for name in ("on_missing", "label_separator"):
        if (value := getattr(test, name)) is not None:
            other[name] = value
    return open_images(config.with_changes(data=other), display).catalog


def _check_given(data: DataConfig) -> None:
    """Check that the user has set `data.source`, if the recipe has only an example of it."""
    if data.source == EXAMPLE and not Path(EXAMPLE).exists():
        raise DataError(
            f"The folder {EXAMPLE!r}, the default of this recipe, does not exist. Set data.source=FOLDER to "
            "a folder with one sub-folder per class, or to a .csv or .parquet file."
        )


def check_images_exist(config: RunConfig) -> None:
    """Check that the training images and the test images exist, without opening them.

    Raises:
        DataError: Images do not exist.
    """
    _check_given(config.data)
    check_source(config.data.source, config.data.root)
    with translate_arguments({"root": "the root in evaluation.tests"}):
        for test in config.evaluation.tests:
            check_source(test.source, test.root or config.data.root)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make all paths absolute, so that the run can be resumed and evaluated from any working directory."""
    weights, validation = config.model.weights, config.data.validation_source
    file = Path(weights or "none").expanduser()
    is_path = file.is_file() or (file / "embedder.json").is_file()
    return config.model_copy(update={"data": _absolute(config.data)}).with_changes(
        data={"validation_source": validation and _absolute(validation)},
        model={"weights": absolute_path(file) if is_path else weights},
        evaluation={"tests": tuple(map(_absolute, config.evaluation.tests))},
    )


def with_shared_views(config: RunConfig, folder: Path) -> RunConfig:
    """Make the runs of a study share one cache of features in its folder, unless the configuration names one."""
    if not config.frozen or config.data.view_cache is not None:
        return config
    return config.with_changes(data={"view_cache": folder / "views"})


def _absolute(named: Source) -> Source:
    source = Path(named.source).expanduser()
    paths: dict[str, Any] = {
        name: Path(absolute_path(path))
        for name in ("root", "distractors", "view_cache")
        if (path := getattr(named, name, None)) is not None
    }
    if named.source not in BENCHMARKS and source.exists():
        paths["source"] = absolute_path(source)
    return named.model_copy(update=paths)
