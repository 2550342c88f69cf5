"""Optional dependencies: imports that fail with a message naming the extra to install."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from shortlist.errors import ShortlistError


class MissingExtraError(ShortlistError, ModuleNotFoundError):
    """A required package is not installed. The message names the extra that installs it."""


@contextmanager
def extra(name: str, user: str) -> Iterator[None]:
    """Guard the imports of optional dependencies inside a `with` block.

    The state of Python's `random` module is restored, because importing rich draws a random number.

    If blocks are nested, the outermost one names the extra: it belongs to the feature that the user called, and an
    extra includes the extras that it builds on.

    Args:
        name: Name of the extra that installs the packages.
        user: Subject of the error message: the feature that needs the packages.

    Raises:
        MissingExtraError: A package is not installed.
        ShortlistError: A package is installed but cannot be imported.

    Example:
        >>> with extra("training", "An Embedder"):
        ...     import not_installed
        Traceback (most recent call last):
        shortlist.extras.MissingExtraError: An Embedder needs the package not_installed, which is not installed: ...'
    """
    state = random.getstate()
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "shortlist":  # a bug in shortlist, not a missing dependency
            raise
        if not isinstance(error, ModuleNotFoundError):  # for example, a shared library is missing
            raise ShortlistError(f"{user} needs a package that is installed but cannot be imported: {error}") from error
        raise MissingExtraError(
            f"{user} needs the package {package}, which is not installed: pip install 'shortlist[{name}]'",
            name=error.name,
        ) from None
    finally:
        random.setstate(state)
