"""Open any source of images: from a benchmark's name, a folder, a table or an image file to a catalog."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from shortlist.data.benchmarks import BENCHMARKS
from shortlist.data.catalog import SPLITS, Catalog
from shortlist.data.folders import class_folder_catalog, nested_folder_catalog, single_image_catalog
from shortlist.data.missing_files import check_on_missing, without_missing
from shortlist.data.splits import open_set_split
from shortlist.data.tables import TABLE_EXTENSIONS, table_catalog
from shortlist.errors import ConfigError, DataError, check_known, did_you_mean
from shortlist.locations import absolute_path, as_path, as_url, is_remote, remote_kind
from shortlist.progress import Progress

Labels = Literal["required", "optional"]
_KINDS: dict[Labels, str] = {
    "required": "a benchmark's name, a folder with one sub-folder per class, or a .csv or .parquet file",
    "optional": "a benchmark's name, a folder, a .csv or .parquet file, or an image file",
}


def open_catalog(
    source: str | Path,
    *,
    root: str | Path | None = None,
    labels: Labels = "required",
    on_missing: str = "error",
    train_share: float = 0.5,
    split_seed: int | None = None,
    label_separator: str | None = None,
    progress: Progress | None = None,
) -> Catalog:
    """Open a benchmark, a folder, or a CSV or Parquet file as a catalog.

    Args:
        source: Name of a benchmark, a path, or a URL that fsspec opens, such as s3://BUCKET/FOLDER. A string that is
            both a name and a path is the benchmark; write ./NAME for the folder.
        root: For a benchmark, the folder that contains it; for a table, the folder that its paths are relative to.
        labels: "required", for training and evaluation: every image has a label, a folder has one sub-folder per class,
            files are checked to exist, and a source without splits is split by class. "optional", for embedding and
            search: a folder may have any depth, a table needs no labels, `source` may be a single image file, images
            without a label belong to the class `UNLABELLED`, no splits are assigned, and the files of a folder or
            table are not checked until they are read.
        on_missing: "error", or "skip" to leave out files that do not exist and record them in `Catalog.missing`.
        train_share: Share of the classes that are used for training, if the source has no splits.
        split_seed: None assigns classes to the training split in order of their names; an integer shuffles them first.
        label_separator: Separator of several labels of an image in a table, such as "|". None: one label per image.
        progress: Callback that is called with (done, total) while a benchmark is unpacked or rendered.

    Raises:
        DataError: If the source does not exist, has no images, or does not have the expected layout.
        ConfigError: If an argument is invalid.
    """
    check_on_missing(on_missing)
    check_label_separator(label_separator)
    path = as_path(source)
    folder = None if root is None else as_path(root)
    try:
        if isinstance(source, str) and source in BENCHMARKS:
            return BENCHMARKS[source].load(folder, on_missing, progress)
        exists, is_dir, is_file = _kind(path)
        if path.suffix.lower() in TABLE_EXTENSIONS and is_file:
            if labels == "optional":
                return table_catalog(path, folder, labels_required=False, label_separator=label_separator)
            catalog = without_missing(table_catalog(path, folder, label_separator=label_separator), on_missing)
        elif exists and folder is not None:
            raise ConfigError(f"`root` has no effect for {path}: use it with a benchmark's name or a table.")
        elif labels == "optional" and exists:
            return nested_folder_catalog(path) if is_dir else single_image_catalog(path)
        elif is_dir:
            catalog = class_folder_catalog(path, on_missing)
        else:
            raise _unknown_source(str(source), path, _KINDS[labels])
    except OSError as error:  # such as a missing permission or a disconnected network drive
        raise DataError(f"Cannot open {source}: {error.strerror} ({error.filename}).") from error
    return catalog if catalog.splits.all() else open_set_split(catalog, train_share, split_seed)


def open_collection(
    source: str | Path,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    label_separator: str | None = None,
    progress: Progress | None = None,
) -> Catalog:
    """Open images to embed or search, with or without labels: `open_catalog(source, labels="optional")`.

    Args:
        source: Name of a benchmark, a folder of any depth, a CSV or Parquet file, or an image file.
        root: As in `open_catalog`.
        split: Return only the images of this split.
        label_separator: As in `open_catalog`.
        progress: As in `open_catalog`.

    Raises:
        DataError: If the source does not exist, or has no images.
        ConfigError: If an argument is invalid.
    """
    if split is not None:
        check_known("split", split, SPLITS)
    catalog = open_catalog(
        source, root=root, labels="optional", on_missing="skip", label_separator=label_separator, progress=progress
    )
    return catalog if split is None else catalog.split(split)


def check_label_separator(separator: str | None) -> None:
    """Check that a separator of labels is not empty.

    Raises:
        ConfigError: If it is empty.
    """
    if separator == "":
        raise ConfigError(
            '`label_separator` is empty: give a separator such as "|", or omit it for one label per image.'
        )


def check_source(source: str | Path, root: str | Path | None = None) -> None:
    """Check that a source exists without opening it, to fail before long-running work. See `open_catalog`.

    Raises:
        DataError: If it does not exist.
    """
    if isinstance(source, str) and source in BENCHMARKS:
        BENCHMARKS[source].check_root(None if root is None else as_path(root))
    elif not _kind(as_path(source))[0]:
        raise _unknown_source(str(source), as_path(source), _KINDS["required"])


def _kind(path: Path) -> tuple[bool, bool, bool]:
    """Return whether a path exists, is a folder, and is a file."""
    if not is_remote(path):
        return path.exists(), path.is_dir(), path.is_file()
    kind = remote_kind(path)
    return kind is not None, kind == "directory", kind == "file"


def _unknown_source(source: str, path: Path, kinds: str) -> DataError:
    if is_remote(path):
        return DataError(f"{as_url(path)} does not exist, or cannot be opened as images; expected {kinds}.")
    if path.exists():
        return DataError(f"{path} cannot be opened as images; expected {kinds}.")
    if os.sep in source or "/" in source or path.suffix:
        return DataError(f"{absolute_path(path)} does not exist; expected {kinds}.")
    where = f"the folder {source!r} does not exist, and no benchmark has this name"
    return DataError(f"Unknown source {source!r}: {where}; {did_you_mean(source, BENCHMARKS)} (expected {kinds}).")
