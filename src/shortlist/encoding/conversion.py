"""Conversion of an encoder's network to other runtimes, and the comparison of the result with PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from shortlist.batches.by_size import by_size
from shortlist.data import Transform
from shortlist.data.transforms import transform_image
from shortlist.encoding.encoder import Encoder
from shortlist.errors import ModelError, ShortlistError

INPUT, OUTPUT = "images", "vectors"  # names in the converted graph
# Example size for images of any shape: divisible by patch sizes 14, 16 and 32, and not the native square of any ViT.
EXAMPLE_SIZE = (224, 448)
NUM_SAMPLES = 8  # images whose vectors are compared
_SYNTHETIC_SIZES = ((640, 480), (480, 640), (500, 500), (800, 300))

Model = Callable[[Tensor], Tensor]  # uint8 (B, 3, H, W) -> vectors (B, d)


class Samples(NamedTuple):
    """Preprocessed images, and the vectors that the encoder's own network computes for them.

    Args:
        images: Images, uint8 (3, H, W) each.
        vectors: Vectors, (n, d).
        source: Description of the images.
    """

    images: list[Tensor]
    vectors: Tensor
    source: str


def plain_network(encoder: Encoder) -> nn.Module:
    """Copy an encoder's network with contiguous tensors, because files do not keep other memory formats."""
    copied = Encoder(copy.deepcopy(encoder.embedder), encoder.transform, encoder.scales)
    copied.embedder.memory_format = torch.contiguous_format
    return copied.network.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


def example_images(encoder: Encoder) -> Tensor:
    """Return two random images of a size that the network accepts, uint8 (2, 3, H, W)."""
    size = encoder.transform.size
    sides = EXAMPLE_SIZE if size is None else (size, size)
    return torch.randint(256, (2, 3, *sides), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def exported_program(encoder: Encoder, network: nn.Module) -> ExportedProgram:
    """Export a network for any batch size and, if images keep their shapes, for any height and width."""
    dynamic = dict.fromkeys((0, 2, 3) if encoder.transform.size is None else (0,), Dim.DYNAMIC)
    with torch.no_grad():
        return torch.export.export(network, (example_images(encoder),), dynamic_shapes=(dynamic,))


@contextmanager
def converting(encoder: Encoder, kind: str, advice: str) -> Iterator[None]:
    """Convert any exception to a ModelError saying that the network cannot be converted.

    Args:
        encoder: The encoder whose network is converted.
        kind: Kind of file.
        advice: What the user can do instead, for the message.
    """
    try:
        yield
    except ShortlistError:
        raise
    except Exception as error:  # exporters raise any kind of exception
        shapes = " for images of any shape" if encoder.transform.size is None else ""
        name = f"{encoder.embedder.config.backbone!r}{shapes}"
        raise ModelError(f"{name} cannot be exported as {kind} ({_first_line(error)}): {advice}") from error


def reference_samples(encoder: Encoder, images: list[Tensor], source: str) -> Samples:
    """Return images with the vectors that a converted network must reproduce. `source` describes the images."""
    with torch.inference_mode():
        return Samples(images, by_size(encoder.network, images), f"{len(images)} {source}")


def synthetic_samples(encoder: Encoder) -> Samples:
    """Return samples of synthetic images, for an encoder on the CPU without images of its own."""
    images = [_synthetic_image(seed, encoder.transform) for seed in range(NUM_SAMPLES)]
    return reference_samples(encoder, images, "synthetic images")


def verify(
    model: Model, samples: Samples, tolerance: float, kind: str, advice: str = "it was not written: use another format"
) -> dict[str, Any]:
    """Compare the vectors of a converted network with those of PyTorch, in batches and for a single image.

    Args:
        model: The converted network, opened by its own runtime.
        samples: Images and expected vectors.
        tolerance: Largest allowed absolute difference of a vector's component.
        kind: Kind of file, for error messages.
        advice: Consequence and remedy of a difference, for error messages.

    Returns:
        The images used, the largest difference and the tolerance.

    Raises:
        ModelError: The model fails on an image, or its vectors differ by more than `tolerance`.
    """
    with torch.inference_mode():
        try:
            vectors = by_size(model, samples.images)
            single = model(samples.images[0][None])
        except Exception as error:  # runtimes raise any kind of exception
            raise ModelError(f"The {kind} file fails on some images ({_first_line(error)}), so {advice}.") from error
        expected = samples.vectors
        difference = max((vectors - expected).abs().max().item(), (single - expected[:1]).abs().max().item())
    if not difference <= tolerance:
        raise ModelError(
            f"The vectors of the {kind} file differ from those of PyTorch (largest difference {difference:.2g}, "
            f"tolerance {tolerance:g}), so {advice}."
        )
    return {"images": samples.source, "largest_difference": difference, "tolerance": tolerance}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _synthetic_image(seed: int, transform: Transform) -> Tensor:
    """Return coarse coloured noise, whose features are not constant."""
    size = _SYNTHETIC_SIZES[seed % len(_SYNTHETIC_SIZES)]
    coarse = torch.randint(256, (6, 8, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    image = Image.fromarray(coarse.numpy()).resize(size, Image.Resampling.BICUBIC)
    return transform_image(image, transform, Random(0))
