"""From what a user says (a benchmark's name, a folder, a table) to a catalog."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shortlist.data.benchmarks import BENCHMARKS
from shortlist.data.catalog import Catalog
from shortlist.data.folders import folder_catalog
from shortlist.data.presence import check_on_missing, without_missing
from shortlist.data.splits import open_set_split
from shortlist.data.tables import table_catalog
from shortlist.errors import ConfigError, DataError, did_you_mean


def open_catalog(
    source: str | Path,
    *,
    root: str | Path | None = None,
    on_missing: str = "error",
    train_share: float = 0.5,
    split_seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Catalog:
    """The catalog of a benchmark, a folder with one sub-folder a class, or a CSV or Parquet file.

    Args:
        source: a benchmark's name, or a path. A name that is both is the benchmark; write ./NAME for the folder.
        root: for a benchmark, the folder it lies in; for a table, the folder its paths are relative to.
        on_missing: "error", or "skip" to leave out files that are not there (recorded in `Catalog.missing`).
        train_share: share of the classes that train, where the source has no splits.
        split_seed: None takes those classes by name, a number shuffles them first.
        progress: called with (done, total) where a benchmark has to be unpacked first.

    Raises:
        DataError: there is no such source, or it is not what it should be.
    """
    check_on_missing(on_missing)
    place = None if root is None else Path(root).expanduser()
    try:
        if isinstance(source, str) and source in BENCHMARKS:
            return BENCHMARKS[source].load(place, on_missing, progress)
        catalog = _open(source, Path(source).expanduser(), place, on_missing)
    except OSError as error:  # no permission, a network drive that went away, ...
        raise DataError(f"cannot open {source}: {error.strerror} ({error.filename})") from error
    return catalog if catalog.splits.all() else open_set_split(catalog, train_share, split_seed)


def _open(source: str | Path, path: Path, root: Path | None, on_missing: str) -> Catalog:
    if path.is_dir():
        if root is not None:
            raise ConfigError(f"`root` has no meaning for a folder: the images of {path} are in it")
        return folder_catalog(path, on_missing)
    if path.suffix.lower() in (".csv", ".parquet") and path.is_file():
        return without_missing(table_catalog(path, root), on_missing)
    raise _unknown(str(source), path)


def _unknown(source: str, path: Path) -> DataError:
    kinds = "a benchmark, a folder with one sub-folder a class, or a .csv or .parquet file"
    if path.exists():
        return DataError(f"{path} is none of these: {kinds}")
    if os.sep in source or "/" in source or path.suffix.lower() in (".csv", ".parquet"):
        return DataError(f"there is no {path.absolute()}; a source is {kinds}")
    return DataError(f"unknown source {source!r}, {did_you_mean(source, BENCHMARKS)} (a source is {kinds})")
