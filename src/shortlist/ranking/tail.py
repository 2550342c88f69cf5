"""An upper bound of the step function with a linear tail: competitors far ahead of a positive keep a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from shortlist.ranking.inputs import check_temperature


@dataclass(frozen=True)
class LinearTail:
    """Upper bound of the step function, after SupRank (Ramzi et al. 2021), in place of the sigmoid on similarities.

    A competitor that is ahead of a positive by u counts sigmoid(u / tau_2) if u < 0 and sigmoid(u / tau_2) + 1/2, which
    is at least 1, if u >= 0. For u > `start` this continues as a line with the given slope. A rank is therefore never
    smaller than the exact one, and the gradient does not vanish for competitors far ahead. Among each other, the
    positives of a query have exact ranks without a gradient.

    In our experiments (docs/results.md), it does not improve RS@k: from random weights, it is as good as `MedianRank`
    alone, and from pretrained weights, it decreases r@1.

    Args:
        slope: Slope of the line, rho in the paper, per unit of similarity.
        start: Difference of similarities from which the line starts, delta in the paper.
    """

    slope: float = 100.0
    start: float = 0.05

    def __post_init__(self) -> None:
        for name in ("slope", "start"):
            check_temperature(getattr(self, name), f"{name} of a linear tail")

    def excess(self, gap: Tensor, soft: Tensor, scale: float) -> Tensor:
        """Sum the difference between the upper bound and the sigmoid over the last dimension.

        Args:
            gap: Differences of similarities, item - threshold; -inf for items that do not count.
            soft: Sigmoids of the differences.
            scale: Inverse temperature of the sigmoid.
        """
        at_start = 1 / (1 + math.exp(-self.start * scale))
        line = (gap - self.start).clamp_(min=0).mul_(self.slope)
        return line.add_(gap >= 0, alpha=0.5).add_((at_start - soft).mul_(gap > self.start)).sum(-1)

    def slopes(self, gap: Tensor, slope: Tensor, scale: float) -> Tensor:
        """Replace the derivatives of the sigmoids, divided by `scale`, by those of the upper bound, in place."""
        return slope.masked_fill_(gap > self.start, self.slope / scale)
