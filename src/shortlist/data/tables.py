"""A CSV or Parquet file with the columns path, label and, where given, split and role."""

from __future__ import annotations

import csv
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shortlist.data.catalog import ROLES, SPLITS, Catalog
from shortlist.data.presence import some
from shortlist.errors import DataError, did_you_mean
from shortlist.extras import extra

REQUIRED, OPTIONAL = ("path", "label"), ("split", "role")


@dataclass(frozen=True)
class _Table:
    file: Path
    columns: dict[str, list[str]]  # the known ones that it has
    rows: Sequence[int]  # what a message calls each row
    row: str  # "line" or "row"

    def fail(self, index: int, what: str) -> DataError:
        return DataError(f"{self.file}, {self.row} {self.rows[index]}: {what}")


def table_catalog(file: Path, root: Path | None = None, *, unlabelled: str | None = None) -> Catalog:
    """The images that a table lists, in its order. Paths are relative to `root`, or else to the table's folder.

    Whether the files exist is not looked at here. Other columns do not matter.

    Args:
        file: the table.
        root: a folder.
        unlabelled: the class of images without a label; None where each needs one.

    Raises:
        DataError: the table cannot be read, lacks a column or has a bad value; names the row.
    """
    required = REQUIRED if unlabelled is None else ("path",)
    table = (_read_parquet if file.suffix.lower() == ".parquet" else _read_csv)(file, required)
    if not table.rows:
        raise DataError(f"{file} has no rows: each image needs one")
    columns = table.columns
    for name in required:
        for index, value in enumerate(columns[name]):
            if not value:
                raise table.fail(index, f"the {name} is empty")
    paths = [path if "./" not in path and "//" not in path else posixpath.normpath(path) for path in columns["path"]]
    if len(set(paths)) < len(paths):
        first: dict[str, int] = {}
        for index, path in enumerate(paths):
            if first.setdefault(path, index) != index:
                raise table.fail(index, f"{path} is listed before, in {table.row} {table.rows[first[path]]}")
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


def _splits(table: _Table) -> list[str]:
    """The split of each row: all of them or none."""
    splits = ["validation" if value == "val" else value for value in table.columns.get("split", [""] * len(table.rows))]
    _check_values(table, "split", splits, SPLITS)
    if any(splits) and not all(splits):
        number = splits.count("")
        raise table.fail(
            splits.index(""),
            f"no split, while other rows have one ({number} such rows); give each row one, or none any",
        )
    return splits


def _roles(table: _Table) -> list[str]:
    _check_values(table, "role", table.columns["role"], ROLES)
    return table.columns["role"]


def _check_values(table: _Table, column: str, values: list[str], known: tuple[str, ...]) -> None:
    if unknown := set(values) - set(known) - {""}:
        index = next(index for index, value in enumerate(values) if value in unknown)
        near = did_you_mean(values[index], known)
        raise table.fail(index, f"{column} {values[index]!r} is not one of {', '.join(known)}; {near}")


def _read_csv(file: Path, required: tuple[str, ...]) -> _Table:
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            header = [name.strip() for name in next(reader, [])]
            where = _positions(file, header, required)
            columns: dict[str, list[str]] = {name: [] for name in where}
            rows: list[int] = []
            for values in reader:
                if not values:
                    continue
                if len(values) != len(header):
                    raise DataError(f"{file}, line {reader.line_num}: {len(values)} values for {len(header)} columns")
                rows.append(reader.line_num)
                for name, position in where.items():
                    columns[name].append(values[position].strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {file} as a CSV file in UTF-8: {error}") from error
    return _Table(file, columns, rows, "line")


def _read_parquet(file: Path, required: tuple[str, ...]) -> _Table:
    with extra("training", "A table in Parquet"):
        import pyarrow as pa  # here, because it takes a while to import
        import pyarrow.parquet as pq
    try:
        names = pq.read_schema(file).names
        where = _positions(file, names, required)
        read = pq.read_table(file, columns=list(where))
        columns = {name: ["" if v is None else str(v) for v in read.column(name).to_pylist()] for name in where}
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {file} as a Parquet file: {error}") from error
    return _Table(file, columns, range(1, read.num_rows + 1), "row")


def _positions(file: Path, header: list[str], required: tuple[str, ...]) -> dict[str, int]:
    """Where each known column is."""
    missing = [name for name in required if name not in header]
    if missing:
        if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
            raise DataError(f"{file} is not separated by commas: its first line is {header[0]!r}; write path,label")
        raise DataError(f"{file} has no column {some(missing)}; its columns: {some(header, 10) or 'none'}")
    twice = [name for name in (*REQUIRED, *OPTIONAL) if header.count(name) > 1]
    if twice:
        raise DataError(f"{file} has the column {twice[0]} more than once")
    return {name: header.index(name) for name in (*REQUIRED, *OPTIONAL) if name in header}
