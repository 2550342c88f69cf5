"""Images of different sizes are embedded in groups of equal size, and returned in their order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shortlist.batches.by_size import by_size


def images() -> list[Tensor]:
    return [
        torch.full((3, *size), float(number)) for number, size in enumerate([(4, 4), (2, 4), (4, 4), (2, 4), (4, 4)])
    ]


@pytest.mark.parametrize(
    ("pixels", "calls"),
    [
        (None, [(3, 4, 4), (2, 2, 4)]),
        (32, [(2, 4, 4), (1, 4, 4), (2, 2, 4)]),
        (1, [(1, 4, 4)] * 3 + [(1, 2, 4)] * 2),  # one image at least
    ],
)
def test_groups_of_one_size(pixels: int | None, calls: list[tuple[int, ...]]) -> None:
    seen = []

    def vectors_of(same: Tensor) -> Tensor:
        seen.append((len(same), *same.shape[2:]))
        return same.mean((1, 2, 3))[:, None]

    assert by_size(vectors_of, images(), pixels).flatten().tolist() == [0, 1, 2, 3, 4]
    assert seen == calls
    whole = torch.stack(images()[::2])
    assert by_size(vectors_of, whole, pixels).flatten().tolist() == [0, 2, 4]
    assert seen[-1] == (3, 4, 4)  # a tensor is as large as its maker wanted
