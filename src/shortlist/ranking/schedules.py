"""Rank temperatures that change during training: high at first, so that every positive has a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortlist.ranking.inputs import check_temperature


@dataclass(frozen=True)
class Schedule:
    """A number that changes geometrically from `start` to `end` in the first part of training, and is then constant.

    It is a function of the progress of training, so there is no state to save and restore. In our experiments
    (docs/results.md), a rank temperature that starts at 500 gave about the same results as `MedianRank`.

    Args:
        start: Value at the start of training, above 0.
        end: Final value, above 0.
        until: Share of training after which the value is `end`, above 0 and at most 1.

    Example:
        >>> rank_temperature = Schedule(100, 1, until=0.5)
        >>> [rank_temperature(progress) for progress in (0, 0.25, 0.5, 1)]
        [100.0, 10.0, 1.0, 1.0]
    """

    start: float
    end: float
    until: float = 0.5

    def __post_init__(self) -> None:
        for name in ("start", "end", "until"):
            object.__setattr__(self, name, check_temperature(getattr(self, name), f"{name} of a schedule"))
        if self.until > 1:
            raise ValueError(f"until of a schedule is a share of training and must be at most 1, got {self.until}")

    def __call__(self, progress: float) -> float:
        """Return the value when this share of training, from 0 to 1, has passed."""
        if progress >= self.until:
            return self.end
        return self.start * math.pow(self.end / self.start, progress / self.until)


@dataclass(frozen=True)
class MedianRank:
    """A rank temperature that follows the median rank of the positives of each batch: share * median.

    The median is that of the batch's own smooth ranks, and no gradient flows through it. As ranks improve, the
    temperature falls to `end`.

    In our experiments with large batches (docs/results.md), none of 3 runs from random weights failed with it, and 2 of
    3 without it, which does not decide whether it helps. It did not improve training from pretrained weights.

    Args:
        share: Rank temperature divided by the median rank.
        end: Lower bound of the temperature, which it reaches when the ranks are good.
    """

    share: float = 0.5
    end: float = 1.0

    def __post_init__(self) -> None:
        for name in ("share", "end"):
            check_temperature(getattr(self, name), f"{name} of MedianRank")
