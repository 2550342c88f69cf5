"""What a ranking loss or metric accepts, checked once at the door. Bad input gets one error that names the culprit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from shortlist.ranking.precision import computed_dtype


def check_vectors(vectors: Tensor, labels: Tensor, what: str = "embeddings") -> None:
    """Refuse anything but a finite floating matrix with one integer label a row, both on one device.

    Finite must also be the dot product of any two rows.
    """
    if not isinstance(vectors, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(vectors).__name__}")
    if vectors.ndim != 2:
        raise ValueError(f"{what} must be a matrix (items, dimensions), got shape {tuple(vectors.shape)}")
    if not vectors.is_floating_point():
        raise TypeError(f"{what} must be floating point, got {vectors.dtype}; convert them with .float()")
    check_labels(labels, f"labels of {what}")
    if len(labels) != len(vectors):
        raise ValueError(f"{len(vectors)} {what} but {len(labels)} labels: each row needs one label")
    if labels.device != vectors.device:
        raise ValueError(f"{what} are on {vectors.device} but their labels on {labels.device}: move one with .to()")
    if not vectors.shape[1]:
        raise ValueError(f"{what} have no dimensions: shape {tuple(vectors.shape)}")
    most = (torch.finfo(computed_dtype(vectors)).max / vectors.shape[1]) ** 0.5
    if not len(vectors) or all(abs(extreme.item()) <= most for extreme in torch.aminmax(vectors.detach())):
        return
    largest = vectors.detach().abs().amax(dim=1).to(computed_dtype(vectors))
    bad = (~(largest <= most)).nonzero().flatten()
    fault = "values whose products overflow" if largest[bad[0]].isfinite() else "nan or inf"
    raise ValueError(f"{what} hold {fault} in {len(bad)} of {len(vectors)} rows, first in row {bad[0].item()}")


def check_labels(labels: Tensor, what: str = "labels") -> None:
    """Refuse anything but a vector of integers."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(labels).__name__}")
    if labels.ndim != 1:
        raise ValueError(f"{what} must be a vector, one integer an item, got shape {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{what} must be integers, got {labels.dtype}")


def check_database(queries: Tensor, database: Tensor | None, labels: Tensor | None, what: str) -> None:
    """A database of its own comes with labels, and with the dimensions and the device of the queries."""
    if database is None and labels is None:
        return
    if database is None or labels is None:
        raise ValueError(f"{what} and its labels go together: give both or neither")
    check_vectors(database, labels, what)
    if queries.shape[1] != database.shape[1]:
        raise ValueError(f"queries have {queries.shape[1]} dimensions but the database {database.shape[1]}")
    if queries.device != database.device:
        raise ValueError(f"queries are on {queries.device} but the database on {database.device}: move one with .to()")


def check_k(k: int | Sequence[int]) -> tuple[int, ...]:
    """One or several cut-offs as a tuple of whole numbers from 1 up."""
    values = tuple(k) if isinstance(k, Sequence) else (k,)
    if not values:
        raise ValueError("k is empty: give at least one cut-off, such as k=(1, 2, 4)")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"k must hold whole numbers from 1 up, got {value!r}")
    return tuple(int(value) for value in values)


def check_temperature(value: float, name: str) -> float:
    """A temperature is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def check_tile_size(tile_size: int | None) -> None:
    """A tile has at least one row; None leaves the choice."""
    if tile_size is not None and (not isinstance(tile_size, Integral) or tile_size < 1):
        raise ValueError(f"tile_size must be at least 1, got {tile_size}")
