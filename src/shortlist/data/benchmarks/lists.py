"""Read the text and CSV files in which benchmarks list their images."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError
from shortlist.files import open_regular_file, read_regular_file

_LFS = "version https://git-lfs"


def read_lines(file: Path, name: str) -> list[str]:
    """Read the stripped lines of a list, without empty lines at the end of the file.

    The file may have a byte order mark, and the line endings of any system; the last line need not have one.

    Args:
        file: Text file in UTF-8.
        name: Name of the benchmark, for messages.

    Raises:
        DataError: If the file cannot be read, is empty, is not a text file, or is the result of a failed download.
    """
    try:
        text = read_regular_file(file, "utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{name}: there is no {file.name} in {file.parent}.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: {file} is not a text file: the download may have failed, or the file is compressed."
        ) from error
    except OSError as error:
        raise DataError(f"{name}: cannot read {file}: {error.strerror}.") from error
    check_text(file, name, text[:500])
    lines = [line.strip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{name}: {file} is empty; download it again.")
    return lines


def check_text(file: Path, name: str, start: str) -> None:
    """Check that a file is not the result of a failed download.

    Args:
        file: The file, for the message.
        name: Name of the benchmark, for the message.
        start: First characters of the file.

    Raises:
        DataError: If the file starts like a web page or a Git LFS pointer.
    """
    start = start.lstrip().lower()
    if start.startswith(("<!doctype", "<html", "<?xml", "<head")):
        raise DataError(f"{name}: {file} is a web page, not a list: the download failed; download it again.")
    if start.startswith(_LFS):
        raise DataError(f"{name}: {file} is a Git LFS pointer, not a list; download the file itself.")


def columns(file: Path, name: str, lines: Sequence[str], header: str, first_line: int = 1) -> list[tuple[str, ...]]:
    """Split lines at white space and return the columns.

    Args:
        file: The file, for messages.
        name: Name of the benchmark, for messages.
        lines: The lines that hold values.
        header: Names of the columns, separated by spaces. Every line must have one value per column.
        first_line: Line number of the first of these lines in the file.

    Raises:
        DataError: If there are no lines, or a line has a different number of values; the message names the line.
    """
    if not lines:
        raise DataError(f"{name}: {file} lists no images; download it again.")
    rows = [line.split() for line in lines]
    number = len(header.split())
    for index, row in enumerate(rows):
        if len(row) != number:
            raise DataError(
                f"{name}: {file}, line {first_line + index}: expected {number} values ({header}), not {lines[index]!r}."
            )
    return list(zip(*rows, strict=True))


def integers(file: Path, name: str, values: Sequence[str], column: str, first_line: int = 1) -> NDArray[np.int64]:
    """Convert a column to an array (n,) of integers.

    Args:
        file: The file, for messages.
        name: Name of the benchmark, for messages.
        values: The column.
        column: Name of the column, for messages.
        first_line: Line number of the first value in the file.

    Raises:
        DataError: If a value is not a whole number; the message names its line.
    """
    try:
        return np.array(values, dtype=np.int64)
    except (ValueError, OverflowError):
        for index, value in enumerate(values):
            if not value.isdecimal() or len(value) > 18:
                raise DataError(
                    f"{name}: {file}, line {first_line + index}: the {column} {value!r} is not a number."
                ) from None
        raise


def read_csv(file: Path, name: str, header: Sequence[str], keep: Sequence[str], hint: str) -> list[tuple[str, ...]]:
    """Read columns of a CSV file; values may be quoted.

    Args:
        file: CSV file in UTF-8.
        name: Name of the benchmark, for messages.
        header: Names of all columns of the file, in order.
        keep: Names of the columns to return, two or more.
        hint: Which file is expected, for messages.

    Raises:
        DataError: If the file has different columns, a row with missing or extra values, or no rows, or is not text.
    """
    rows: list[tuple[str, ...]] = []
    try:
        with io.TextIOWrapper(open_regular_file(file), "utf-8-sig", newline="") as lines:
            check_text(file, name, lines.read(500))
            lines.seek(0)
            reader = csv.reader(lines)
            found = [column.strip() for column in next(reader, [])]
            if found != list(header):
                raise DataError(
                    f"{name}: {file} must have the columns {','.join(header)}, not {','.join(found)[:200]!r}; {hint}."
                )
            select = itemgetter(*(found.index(column) for column in keep))
            for row in reader:
                if len(row) == len(found):
                    rows.append(select(row))
                elif row:
                    raise DataError(f"{name}: {file}, row {len(rows) + 2}: {len(row)} values for {len(found)} columns.")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name}: cannot read {file} as a CSV file in UTF-8: {error}; {hint}.") from error
    if not rows:
        raise DataError(f"{name}: {file} lists no images; download it again.")
    return list(zip(*rows, strict=True))
