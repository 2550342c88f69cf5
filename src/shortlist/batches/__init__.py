"""Batches for a training loop of any kind: how they are drawn, and how one of any size is differentiated."""

from shortlist.batches.large_batch import LargeBatchStep, StepOutput
from shortlist.batches.sampler import ClassBalancedSampler

__all__ = ["ClassBalancedSampler", "LargeBatchStep", "StepOutput"]
