"""Runs that take less than a second, and how to compare them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from shortlist.config import RunConfig, read_config
from shortlist.files import write_json
from shortlist.training import RunFolder
from tests.processes import Commands, Running

RECIPE = """
name: tiny
data: {source: images, workers: 0, validation: half}
images: {size: 32}
model:
  backbone: test_resnet
  backbone_args: {layers: [1, 1, 0, 0], channels: [16, 24, 24, 24]}
  weights: none
  dim: 8
batch: {size: 6, per_class: 3, chunk_size: 4}
optimizer: {lr: 1e-3}
training: {epochs: 3}
evaluation: {bootstrap: 20, before: false}
tracking: []
"""
CLASSES, IMAGES = 12, 6  # of each
FASTEST_MODEL = "model={backbone: test_vit, backbone_args: {depth: 1}, weights: none, dim: 8}"
STEPS_PER_EPOCH = 3  # 6 of the classes test, 3 validate, and 3 train with two groups of 3 images each


def class_folders(root: Path, classes: int = CLASSES, images: int = IMAGES, seed: int = 0) -> Path:
    """Write images of noisy patterns, one pattern per class, in folders whose names contain a space."""
    random = np.random.default_rng(seed)
    for number in range(classes):
        folder = root / f"class {number:02}"
        folder.mkdir(parents=True)
        pattern = random.integers(0, 256, (4, 4, 3))
        for image in range(images):
            noisy = (pattern + random.normal(0, 60, (4, 4, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).resize((36, 36), Image.Resampling.NEAREST).save(folder / f"{image}.png")
    return root


def config(source: Path | str, *overrides: str) -> RunConfig:
    return read_config(RECIPE, "tiny", [f"data.source={json.dumps(str(source))}", *overrides])


def fast_config(source: Path | str, *overrides: str) -> RunConfig:
    """A config with a model that trains twice as fast."""
    return config(source, FASTEST_MODEL, *overrides)


def weights(folder: RunFolder | Path) -> dict[str, Tensor]:
    path = folder if isinstance(folder, Path) else folder.path
    return load_file(path / "embedder.safetensors")


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(_bytes(one[name]), _bytes(other[name])) for name in one)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def records(folder: RunFolder | Path, kind: str = "step") -> list[dict[str, Any]]:
    """Records of metrics.jsonl of one kind, without their speed and digest."""
    path = folder if isinstance(folder, Path) else folder.path
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    left_out = {"images_per_second", "sha256"}
    return [{key: each[key] for key in each if key not in left_out} for each in found if each["kind"] == kind]


def write_config(run: RunFolder, text: str) -> None:
    """Replace config.yaml, as if the run had started with it."""
    run.config_file.write_text(text, encoding="utf-8")
    facts = run.facts().model_copy(update={"config_sha256": hashlib.sha256(text.encode()).hexdigest()})
    write_json(run.facts_file, facts.model_dump())


# Commands that are stopped at a known place

STEP_BEGINS = "shortlist.training.loop", "learning_rate_factor"  # its second argument is the number of completed steps


def wait_where(condition: str, module: str, function: str) -> str:
    """Python code that lets a function wait if a condition on its `args` holds.

    It creates the file `here` in the current folder, and waits for the file `go`.
    """
    return f"""
import importlib, pathlib, time
module = importlib.import_module({module!r})
real = getattr(module, {function!r})
def waiting(*args, **kwargs):
    if {condition}:
        pathlib.Path("here").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.005)
    return real(*args, **kwargs)
setattr(module, {function!r}, waiting)
"""


def kill_where(waits: str, commands: Commands, home: Path, *args: str | Path) -> None:
    """Run a command with code of `wait_where`, and kill it there."""
    running = commands.start(*args, cwd=home, before=waits)
    assert running.kill((home / "here").exists) == -signal.SIGKILL
    (home / "here").unlink()


def interrupt_where(waits: str, commands: Commands, home: Path, *args: str | Path) -> Running:
    """Run a command with code of `wait_where`, and press Ctrl-C there; it finishes its step."""
    running = commands.start(*args, cwd=home, before=waits)
    running.until((home / "here").exists)
    os.kill(running.pid, signal.SIGINT)
    running.until(lambda: "Stopping after this step" in running.out)
    (home / "go").touch()
    running.wait()
    for name in ("here", "go"):
        (home / name).unlink()
    return running
