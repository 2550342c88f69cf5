"""Random numbers that depend only on what they are used for, not on workers, processes or resuming."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index

import torch

CPU = torch.device("cpu")


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


def cuda_devices(device: torch.device) -> list[torch.device]:
    """Return the device if it is a CUDA device, else an empty list."""
    return [device] if device.type == "cuda" else []


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed the random number generators of a device within the context, and restore their states afterwards."""
    with torch.random.fork_rng(cuda_devices(device)):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed all other GPUs, permanently
        for cuda in cuda_devices(device):
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield
