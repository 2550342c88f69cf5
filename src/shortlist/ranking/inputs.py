"""Input checks of the ranking losses and metrics. Each error says what is wrong and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from shortlist.ranking.precision import computed_dtype


def check_vectors(vectors: Tensor, labels: Tensor, what: str = "embeddings") -> None:
    """Require a finite floating-point matrix with integer labels of each row, both on the same device.

    The dot product of any two rows must be finite as well.

    Args:
        vectors: Matrix of shape (N, d).
        labels: Labels of shape (N,), or (N, L) if a row can have several.
        what: Name of the vectors in error messages.
    """
    if not isinstance(vectors, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(vectors).__name__}")
    if torch._C._functorch.is_functorch_wrapped_tensor(vectors):
        raise TypeError(
            f"{what} are inside a transform of torch.func, which ranking losses and metrics do not support: "
            "differentiate with .backward() or torch.autograd.grad, and replace vmap by a loop"
        )
    if vectors.ndim != 2:
        raise ValueError(f"{what} must be a matrix (items, dimensions), got shape {tuple(vectors.shape)}")
    if not vectors.is_floating_point():
        raise TypeError(f"{what} must be floating point, got {vectors.dtype}; convert them with .float()")
    check_labels(labels, f"labels of {what}", several=True)
    if len(labels) != len(vectors):
        raise ValueError(f"{len(vectors)} {what} but {len(labels)} labels: each row needs one label")
    if labels.device != vectors.device:
        raise ValueError(
            f"{what} are on {vectors.device} but their labels on {labels.device}: move one of them with .to()"
        )
    if not vectors.shape[1]:
        raise ValueError(f"{what} have no dimensions: shape {tuple(vectors.shape)}")
    limit = (torch.finfo(computed_dtype(vectors)).max / vectors.shape[1]) ** 0.5
    if not len(vectors) or all(abs(extreme.item()) <= limit for extreme in torch.aminmax(vectors.detach())):
        return
    largest = vectors.detach().abs().amax(dim=1).to(computed_dtype(vectors))
    bad = (~(largest <= limit)).nonzero().flatten()
    fault = "values whose products overflow" if largest[bad[0]].isfinite() else "nan or inf"
    raise ValueError(f"{what} hold {fault} in {len(bad)} of {len(vectors)} rows, first in row {bad[0].item()}")


def check_labels(labels: Tensor, what: str = "labels", several: bool = False) -> None:
    """Require integers of shape (N,); with `several`, also (N, L) with L > 1 and different labels in each row."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(labels).__name__}")
    if labels.ndim != 1 and not (several and labels.ndim == 2 and labels.shape[1] > 1):
        raise ValueError(f"{what} must be a vector with one integer per item, got shape {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{what} must be integers, got {labels.dtype}")
    if labels.ndim == 2:
        ordered = labels.sort(dim=1).values
        repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1).nonzero()
        if len(repeated):
            raise ValueError(
                f"{what} must be different in each row, padded with -1, but row {repeated[0].item()} repeats one; of a "
                "one-hot matrix, use argmax(1)"
            )


def check_database(queries: Tensor, database: Tensor | None, labels: Tensor | None, what: str) -> None:
    """Require that a separate database has labels, and the dimensions and device of the queries."""
    if database is None and labels is None:
        return
    if database is None or labels is None:
        raise ValueError(f"{what} and its labels must be passed together: pass both or neither")
    check_vectors(database, labels, what)
    if queries.shape[1] != database.shape[1]:
        raise ValueError(f"queries have {queries.shape[1]} dimensions but the database {database.shape[1]}")
    if queries.device != database.device:
        raise ValueError(
            f"queries are on {queries.device} but the database on {database.device}: move one of them with .to()"
        )


def check_k(k: int | Sequence[int]) -> tuple[int, ...]:
    """Return one or several cut-offs as a tuple; require positive integers."""
    values = tuple(k) if isinstance(k, Sequence) else (k,)
    if not values:
        raise ValueError("k is empty: pass at least one cut-off, such as k=(1, 2, 4)")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"k must contain positive integers, got {value!r}")
    return tuple(int(value) for value in values)


def is_finite_number(value: object) -> bool:
    """Return whether this is a finite number, and not a bool, which Python would accept as 0 or 1."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_temperature(value: float, name: str) -> float:
    """Require a finite number above 0, and return it as a float."""
    if not is_finite_number(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def check_tile_size(tile_size: int | None) -> None:
    """Require a positive integer, or None for an automatic tile size."""
    if tile_size is not None and (not isinstance(tile_size, Integral) or tile_size < 1):
        raise ValueError(f"tile_size must be at least 1, got {tile_size}")
