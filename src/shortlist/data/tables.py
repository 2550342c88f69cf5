"""Catalogs of CSV and Parquet files with the columns path and label, and optionally split, role and others."""

from __future__ import annotations

import csv
import io
import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shortlist.data.catalog import ROLES, SPLITS, Catalog, object_array
from shortlist.data.folders import UNLABELLED
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
    label_lists: list[list[str]] | None  # the labels of each row, if a row can have several
    fields: dict[str, list[Any]]  # other columns
    row_numbers: Sequence[int]  # number of each row, as messages give it
    row_word: str  # "line" or "row"

    def error(self, index: int, problem: str) -> DataError:
        return DataError(f"{self.file}, {self.row_word} {self.row_numbers[index]}: {problem}")


def table_catalog(
    file: Path, root: Path | None = None, *, labels_required: bool = True, label_separator: str | None = None
) -> Catalog:
    """Return the catalog of the images that a table lists, in the table's order.

    Other columns of numbers or texts become the `fields` of the catalog. An image can have several labels if the label
    column of a Parquet file contains lists, or with `label_separator`. The images need not exist.

    Args:
        file: CSV file with a header, or Parquet file.
        root: Folder that the paths are relative to. None means the folder of the table.
        labels_required: Whether every image needs a label. Otherwise, images without one have the class `UNLABELLED`.
        label_separator: Separator of several labels of an image, such as "|". None means one label per image.

    Raises:
        DataError: If the table cannot be read, lacks a column or has an invalid value; the message names the row.
    """
    required = REQUIRED if labels_required else ("path",)
    size_and_mtime(file)  # removes an outdated copy of a remote table from the cache
    table = (_read_parquet if file.suffix.lower() == ".parquet" else _read_csv)(file, required)
    if label_separator and table.label_lists is None and "label" in table.columns:
        table = replace(table, label_lists=[each.split(label_separator) for each in table.columns["label"]])
    if not table.row_numbers:
        raise DataError(f"{file} has no rows; add one row per image.")
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
    return Catalog.from_classes(
        file.stem,
        file.parent if root is None else root,
        paths,
        _classes(table, labels_required),
        _splits(table),
        roles=_roles(table) if "role" in columns else None,
        fields={name: object_array(values) for name, values in table.fields.items()} or None,
    )


def _classes(table: _Table, labels_required: bool) -> list[tuple[str, ...]]:
    """Return all classes of each row."""
    if table.label_lists is None:
        return [(label,) for label in table.columns.get("label", [UNLABELLED] * len(table.row_numbers))]
    classes = []
    for index, given in enumerate(table.label_lists):
        distinct = tuple(dict.fromkeys(label for each in given if (label := each.strip())))
        if not distinct and labels_required:
            raise table.error(index, "the label is empty")
        if any("\n" in label for label in distinct):
            raise table.error(index, "one of several labels has a line break; remove it")
        classes.append(distinct or (UNLABELLED,))
    return classes


def write_table(catalog: Catalog, file: Path) -> None:
    """Write the images of a catalog to a Parquet file for `table_catalog`.

    Paths in the folder of the table are relative to it, so that both can be moved together; others are absolute.

    Raises:
        DataError: The catalog has boxes or judgements, for which a table has no columns.
    """
    if catalog.boxes is not None or catalog.judgements is not None or catalog.protocol is not None:
        raise DataError(f"A table cannot store the boxes and judgements of {catalog.name}: give the source by name.")
    with extra("training", "Writing Parquet tables"):
        import pyarrow as pa  # imported here because it is slow to import
        import pyarrow.parquet as pq
    folder = absolute_path(file.parent)
    files = [absolute_path(catalog.file(index)) for index in range(len(catalog))]
    columns = {
        "path": [each.removeprefix(f"{folder}/") for each in files],
        "label": [catalog.class_names[label] for label in catalog.labels]
        if catalog.label_sets is None
        else [list(catalog.label_names(index)) for index in range(len(catalog))],
        "split": catalog.splits.tolist(),
        **({} if catalog.roles is None else {"role": catalog.roles.tolist()}),
    }
    with atomic_replace(file) as temporary:
        pq.write_table(pa.table(columns), temporary, write_page_checksum=True)


def _normalised(path: str) -> str:
    if is_remote(path):
        return str(as_path(path)) if path.startswith("file:") else path
    return path if "./" not in path and "//" not in path else posixpath.normpath(path)


def _splits(table: _Table) -> list[str]:
    """Return the split of each row. Either all rows have a split, or none."""
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
            others = {name: place for place, name in enumerate(header) if name and name not in positions}
            columns: dict[str, list[str]] = {name: [] for name in (*positions, *others)}
            line_numbers: list[int] = []
            for values in reader:
                if not values:
                    continue
                if len(values) != len(header):
                    raise DataError(f"{file}, line {reader.line_num}: {len(values)} values for {len(header)} columns.")
                line_numbers.append(reader.line_num)
                for name, position in (*positions.items(), *others.items()):
                    columns[name].append(values[position].strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Cannot read {file} as a CSV file in UTF-8: {error}") from error
    fields = {name: columns.pop(name) for name in others}
    return _Table(file, columns, None, fields, line_numbers, "line")


def _read_parquet(file: Path, required: tuple[str, ...]) -> _Table:
    with extra("training", "Reading Parquet tables"):
        import pyarrow as pa  # imported here because it is slow to import
        import pyarrow.parquet as pq
    try:
        with open_binary(file) as opened:
            content = pq.ParquetFile(opened, page_checksum_verification=True)
            positions = _column_positions(file, content.schema_arrow.names, required)
            ignored = pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary
            others = [
                each.name
                for each in content.schema_arrow
                if each.name not in positions and not any(is_kind(each.type) for is_kind in ignored)
            ]
            table = content.read(columns=[*positions, *others])
        values = {name: table.column(name).to_pylist() for name in (*positions, *others)}
    except (OSError, UnicodeDecodeError, OverflowError, pa.ArrowException) as error:
        raise DataError(f"Cannot read {file} as a Parquet file: {error}") from error
    fields = {name: [_plain(each) for each in values.pop(name)] for name in others}
    label_lists = None
    if "label" in values and pa.types.is_nested(table.schema.field("label").type):
        label_lists = [["" if each is None else str(each) for each in given or ()] for given in values["label"]]
    columns = {name: ["" if each is None else str(each) for each in column] for name, column in values.items()}
    return _Table(file, columns, label_lists, fields, range(1, table.num_rows + 1), "row")


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent: numbers and texts as they are, others as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _column_positions(file: Path, header: list[str], required: tuple[str, ...]) -> dict[str, int]:
    """Return the position of each known column in the header."""
    missing = [name for name in required if name not in header]
    if missing:
        if len(header) == 1 and any(separator in header[0] for separator in ";\t|"):
            raise DataError(
                f"{file} is not separated by commas: its first line is {header[0]!r}; write the header path,label."
            )
        found = shorten_list(header, 10) or "none"
        raise DataError(f"{file} has no column {shorten_list(missing)}; its columns: {found}.")
    repeated = [name for name in (*REQUIRED, *OPTIONAL) if header.count(name) > 1]
    if repeated:
        raise DataError(f"{file} has the column {repeated[0]} more than once.")
    return {name: header.index(name) for name in (*REQUIRED, *OPTIONAL) if name in header}
