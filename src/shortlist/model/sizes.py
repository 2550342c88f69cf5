"""Images of different sizes through a model that takes one size at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

Images = Tensor | Sequence[Tensor]  # one tensor (n, ...), or a list of n images that need not have one size


def by_size(vectors_of: Callable[[Tensor], Tensor], images: Images) -> Tensor:
    """The vectors (n, d) of images, in their order.

    Args:
        vectors_of: images of one size (m, ...) -> vectors (m, d).
        images: a tensor, or a list, of which those of one size are given at once.

    >>> by_size(lambda same: same.flatten(1).sum(1, keepdim=True), [torch.ones(2), torch.ones(3), torch.zeros(2)])
    tensor([[2.],
            [3.],
            [0.]])
    """
    if isinstance(images, Tensor):
        return vectors_of(images)
    groups: dict[torch.Size, list[int]] = {}
    for position, image in enumerate(images):
        groups.setdefault(image.shape, []).append(position)
    vectors = torch.cat([vectors_of(torch.stack([images[i] for i in group])) for group in groups.values()])
    order = torch.tensor(list(chain.from_iterable(groups.values())), device=vectors.device)
    return vectors[order.argsort()]
