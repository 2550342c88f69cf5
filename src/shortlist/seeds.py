"""Random numbers as a function of what they are for: nothing depends on workers, processes or resuming."""

from __future__ import annotations

import hashlib
from operator import index


def derived_seed(*key: int | str) -> int:
    """A seed of 63 bits for a key such as ("augment", seed, epoch, image); the same everywhere and for ever.

    >>> derived_seed("step", 0, 1) == derived_seed("step", 0, 1) != derived_seed("step", 0, 2)
    True
    """
    plain = tuple(part if isinstance(part, str) else index(part) for part in key)  # numpy's integers print otherwise
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
