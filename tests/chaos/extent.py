"""The extent of the chaos tests: short in `make test`, long in `make chaos`."""

from __future__ import annotations

import os
from random import Random

LONG = os.environ.get("SHORTLIST_CHAOS") == "long"
SEED = int(os.environ.get("SHORTLIST_CHAOS_SEED", "0"))


def times(brief: int, long: int) -> int:
    """Return the number of repetitions."""
    return long if LONG else brief


def chance(name: str) -> Random:
    """Return a random generator for a test, derived from the seed."""
    return Random(f"{SEED} {name}")
