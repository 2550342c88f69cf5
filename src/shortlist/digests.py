"""Digests of tensors, by which saved weights are verified and processes compare theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_digest(tensors: Mapping[str, Tensor], facts: str = "") -> str:
    """Compute the SHA-256 of a text, and of the names, types, shapes and bytes of tensors, in the order of their names.

    Example:
        >>> one, other = {"a": torch.zeros(2), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(2)}
        >>> tensors_digest(one) == tensors_digest(other), tensors_digest(one) == tensors_digest({"a": torch.zeros(2)})
        (True, False)
    """
    sha256 = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()
