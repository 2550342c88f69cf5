"""Embedding of images of different sizes with a model that takes one size at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

Images = Tensor | Sequence[Tensor]  # a tensor of shape (n, ...), or a list of n images of any sizes


def by_size(embed: Callable[[Tensor], Tensor], images: Images, max_pixels: int | None = None) -> Tensor:
    """Embed images of different sizes, those of equal size together.

    Args:
        embed: Function from images of one size, (m, ...), to vectors, (m, d).
        images: A tensor of images, which is embedded in one call, or a list of n images.
        max_pixels: Maximum number of pixels of the images of a list that are embedded in one call. A larger image is
            embedded alone. Default: no limit.

    Returns:
        Vectors of shape (n, d), in the order of the images.

    Example:
        >>> by_size(lambda same: same.flatten(1).sum(1, keepdim=True), [torch.ones(2), torch.ones(3), torch.zeros(2)])
        tensor([[2.],
                [3.],
                [0.]])
    """
    if isinstance(images, Tensor):
        return embed(images)
    sizes: dict[torch.Size, list[int]] = {}
    for position, image in enumerate(images):
        sizes.setdefault(image.shape, []).append(position)
    groups: list[list[int]] = []
    for size, positions in sizes.items():
        number = len(positions) if max_pixels is None else max(1, max_pixels // size[-2:].numel())
        groups += [positions[start : start + number] for start in range(0, len(positions), number)]
    vectors = torch.cat([embed(torch.stack([images[i] for i in group])) for group in groups])
    order = torch.tensor(list(chain.from_iterable(groups)), device=vectors.device)
    return vectors[order.argsort()]
