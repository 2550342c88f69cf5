"""Save real embeddings from before, during and after training, for `loss.py --sweep --real FOLDER`.

    python benchmarks/real_embeddings.py omniglot FOLDER data.root=DATA model.dim=512
    python benchmarks/real_embeddings.py cars196-lite0-cpu FOLDER data.root=DATA data.on_missing=skip training.epochs=6

The script trains the recipe twice, for half of its epochs and for all of them. It saves the embeddings and labels of
the training images before training and after each training as FOLDER/RECIPE-{before,during,after}.pt.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from shortlist.batches.memory import reuse_freed_memory
from shortlist.config import RunConfig
from shortlist.encoding.embed import embed_images
from shortlist.model import Embedder
from shortlist.progress import display_for
from shortlist.recipes import open_recipe
from shortlist.training import train_run
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.datasets import open_images
from shortlist.training.run_evaluation import open_embedder

DISPLAY = display_for(sys.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name or file of a recipe")
    parser.add_argument("folder", type=Path, help="folder to save to")
    parser.add_argument("settings", nargs="*", help="overrides of the recipe, as key=value")
    options = parser.parse_args()
    reuse_freed_memory()  # as the command line does
    config = open_recipe(options.recipe, options.settings)
    options.folder.mkdir(parents=True, exist_ok=True)
    half = max(config.training.epochs // 2, 1)
    save(build_embedder(config), config, options.folder / f"{config.name}-before.pt")
    for name, epochs in (("during", half), ("after", config.training.epochs)):
        run = train_run(
            open_recipe(options.recipe, [*options.settings, f"training.epochs={epochs}"]),
            options.folder / f"{config.name}-{epochs}-epochs",
            DISPLAY,
        )
        save(open_embedder(run), config, options.folder / f"{config.name}-{name}.pt")


def save(embedder: Embedder, config: RunConfig, file: Path) -> None:
    images = open_images(config, DISPLAY).catalog.split("train")
    with DISPLAY.task(f"embedding the training images for {file.name}") as progress:
        vectors = embed_images(embedder, images, build_transforms(config, embedder)[1], progress=progress)
    torch.save({"vectors": vectors, "labels": torch.as_tensor(images.labels.copy())}, file)
    DISPLAY.message(f"{file}: {tuple(vectors.shape)}")


if __name__ == "__main__":
    main()
