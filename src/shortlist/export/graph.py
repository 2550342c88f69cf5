"""A encoder's network as a graph of tensors, for files that need no code of ours."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from shortlist.encoding import Encoder

# Of the example where images keep their shapes: multiples of patches of 14, 16 and 32 pixels, and no ViT's own square.
ANY_SHAPE = (224, 448)


def plain_network(encoder: Encoder) -> nn.Module:
    """A copy whose tensors lie in memory as they are named: files have no other order."""
    copied = Encoder(copy.deepcopy(encoder.embedder), encoder.transform, encoder.scales)
    copied.embedder.memory_format = torch.contiguous_format
    return copied.network.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


def example(encoder: Encoder) -> Tensor:
    """Two images of a shape that the network takes."""
    size = encoder.transform.size
    sides = ANY_SHAPE if size is None else (size, size)
    return torch.randint(256, (2, 3, *sides), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def exported_program(encoder: Encoder, network: nn.Module) -> ExportedProgram:
    """For any number of images and, where they keep their shapes, of any height and width."""
    free = dict.fromkeys((0, 2, 3) if encoder.transform.size is None else (0,), Dim.DYNAMIC)
    with torch.no_grad():
        return torch.export.export(network, (example(encoder),), dynamic_shapes=(free,))
