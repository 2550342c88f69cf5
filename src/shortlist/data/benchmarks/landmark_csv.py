"""The CSV files of the Google Landmarks datasets."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from shortlist.data.benchmarks.lists import check_text
from shortlist.errors import DataError


def read_csv(file: Path, name: str, header: Sequence[str], keep: Sequence[str], hint: str) -> list[tuple[str, ...]]:
    """Some columns of a file with commas, values in quotes or not.

    Args:
        file: what to read.
        name: of the benchmark.
        header: the columns that it must have, in this order.
        keep: two or more of them that are wanted.
        hint: which file it should be, for the message.

    Raises:
        DataError: other columns, a line with more or fewer values, or no text.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            check_text(file, name, lines.read(500))
            lines.seek(0)
            reader = csv.reader(lines)
            found = [column.strip() for column in next(reader, [])]
            if found != list(header):
                raise DataError(
                    f"{name}: {file} must have the columns {','.join(header)}, not {','.join(found)[:200]!r}; {hint}"
                )
            rows = _rows(file, name, reader, itemgetter(*(found.index(column) for column in keep)), len(found))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name}: cannot read {file} as a CSV file in UTF-8: {error}; {hint}") from error
    if not rows:
        raise DataError(f"{name}: {file} lists no images; download it again")
    return list(zip(*rows, strict=True))


def _rows(
    file: Path, name: str, lines: Iterable[list[str]], take: Callable[[list[str]], tuple[str, ...]], width: int
) -> list[tuple[str, ...]]:
    rows = []
    for row in lines:
        if len(row) == width:
            rows.append(take(row))
        elif row:
            raise DataError(f"{name}: {file}, row {len(rows) + 2}: {len(row)} values for {width} columns")
    return rows
