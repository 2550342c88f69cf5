"""Seeds derived from what they are used for, so that results do not depend on workers, processes or resuming."""

from __future__ import annotations

import hashlib
from operator import index


def derived_seed(*key: int | str) -> int:
    """Derive a 63-bit seed from a key, identically on every platform and in every version.

    Args:
        key: What the random numbers are for, such as `("augment", seed, epoch, image)`.

    >>> derived_seed("step", 0, 1) == derived_seed("step", 0, 1) != derived_seed("step", 0, 2)
    True
    """
    plain = tuple(part if isinstance(part, str) else index(part) for part in key)  # NumPy integers have another repr
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
