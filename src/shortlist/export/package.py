"""A package: a folder with all that others need to use a model, and to know what it is."""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import Tensor

from shortlist.encoding import Encoder
from shortlist.errors import ModelError, RunError
from shortlist.export.card import model_card
from shortlist.export.check import Run, check
from shortlist.export.description import describe
from shortlist.export.load_code import load_code
from shortlist.export.origin import Origin, Samples
from shortlist.files import check_writable

TOLERANCE = 1e-5
WEIGHTS, CONFIG, CODE, CARD = "model.safetensors", "config.json", "load.py", "README.md"


def write_package(
    folder: Path,
    encoder: Encoder,
    samples: Samples,
    origin: Origin,
    license: str | None,  # noqa: A002
) -> dict[str, Any]:
    """Write the files of a package, check them, and put them into the folder, each in one step.

    A package that is there is replaced; what else lies in its folder (such as .git) stays.

    Returns:
        What was measured.

    Raises:
        RunError: the folder holds something else than a package.
        ModelError: load.py gives other vectors than the run.
    """
    check_package(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        new = Path(temporary)
        _write_model(new, encoder, None)
        measured = check(_opened(new), samples, TOLERANCE, "package's")
        _write_model(new, encoder, measured)
        (new / CARD).write_text(model_card(encoder, origin, measured, license), encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for name in (WEIGHTS, CONFIG, CODE, CARD):
            (new / name).replace(folder / name)
    return measured


def _write_model(folder: Path, encoder: Encoder, measured: dict[str, Any] | None) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in encoder.embedder.state_dict().items()}
    # To a file, safetensors writes itself: for its user alone, and its error is no OSError where the disk is full.
    (folder / WEIGHTS).write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))
    config = json.dumps(package_config(encoder, measured), indent=2) + "\n"
    (folder / CONFIG).write_text(config, encoding="utf-8")
    (folder / CODE).write_text(load_code(encoder), encoding="utf-8")


def package_config(encoder: Encoder, measured: dict[str, Any] | None) -> dict[str, Any]:
    """What a file says of itself, and how the network is built."""
    embedder, config = encoder.embedder, encoder.embedder.config
    description = describe(encoder, measured)
    return {
        "backbone": config.backbone,
        "backbone_options": embedder.backbone_options,
        "timm": timm.__version__,
        "pooling": config.pooling,
        "layer_norm": config.layer_norm,
        "l2_pooled": config.l2_pooled,
        "dim": embedder.dim,
        **description.pop("in_the_graph"),
        **description,
    }


def _opened(folder: Path) -> Run:
    """What load.py gives, run as others will."""
    try:
        with torch.random.fork_rng(devices=[]):  # timm draws weights first, which those of the package replace
            embed = runpy.run_path(str(folder / CODE))["embed"]
    except Exception as error:  # the code is written for every backbone of timm, and tried for some
        raise ModelError(f"timm alone does not load the package ({error}), so it was not written") from error

    def run(images: Tensor) -> Tensor:
        return embed(images)  # type: ignore[no-any-return]

    return run


def check_package(folder: Path) -> None:
    """See that a package can be written.

    Raises:
        RunError: the folder holds something else.
        ConfigError: it cannot be made, or written to.
    """
    if folder.exists() and not _replaceable(folder):
        raise RunError(f"{folder} holds something else than a package of shortlist: choose a new or empty folder")
    check_writable(folder / CONFIG)


def _replaceable(folder: Path) -> bool:
    if folder.is_dir() and not any(folder.iterdir()):
        return True
    try:
        return str(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["made_by"]).startswith("shortlist ")
    except (OSError, ValueError, KeyError, TypeError):
        return False
