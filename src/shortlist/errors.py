"""What a user may be told: what is wrong, where, and what to do. The command line prints it without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FEW = 10  # names in a message


class ShortlistError(Exception):
    """Something a user can put right."""


class ConfigError(ShortlistError):
    """A recipe, an option or a combination of them that cannot be run."""


class DataError(ShortlistError):
    """Images, tables or folders that are missing, damaged or not what they were said to be."""


class ModelError(ShortlistError):
    """A backbone, weights or a saved model that cannot be used."""


class RunError(ShortlistError):
    """A run's folder, its checkpoints or the training itself cannot go on."""


class Interrupted(ShortlistError):  # noqa: N818 - no error: someone asked for it
    """A run was stopped by hand, and says how to go on."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence part that names the nearest known name, or all of them where none is near (the nearest of very many).

    >>> did_you_mean("optimiser", ["optimizer", "schedule"])
    "did you mean 'optimizer'?"
    >>> did_you_mean("x", ["optimizer", "schedule"])
    'known: optimizer, schedule'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    some = sorted(difflib.get_close_matches(name, known, n=FEW, cutoff=0)) if len(known) > 2 * FEW else known
    return f"known: {', '.join(some)}{', ...' if len(some) < len(known) else ''}"
