"""What is wrong with a request, as a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def invalid(errors: Sequence[Mapping[str, Any]]) -> str:
    """Of pydantic's errors: which values, and why not.

    >>> invalid([{"loc": ("query", "k"), "msg": "Input should be less than or equal to 200"}])
    'k: input should be less than or equal to 200.'
    """
    return "; ".join(_one(error) for error in errors) + "."


def _one(error: Mapping[str, Any]) -> str:
    where = str(error["loc"][-1]) if error["loc"] else "the request"
    message = str(error["msg"]).rstrip(".")
    return f"{where}: {message[:1].lower()}{message[1:]}"
