"""Whether a file gives the vectors that the run gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shortlist.batches.sizes import by_size
from shortlist.errors import ModelError
from shortlist.export.origin import Samples

Run = Callable[[Tensor], Tensor]  # uint8 (B, 3, H, W) -> vectors (B, d)


def check(run: Run, samples: Samples, tolerance: float, what: str) -> dict[str, Any]:
    """Compare a file's vectors with the run's own: of images together, and of the first alone.

    Raises:
        ModelError: it cannot take the images, or a number of a vector differs by more than `tolerance`.
    """
    with torch.inference_mode():
        try:
            found = by_size(run, samples.images)
            alone = run(samples.images[0][None])
        except Exception as error:  # whatever the runtime raises
            first = str(error).strip().partition("\n")[0]
            raise ModelError(f"the {what} file cannot take all images ({first}), so it was not written") from error
        right = samples.vectors
        difference = max((found - right).abs().max().item(), (alone - right[:1]).abs().max().item())
    if not difference <= tolerance:
        raise ModelError(
            f"the {what} file gives other vectors than PyTorch (largest difference {difference:.2g}, allowed "
            f"{tolerance:g}), so it was not written: use another format"
        )
    return {"images": samples.source, "largest_difference": difference, "tolerance": tolerance}
