"""The CSV files of the Google Landmarks datasets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from shortlist.errors import DataError


def read_csv(file: Path, name: str, header: Sequence[str], hint: str) -> list[tuple[str, ...]]:
    """The columns of a file with commas, values in quotes or not; all values without blanks around them.

    Args:
        file: what to read.
        name: of the benchmark.
        header: the columns that it must have, in this order.
        hint: which file it should be, for the message.

    Raises:
        DataError: other columns, a line with more or fewer values, or no text.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            found = [column.strip() for column in next(reader, [])]
            if found != list(header):
                raise DataError(
                    f"{name}: {file} must have the columns {','.join(header)}, not {','.join(found)[:200]!r}; {hint}"
                )
            rows = [row for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name}: cannot read {file} as a CSV file in UTF-8: {error}; {hint}") from error
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(f"{name}: {file}, row {number}: {len(row)} values for {len(header)} columns; {hint}")
    if not rows:
        raise DataError(f"{name}: {file} lists no images; download it again")
    return list(zip(*rows, strict=True))
