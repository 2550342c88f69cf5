"""Pickles of others: a pickle can run any program, so only plain data is read, and every global is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from shortlist.errors import DataError


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings, lists, tuples, sets and dicts. Anything else would need a name to be looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object that is kept elsewhere")


class _Refused(Exception):  # noqa: N818 - never leaves this file
    pass


def _advice(asked: str) -> str:
    if asked.startswith("numpy"):
        return "Where you trust the file, turn its NumPy arrays into lists"
    return "Is it the original file?"


def read_plain_pickle(file: Path) -> Any:
    """What a pickle holds, where that is plain data; strings of Python 2 become text, byte by byte.

    Nothing that the pickle names is imported or called.

    Raises:
        DataError: there is no such file, it is damaged, or it asks for a class or a function.
    """
    try:
        with file.open("rb") as stream:
            return _PlainUnpickler(stream, fix_imports=False, encoding="latin1").load()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except _Refused as refused:
        raise DataError(
            f"{file} asks for {refused}; only numbers, strings, lists and dicts are read from a pickle, because "
            f"anything else can run a program. {_advice(str(refused))}"
        ) from None
    except Exception as error:  # a damaged pickle raises nearly everything
        raise DataError(
            f"{file} cannot be read as a pickle ({type(error).__name__}): the download may have failed"
        ) from error
