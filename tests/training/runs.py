"""Runs that take a second, and how to compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from shortlist.config import RunConfig, read_config
from shortlist.training import RunFolder

RECIPE = """
name: tiny
data: {source: images, workers: 0, validation: half}
images: {size: 32}
model: {backbone: test_efficientnet, weights: none, dim: 8}
batch: {size: 6, per_class: 3, chunk_size: 4}
optimizer: {lr: 1e-3}
training: {epochs: 3}
evaluation: {bootstrap: 20, before: false}
"""
CLASSES, IMAGES = 12, 6  # of each
STEPS_AN_EPOCH = 3  # 6 of the classes test, 3 validate, and 3 train with two groups of 3 images each


def class_folders(root: Path, classes: int = CLASSES, images: int = IMAGES, seed: int = 0) -> Path:
    """Images whose class can be seen through noise, in folders with names that want quoting."""
    random = np.random.default_rng(seed)
    for number in range(classes):
        folder = root / f"class {number:02}"
        folder.mkdir(parents=True)
        pattern = random.integers(0, 256, (4, 4, 3))
        for image in range(images):
            noisy = (pattern + random.normal(0, 60, (4, 4, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).resize((36, 36), Image.Resampling.NEAREST).save(folder / f"{image}.png")
    return root


def config(source: Path, *overrides: str) -> RunConfig:
    return read_config(RECIPE, "tiny", [f"data.source={json.dumps(str(source))}", *overrides])


def weights(folder: RunFolder | Path) -> dict[str, Tensor]:
    path = folder if isinstance(folder, Path) else folder.path
    return load_file(path / "embedder.safetensors")


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(_bytes(one[name]), _bytes(other[name])) for name in one)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def records(folder: RunFolder | Path, kind: str = "step") -> list[dict[str, Any]]:
    """Of metrics.jsonl, without how long things took."""
    path = folder if isinstance(folder, Path) else folder.path
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: each[key] for key in each if key != "images_per_second"} for each in found if each["kind"] == kind]
