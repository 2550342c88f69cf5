"""Catalogs of CSV and Parquet files with the columns path and label, and optionally split and role."""

from __future__ import annotations

import csv
import io
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shortlist.data.catalog import ROLES, SPLITS, Catalog
from shortlist.errors import DataError, did_you_mean, shorten_list
from shortlist.extras import extra
from shortlist.files import atomic_replace
from shortlist.locations import absolute_path, as_path, is_remote, open_binary, size_and_mtime

TABLE_EXTENSIONS = (".csv", ".parquet")
REQUIRED, OPTIONAL = ("path", "label"), ("split", "role")


@dataclass(frozen=True)
class _Table:
    """Known columns of a table, with the information that error messages need."""

    file: Path
    columns: dict[str, list[str]]
    row_numbers: Sequence[int]  # number of each row, as messages give it
    row_word: str  # "line" or "row"

    def error(self, index: int, problem: str) -> DataError:
        return DataError(f"{self.file}, {self.row_word} {self.row_numbers[index]}: {problem}")


def table_catalog(file: Path, root: Path | None = None, *, unlabelled: str | None = None) -> Catalog:
    """Return the catalog of the images that a table lists, in the table's order.

    Other columns are ignored. The function does not check that the images exist.

    Args:
        file: CSV file with a header, or Parquet file.
        root: Folder that the paths are relative to. None means the folder of the table.
        unlabelled: Class name of images without a label. None means that every image needs a label.

    Raises:
        DataError: If the table cannot be read, lacks a column or has an invalid value; the message names the row.
    """
    required = REQUIRED if unlabelled is None else ("path",)
    size_and_mtime(file)  # removes an outdated copy of a remote table from the cache
    table = (_read_parquet if file.suffix.lower() == ".parquet" else _read_csv)(file, required)
    if not table.row_numbers:
        raise DataError(f"{file} has no rows; add one row per image")
    columns = table.columns
    for name in required:
        for index, value in enumerate(columns[name]):
            if not value:
                raise table.error(index, f"the {name} is empty")
    paths = [_normalised(path) for path in columns["path"]]
    if len(set(paths)) < len(paths):
        first: dict[str, int] = {}
        for index, path in enumerate(paths):
            if first.setdefault(path, index) != index:
                earlier = table.row_numbers[first[path]]
                raise table.error(index, f"{path} is already listed in {table.row_word} {earlier}")
    labelled = [label or unlabelled for label in columns.get("label", [""] * len(paths))]
    names, labels = np.unique(np.array(labelled, dtype=object), return_inverse=True)
    return Catalog(
        name=file.stem,
        root=file.parent if root is None else root,
        paths=np.array(paths, dtype=object),
        labels=labels,
        class_names=tuple(names.tolist()),
        splits=np.array(_splits(table)),
        roles=np.array(_roles(table)) if "role" in columns else None,
    )


def write_table(catalog: Catalog, file: Path) -> None:
    """Write the images of a catalog to a Parquet file, from which `table_catalog` reads them.

    Paths in the folder of the table are relative to it, so that both can be moved together; others are absolute.

    Raises:
        DataError: The catalog has boxes or judgements, for which a table has no columns.
    """
    if catalog.boxes is not None or catalog.judgements is not None or catalog.protocol is not None:
        raise DataError(f"a table cannot hold the boxes and judgements of {catalog.name}: give the source by its name")
    with extra("training", "Writing Parquet tables"):
        import pyarrow as pa  # imported here because it is slow to import
        import pyarrow.parquet as pq
    folder = absolute_path(file.parent)
    files = [absolute_path(catalog.file(index)) for index in range(len(catalog))]
    columns = {
        "path": [each.removeprefix(f"{folder}/") for each in files],
        "label": [catalog.class_names[label] for label in catalog.labels],
        "split": catalog.splits.tolist(),
        **({} if catalog.roles is None else {"role": catalog.roles.tolist()}),
    }
    with atomic_replace(file) as temporary:
        pq.write_table(pa.table(columns), temporary)


def _normalised(path: str) -> str:
    if is_remote(path):
        return str(as_path(path)) if path.startswith("file:") else path
    return path if "./" not in path and "//" not in path else posixpath.normpath(path)


def _splits(table: _Table) -> list[str]:
    """Return the split of each row; either all rows have one, or none has."""
    values = table.columns.get("split", [""] * len(table.row_numbers))
    splits = ["validation" if value == "val" else value for value in values]
    _check_values(table, "split", splits, SPLITS)
    if any(splits) and not all(splits):
        number = splits.count("")
        raise table.error(
            splits.index(""),
            f"the split is empty, but other rows have one ({number} such rows); fill in all splits or none",
        )
    return splits


def _roles(table: _Table) -> list[str]:
    _check_values(table, "role", table.columns["role"], ROLES)
    return table.columns["role"]


def _check_values(table: _Table, column: str, values: list[str], known: tuple[str, ...]) -> None:
    if unknown := set(values) - set(known) - {""}:
        index = next(index for index, value in enumerate(values) if value in unknown)
        hint = did_you_mean(values[index], known)
        raise table.error(index, f"{column} {values[index]!r} is not one of {', '.join(known)}; {hint}")


def _read_csv(file: Path, required: tuple[str, ...]) -> _Table:
    try:
        with io.TextIOWrapper(open_binary(file), encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines)
            header = [name.strip() for name in next(reader, [])]
            positions = _column_positions(file, header, required)
            columns: dict[str, list[str]] = {name: [] for name in positions}
            line_numbers: list[int] = []
            for values in reader:
                if not values:
                    continue
                if len(values) != len(header):
                    raise DataError(f"{file}, line {reader.line_num}: {len(values)} values for {len(header)} columns")
                line_numbers.append(reader.line_num)
                for name, position in positions.items():
                    columns[name].append(values[position].strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {file} as a CSV file in UTF-8: {error}") from error
    return _Table(file, columns, line_numbers, "line")


def _read_parquet(file: Path, required: tuple[str, ...]) -> _Table:
    with extra("training", "Reading Parquet tables"):
        import pyarrow as pa  # imported here because it is slow to import
        import pyarrow.parquet as pq
    try:
        with open_binary(file) as opened:
            content = pq.ParquetFile(opened)
            positions = _column_positions(file, content.schema_arrow.names, required)
            table = content.read(columns=list(positions))
        columns = {name: ["" if v is None else str(v) for v in table.column(name).to_pylist()] for name in positions}
    except (OSError, UnicodeDecodeError, OverflowError, pa.ArrowException) as error:
        raise DataError(f"cannot read {file} as a Parquet file: {error}") from error
    return _Table(file, columns, range(1, table.num_rows + 1), "row")


def _column_positions(file: Path, header: list[str], required: tuple[str, ...]) -> dict[str, int]:
    """Return the position of each known column in the header."""
    missing = [name for name in required if name not in header]
    if missing:
        if len(header) == 1 and any(separator in header[0] for separator in ";\t|"):
            raise DataError(f"{file} is not separated by commas: its first line is {header[0]!r}; write path,label")
        found = shorten_list(header, 10) or "none"
        raise DataError(f"{file} has no column {shorten_list(missing)}; its columns: {found}")
    repeated = [name for name in (*REQUIRED, *OPTIONAL) if header.count(name) > 1]
    if repeated:
        raise DataError(f"{file} has the column {repeated[0]} more than once")
    return {name: header.index(name) for name in (*REQUIRED, *OPTIONAL) if name in header}
