"""Batches for any training loop: class-balanced sampling, and exact gradients of batches of any size."""

from shortlist.batches.large_batch import LargeBatchStep, StepOutput
from shortlist.batches.memory import reuse_freed_memory
from shortlist.batches.sampler import ClassBalancedSampler

__all__ = ["ClassBalancedSampler", "LargeBatchStep", "StepOutput", "reuse_freed_memory"]
