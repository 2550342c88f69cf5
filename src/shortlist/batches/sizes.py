"""Images of different sizes through a model that takes one size at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

Images = Tensor | Sequence[Tensor]  # one tensor (n, ...), or a list of n images that need not have one size


def by_size(vectors_of: Callable[[Tensor], Tensor], images: Images, pixels: int | None = None) -> Tensor:
    """The vectors (n, d) of images, in their order.

    Args:
        vectors_of: images of one size (m, ...) -> vectors (m, d).
        images: a tensor, which is given as it is, or a list, of which those of one size are given at once.
        pixels: of a list, so many at once at most, or else one image; None for no limit.

    >>> by_size(lambda same: same.flatten(1).sum(1, keepdim=True), [torch.ones(2), torch.ones(3), torch.zeros(2)])
    tensor([[2.],
            [3.],
            [0.]])
    """
    if isinstance(images, Tensor):
        return vectors_of(images)
    sizes: dict[torch.Size, list[int]] = {}
    for position, image in enumerate(images):
        sizes.setdefault(image.shape, []).append(position)
    groups: list[list[int]] = []
    for size, positions in sizes.items():
        number = len(positions) if pixels is None else max(1, pixels // size[-2:].numel())
        groups += [positions[start : start + number] for start in range(0, len(positions), number)]
    vectors = torch.cat([vectors_of(torch.stack([images[i] for i in group])) for group in groups])
    order = torch.tensor(list(chain.from_iterable(groups)), device=vectors.device)
    return vectors[order.argsort()]
