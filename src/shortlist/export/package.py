"""Packages: folders with weights, configuration, model card, and code that loads the model with timm and torch."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from typing import Any

import timm
import torch

from shortlist.data.images import IMAGE_FORMATS
from shortlist.encoding import Encoder
from shortlist.encoding.conversion import Model, Samples, verify
from shortlist.encoding.pretrained import CONFIG, WEIGHTS
from shortlist.errors import ModelError, RunError
from shortlist.export.metadata import describe_export, preprocess
from shortlist.export.model_card import model_card
from shortlist.export.source import ExportSource
from shortlist.files import atomic_folder, check_writable, file_digest, parse_json, read_text, write_json
from shortlist.model import Embedder, GeM, MultiScale
from shortlist.model.state_dict import write_tensors

TOLERANCE = 1e-5
CODE, CARD = "load.py", "README.md"
PACKAGE_FILES = WEIGHTS, CONFIG, CODE, CARD


def write_package(
    folder: Path,
    encoder: Encoder,
    samples: Samples,
    source: ExportSource,
    license: str | None,  # noqa: A002
) -> dict[str, Any]:
    """Write and verify the files of a package, then move them into the folder.

    The files of an existing package are replaced; other files in its folder (such as .git) are kept.

    Returns:
        The result of `verify`.

    Raises:
        RunError: The folder contains something other than a package.
        ModelError: The backbone is not a timm model, or the vectors of load.py differ from those of the run.
    """
    check_package_folder(folder)
    if encoder.embedder.config.returns_vectors:
        name = encoder.embedder.config.backbone
        raise ModelError(f"A package is loaded with timm, which does not have {name}. Use another format.")
    with atomic_folder(folder) as new:
        _write_model(new, encoder, None)
        check = verify(_open_package(new), samples, TOLERANCE, "package's")
        _write_model(new, encoder, check)
        (new / CARD).write_text(model_card(encoder, source, check, license), encoding="utf-8")
        if folder.exists():
            for name in PACKAGE_FILES:
                (new / name).replace(folder / name)
    return check


def check_package_folder(folder: Path) -> None:
    """Check that a package can be written to a folder.

    Raises:
        RunError: The folder contains something other than a package.
        ConfigError: The folder cannot be created or written to.
    """
    if folder.exists() and not _is_replaceable(folder):
        raise RunError(f"{folder} contains something other than a package of shortlist. Choose a new or empty folder.")
    check_writable(folder / CONFIG)


def _is_replaceable(folder: Path) -> bool:
    if folder.is_dir() and not any(folder.iterdir()):
        return True
    try:
        found = parse_json(read_text(folder / CONFIG), folder / CONFIG)  # a damaged package can be replaced as well
    except RunError:
        return False
    return isinstance(found, dict) and str(found.get("made_by")).startswith("shortlist ")


def _write_model(folder: Path, encoder: Encoder, check: dict[str, Any] | None) -> None:
    write_tensors(folder / WEIGHTS, encoder.embedder.state_dict(), {"format": "pt"})
    config = {**_package_config(encoder, check), "weights_sha256": file_digest(folder / WEIGHTS)}
    write_json(folder / CONFIG, config)
    (folder / CODE).write_text(load_code(encoder), encoding="utf-8")


def _package_config(encoder: Encoder, check: dict[str, Any] | None) -> dict[str, Any]:
    """Return the content of config.json: the description of exported files, and how the network is built."""
    embedder, config = encoder.embedder, encoder.embedder.config
    description = describe_export(encoder, check)
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


def _open_package(folder: Path) -> Model:
    """Run load.py as users will, and return its `embed`."""
    try:
        with torch.random.fork_rng(devices=[]):  # timm initialises random weights, which are then replaced
            embed: Model = runpy.run_path(str(folder / CODE))["embed"]
    except Exception as error:  # the code is generated for any timm backbone, but tested with a few
        raise ModelError(f"The package cannot be loaded with timm alone ({error}), so it was not written.") from error
    return embed


def load_code(encoder: Encoder) -> str:
    """Generate load.py: only the operations that this encoder's network needs, and `preprocess`."""
    network, body = encoder.network, "".join(f"    {line}\n" for line in _forward_lines(encoder.embedder))
    if isinstance(network, MultiScale):
        power = network.power
        mean = "x.mean(0)" if power == 1 else f"x.double().pow({power}).mean(0).pow(1 / {power})"
        body = f"{_SCALES_CODE}    return F.normalize({mean}.float())\n\n\ndef vectors(x):\n{body}"
    start = _START_CODE.replace("FORMATS", str(IMAGE_FORMATS))
    return f"{start}{body}\n\n{inspect.getsource(preprocess)}{_MAIN_CODE}"


def _forward_lines(embedder: Embedder) -> list[str]:
    """Generate the lines that map normalised images `x` to vectors."""
    layout, config, pooling = embedder.layout, embedder.config, embedder.pooling
    positions = "1" if layout.tokens else "(2, 3)"
    lines = [f"x = {'backbone' if layout.from_forward else 'backbone.forward_features'}(x)"]
    if layout.channels_last:
        lines.append("x = x.permute(0, 3, 1, 2)")
    if layout.prefix_tokens and config.pooling != "token":
        lines.append(f"x = x[:, {layout.prefix_tokens}:]  # patch tokens")
    if isinstance(pooling, GeM):
        lines.append('p = weights["pooling.p"].double()')
    gem = f"x.double().clamp(min={getattr(pooling, 'eps', None)}).pow(p).mean({positions}).pow(1 / p).float()"
    pools = {"gem": gem, "average": f"x.mean({positions})", "max": f"x.amax({positions})", "token": "x[:, 0]"}
    lines.append(f"x = {pools[config.pooling]}")
    if config.layer_norm:
        lines.append('x = F.layer_norm(x, x.shape[1:], weights["layer_norm.weight"], weights["layer_norm.bias"])')
    if config.l2_pooled:
        lines.append("x = F.normalize(x)")
    if config.dim is not None:
        lines.append('x = F.linear(x, weights["linear.weight"], weights["linear.bias"])')
    return [*lines, "return F.normalize(x)"]


_START_CODE = '''\
"""Map images to unit vectors with timm, torch and Pillow.

In Python: `embed(preprocess(Image.open("one.jpg", formats=formats), config["preprocessing"])[None])`. On the command
line, `python load.py ONE.jpg OTHER.jpg ...` prints the matrix of cosine similarities of the images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch.nn import functional as F

folder = Path(__file__).parent
config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
weights = load_file(folder / "model.safetensors")
backbone = timm.create_model(config["backbone"], **config["backbone_options"]).eval()
backbone.load_state_dict({name[9:]: weights[name] for name in weights if name.startswith("backbone.")})
mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
Image.init()
# For other formats, such as EPS, Pillow would start external programs.
formats = [name for name in FORMATS if name in Image.OPEN]


@torch.inference_mode()
def embed(images):
    """Map uint8 images, an array or a tensor (n, 3, height, width), to unit vectors (n, d)."""
    x = (torch.as_tensor(images) / 255 - mean) / std
'''
_SCALES_CODE = """\
    sizes = [[max(1, int(side * scale)) for side in x.shape[2:]] for scale in config["scales"]]
    x = torch.stack([vectors(F.interpolate(x, size, mode="bilinear")) for size in sizes])
"""
_MAIN_CODE = """

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python load.py ONE.jpg OTHER.jpg ...")
    images = [preprocess(Image.open(path, formats=formats), config["preprocessing"]) for path in sys.argv[1:]]
    found = torch.cat([embed(image[None]) for image in images])
    print((found @ found.T).numpy().round(4))
"""
