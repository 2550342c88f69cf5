"""The baseline that training is compared with: the pretrained backbone alone, or the model before training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from shortlist.config import RunConfig
from shortlist.evaluation import Evaluation
from shortlist.model import Embedder

PRETRAINED, UNTRAINED = "pretrained", "before training"  # names of baselines
_REMARK = "the pretrained backbone alone: its pooled features, L2-normalised, without the layers that are trained"


def baseline(config: RunConfig, embedder: Embedder, given: nn.Module | None) -> tuple[Embedder, str]:
    """Return the model to compare a run with, and its name.

    Usually, this is the pretrained backbone alone, which shares its weights with the embedder, since the layers that
    follow it have random weights. Without pretrained weights, and for a model that is given in Python, it is the
    embedder itself.

    Args:
        config: Configuration of the run.
        embedder: The embedder, before training.
        given: The model that was given in Python.
    """
    if config.model.weights in (None, "none") or embedder.config.returns_vectors or given is not None:
        return embedder, UNTRAINED
    return embedder.with_head(nn.Identity(), nn.Identity()), PRETRAINED


def with_baseline_name(measured: Evaluation, name: str) -> Evaluation:
    """Record the name of a baseline in its evaluation."""
    return replace(measured, remarks=(*measured.remarks, _REMARK)) if name == PRETRAINED else measured


def baseline_name(remarks: Collection[str]) -> str:
    """Return the name of a baseline, given the remarks on its evaluation."""
    return PRETRAINED if _REMARK in remarks else UNTRAINED


def improvement(before: Evaluation, after: Evaluation) -> str:
    """Describe how the first metric differs from that of the baseline."""
    metric = next(iter(after.headline), None)
    if metric is None or metric not in before.metrics:
        return ""
    values = before.values[metric], after.values[metric]
    texts = [f"{100 * value:.1f}" for value in values]
    name = (
        "with the pretrained backbone alone (pooled as in this run)"
        if baseline_name(before.remarks) == PRETRAINED
        else UNTRAINED
    )
    return f"{after.data}: {metric} {texts[0]} {name}, {texts[1]} after training ({100 * (values[1] - values[0]):+.1f})"
