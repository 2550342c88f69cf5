"""Real embeddings before, during and after training, for `loss.py --sweep --real FOLDER`.

    python benchmarks/real_embeddings.py omniglot FOLDER data.root=DATA model.dim=512
    python benchmarks/real_embeddings.py cars196-lite0-cpu FOLDER data.root=DATA data.on_missing=skip training.epochs=6

Trains the recipe, for half of the epochs and for all of them, and saves the vectors of the training images with their
labels, each time and before any training, as FOLDER/RECIPE-{before,during,after}.pt.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from shortlist.config import RunConfig
from shortlist.encoding.embed import embed_images
from shortlist.model import Embedder
from shortlist.progress import display_for
from shortlist.recipes import open_recipe
from shortlist.training import train
from shortlist.training.evaluation import open_embedder
from shortlist.training.opening import open_images
from shortlist.training.parts import build_embedder, build_transforms

DISPLAY = display_for(sys.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value")
    options = parser.parse_args()
    config = open_recipe(options.recipe, options.settings)
    options.folder.mkdir(parents=True, exist_ok=True)
    half = max(config.training.epochs // 2, 1)
    save(build_embedder(config), config, options.folder / f"{config.name}-before.pt")
    for name, epochs in (("during", half), ("after", config.training.epochs)):
        run = train(
            open_recipe(options.recipe, [*options.settings, f"training.epochs={epochs}"]),
            options.folder / f"{config.name}-{epochs}-epochs",
            DISPLAY,
        )
        save(open_embedder(run), config, options.folder / f"{config.name}-{name}.pt")


def save(embedder: Embedder, config: RunConfig, file: Path) -> None:
    images = open_images(config, DISPLAY).catalog.split("train")
    with DISPLAY.task(f"embedding the training images, {file.stem}") as progress:
        vectors = embed_images(embedder, images, build_transforms(config, embedder)[1], progress=progress)
    torch.save({"vectors": vectors, "labels": torch.as_tensor(images.labels.copy())}, file)
    DISPLAY.message(f"{file}: {tuple(vectors.shape)}")


if __name__ == "__main__":
    main()
