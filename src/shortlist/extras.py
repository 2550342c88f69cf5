"""Packages that only a part of shortlist needs, and the sentence that says how to install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shortlist.errors import ShortlistError


class MissingExtraError(ShortlistError, ModuleNotFoundError):
    """A package is not installed; names the extra of shortlist that installs it."""


@contextmanager
def extra(name: str, user: str) -> Iterator[None]:
    """Import what the extra `name` installs, on behalf of `user`, the subject of the sentence if it is missing.

    Where one block runs inside another, the outer one speaks: it is the one that was asked for, and an extra includes
    the extras that it builds on.

    Raises:
        MissingExtraError: a package is not installed.

    >>> with extra("training", "An Embedder"):
    ...     import not_installed
    Traceback (most recent call last):
    shortlist.extras.MissingExtraError: An Embedder needs the package not_installed, which is not installed: ...'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "shortlist":  # a mistake of ours, which no installation puts right
            raise
        raise MissingExtraError(
            f"{user} needs the package {package}, which is not installed: pip install 'shortlist[{name}]'",
            name=error.name,
        ) from None
