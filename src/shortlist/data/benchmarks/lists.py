"""The text files in which benchmarks list their images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

_LFS = "version https://git-lfs"


def read_lines(file: Path, name: str) -> list[str]:
    """The lines of a list, without blanks at their ends and without empty lines at the end of the file.

    Takes the line ends of any system, a byte order mark, and a last line without an end.

    Raises:
        DataError: there is no such file, it is no text, it is empty, or it is what a failed download leaves.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{name}: there is no {file.name} in {file.parent}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: {file} is no text file: the download may have failed, or it is packed") from error
    check_text(file, name, text[:500])
    lines = [line.strip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{name}: {file} is empty; download it again")
    return lines


def check_text(file: Path, name: str, start: str) -> None:
    """What a failed download leaves is no list.

    Raises:
        DataError: the file starts like a web page, or like a pointer of Git LFS.
    """
    start = start.lstrip().lower()
    if start.startswith(("<!doctype", "<html", "<?xml", "<head")):
        raise DataError(f"{name}: {file} is a web page, not a list: its download failed; download it again")
    if start.startswith(_LFS):
        raise DataError(f"{name}: {file} is a pointer of Git LFS, not a list; fetch the file itself")


def columns(file: Path, name: str, lines: Sequence[str], header: str, first_line: int = 1) -> list[tuple[str, ...]]:
    """The columns of a list whose values are separated by any number of blanks.

    Args:
        file: for the message.
        name: of the benchmark.
        lines: all that hold values.
        header: what the columns are called, as many as there must be.
        first_line: number of the first of them in the file.

    Raises:
        DataError: there is no line, or one has more or fewer values; names it.
    """
    if not lines:
        raise DataError(f"{name}: {file} lists no images; download it again")
    rows = [line.split() for line in lines]
    number = len(header.split())
    for index, row in enumerate(rows):
        if len(row) != number:
            raise DataError(
                f"{name}: {file}, line {first_line + index}: expected {number} values ({header}), not {lines[index]!r}"
            )
    return list(zip(*rows, strict=True))


def whole_numbers(file: Path, name: str, values: Sequence[str], what: str, first_line: int = 1) -> NDArray[np.int64]:
    """(n,) a column of numbers.

    Raises:
        DataError: something else is among them; names its line.
    """
    try:
        return np.array(values, dtype=np.int64)
    except (ValueError, OverflowError):
        for index, value in enumerate(values):
            if not value.isdecimal() or len(value) > 18:
                raise DataError(
                    f"{name}: {file}, line {first_line + index}: the {what} {value!r} is no number"
                ) from None
        raise
