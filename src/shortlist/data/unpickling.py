"""Read pickles without executing code: only plain data is built, and every class and function is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from shortlist.errors import DataError
from shortlist.files import open_regular_file


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for numbers, strings, lists, tuples, sets and dicts; anything else needs a global, which is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object stored outside of the file")


class _Refused(Exception):  # noqa: N818 - is always caught in this file
    pass


def read_plain_pickle(file: Path) -> Any:
    """Read a pickle that holds only plain data.

    Nothing that the pickle names is imported or called. Strings written by Python 2 are decoded as Latin-1.

    Raises:
        DataError: If the file does not exist, is damaged, or requests a class or a function.
    """
    try:
        with open_regular_file(file) as stream:
            return _PlainUnpickler(stream, fix_imports=False, encoding="latin1").load()
    except OSError as error:
        raise DataError(f"Cannot read {file}: {error.strerror}.") from error
    except _Refused as refused:
        advice = "Check that it is the original file"
        if str(refused).startswith("numpy"):
            advice = "If you trust the file, convert its NumPy arrays to lists"
        raise DataError(
            f"{file} requests {refused}; only numbers, strings, lists and dicts are read from a pickle, because "
            f"anything else can execute code. {advice}"
        ) from None
    except Exception as error:  # a damaged pickle can raise almost any exception
        raise DataError(
            f"{file} cannot be read as a pickle ({type(error).__name__}): the download may have failed."
        ) from error
