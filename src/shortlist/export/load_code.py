"""The code of a package's load.py: what timm and torch need to give a encoder's vectors, and no more."""

from __future__ import annotations

import inspect

from shortlist.encoding import Encoder
from shortlist.export.see import see
from shortlist.model import Embedder, GeM, MultiScale

_START = '''\
"""Images to unit vectors with timm, torch and Pillow alone.

In Python: `embed(see(Image.open("one.jpg"), config["preprocessing"])[None])`. From the command line, `python load.py
ONE.jpg OTHER.jpg ...` prints how similar images are: the cosine of each to each.
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


@torch.inference_mode()
def embed(images):
    """uint8 images (n, 3, height, width), an array or a tensor -> unit vectors (n, d)."""
    x = (torch.as_tensor(images) / 255 - mean) / std
'''
_SEVERAL_SCALES = """\
    sizes = [[max(1, int(side * scale)) for side in x.shape[2:]] for scale in config["scales"]]
    x = torch.stack([vectors(F.interpolate(x, size, mode="bilinear")) for size in sizes])
"""
_END = """

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python load.py ONE.jpg OTHER.jpg ...")
    seen = [see(Image.open(path), config["preprocessing"]) for path in sys.argv[1:]]
    found = torch.cat([embed(each[None]) for each in seen])
    print((found @ found.T).numpy().round(4))
"""


def load_code(encoder: Encoder) -> str:
    """The lines that this encoder's network takes, then those of `see`."""
    embedder = encoder.embedder
    steps = [f"    {line}\n" for line in _steps(embedder)]
    network = encoder.network
    if isinstance(network, MultiScale):
        mean = (
            "x.mean(0)" if network.power == 1 else f"x.double().pow({network.power}).mean(0).pow(1 / {network.power})"
        )
        embed = f"{_SEVERAL_SCALES}    return F.normalize({mean}.float())\n"
        code = f"{embed}\n\ndef vectors(x):\n{''.join(steps)}"
    else:
        code = "".join(steps)
    return f"{_START}{code}\n\n{inspect.getsource(see)}{_END}"


def _steps(embedder: Embedder) -> list[str]:
    """From normalised images x to their vectors."""
    layout, config, pooling = embedder.layout, embedder.config, embedder.pooling
    positions = "1" if layout.tokens else "(2, 3)"
    lines = [f"x = {'backbone' if layout.whole else 'backbone.forward_features'}(x)"]
    if layout.maps_last:
        lines.append("x = x.permute(0, 3, 1, 2)")
    if layout.prefix_tokens and config.pooling != "token":
        lines.append(f"x = x[:, {layout.prefix_tokens}:]  # the patches' tokens")
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
