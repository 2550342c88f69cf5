"""What a file says of itself: enough to use it without shortlist."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shortlist import __version__
from shortlist.data.transforms import REDUCING_GAP
from shortlist.encoding import Encoder

FORMAT = 1
INPUT, OUTPUT = "images", "vectors"
KEY = "shortlist"  # of an ONNX file's metadata; TorchScript and torch.export files have it as shortlist.json


def preprocessing(encoder: Encoder) -> dict[str, Any]:
    """What `see` needs to know."""
    transform = encoder.transform
    settings = {name: value for name, value in asdict(transform).items() if name != "flip"}  # type: ignore[call-overload]
    return {"kind": "fit" if transform.size is None else "square", **settings, "reducing_gap": REDUCING_GAP}


def describe(encoder: Encoder, check: dict[str, Any] | None = None) -> dict[str, Any]:
    """Input, output, what to do with an image before, and what was measured of the file."""
    config = encoder.embedder.config
    sides = ["height", "width"] if encoder.transform.size is None else [encoder.transform.size] * 2
    return {
        "format": FORMAT,
        "made_by": f"shortlist {__version__}",
        "fingerprint": encoder.fingerprint,
        "input": {"name": INPUT, "dtype": "uint8", "shape": ["batch", 3, *sides], "channels": "RGB"},
        "preprocessing": preprocessing(encoder),
        "in_the_graph": {"mean": config.mean, "std": config.std, "scales": list(encoder.scales)},
        "output": {"name": OUTPUT, "dtype": "float32", "shape": ["batch", encoder.dim], "length": 1},
        "check": check,
    }
