"""Warnings about batches from which a loss can learn little or nothing. Each is shown once per process."""

from __future__ import annotations

import itertools
import sys
import warnings

import torch
from torch import Tensor

_CHECKED_CALLS, _CHECKED_ROWS = 4, 8  # few, because reading the norms makes a GPU wait
_TOLERANCE = 0.01  # of a norm; rounding to bfloat16 changes it by at most 0.004
_LIBRARIES = {"shortlist", "torch", "pytorch_metric_learning"}  # not the user's code

_calls = itertools.count()
_shown: set[str] = set()


def warn_if_not_normalised(embeddings: Tensor) -> None:
    """Warn if rows of the embeddings, (B, d), are not unit vectors. Checks a few rows of the first calls only."""
    if torch.compiler.is_compiling() or next(_calls) >= _CHECKED_CALLS:
        return
    norms = torch.linalg.vector_norm(embeddings.detach()[:_CHECKED_ROWS].float(), dim=1).tolist()
    wrong = [row for row, norm in enumerate(norms) if not abs(norm - 1) <= _TOLERANCE]
    if wrong:
        _warn_once(
            "norms",
            f"The embeddings are not L2-normalised: row {wrong[0]} has the norm {norms[wrong[0]]:.3g}. The defaults of "
            "the ranking losses are for similarities between -1 and 1: normalise the embeddings, for example with "
            "torch.nn.functional.normalize(embeddings, dim=1).",
        )


def warn_without_positives() -> None:
    """Warn that no query of a batch has a positive."""
    if not torch.compiler.is_compiling():
        _warn_once(
            "positives",
            "No item of the batch has a positive, so the loss is 0 and nothing is learned: a batch, or the database "
            "in ref_emb, must contain several items of a class, as with shortlist.ClassBalancedSampler.",
        )


def _warn_once(kind: str, message: str) -> None:
    """Show a warning at the line of the user's code that caused it, unless one of this kind has been shown."""
    if kind in _shown:
        return
    _shown.add(kind)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{message} This warning is shown once.", stacklevel=level)
