"""Images to embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shortlist.data import Catalog, ImageDataset, Transform, image_chunks
from shortlist.model.sizes import by_size


def embed_images(
    embedder: nn.Module,
    catalog: Catalog,
    transform: Transform,
    *,
    batch_size: int = 64,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Embeddings of all images of a catalog in their order, (n, d) float32 in the CPU's memory.

    Args:
        embedder: works in evaluation mode here, and is put back into the mode it was in.
        catalog: the images.
        transform: makes squares of them, or lets them keep their shapes; those of one shape are then embedded at once.
        batch_size: images at a time.
        workers: processes that decode.
        progress: called with the number done and the number in all.
    """
    dataset = ImageDataset(catalog, transform)
    keys = [
        [(0, index) for index in range(start, min(start + batch_size, len(catalog)))]
        for start in range(0, len(catalog), batch_size)
    ]
    device = next(embedder.parameters()).device
    training = embedder.training
    embedder.eval()
    vectors: list[Tensor] = []
    done = 0
    try:
        with torch.inference_mode():
            for images in image_chunks(dataset, keys, workers, pin_memory=device.type == "cuda"):
                found = by_size(lambda same: embedder(same.to(device, non_blocking=True)), images)
                vectors.append(found.float().cpu())
                done += len(images)
                if progress is not None:
                    progress(done, len(catalog))
    finally:
        embedder.train(training)
    return torch.cat(vectors).clone()  # outside inference mode, so that autograd may use them
