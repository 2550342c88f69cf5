"""Pretrained models: timm models as published, and packages that `shortlist export` wrote."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
from safetensors import SafetensorError
from safetensors.torch import load_file

from shortlist.data import FitTransform, TestTransform, Transform
from shortlist.errors import ModelError, RunError
from shortlist.files import file_digest, read_json
from shortlist.model import ClassToken, Embedder
from shortlist.model.embedder_config import RESERVED
from shortlist.model.state_dict import load_completely
from shortlist.model.weights import reachable
from shortlist.seeds import seeded

TRANSFORMS: dict[str, type[TestTransform] | type[FitTransform]] = {"square": TestTransform, "fit": FitTransform}
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # of a package
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
TIMM = "timm:"  # prefix that distinguishes timm models from runs and packages

OpenedModel = tuple[Embedder, Transform, tuple[float, ...]]  # the embedder in evaluation mode, its transform and scales


def open_pretrained(
    name: str, pretrained: bool | str | Path, pooling: str | None, image_size: int | None
) -> OpenedModel:
    """Open a timm model by name, a package in a folder, or a package on the Hugging Face Hub (`OWNER/NAME`).

    See `Encoder.from_pretrained` for the arguments and errors.
    """
    if not is_timm(name) and Path(name).is_dir():
        return _open_package(Path(name))
    if not is_timm(name) and "/" in name:
        return _open_package(_download(name))
    name, _, weights = name.removeprefix(TIMM).partition("@")
    source = pretrained if not weights else weights != "none" and weights
    with seeded(0) if weights == "none" else nullcontext():  # the same vectors each time
        embedder = Embedder(name, None, pooling or "average", False, pretrained=source, image_size=image_size).eval()
    if pooling is None and embedder.layout.class_token:
        embedder.pooling, embedder.config = ClassToken(), replace(embedder.config, pooling="token")
    return embedder, square_transform(embedder), (1.0,)


def is_timm(name: str) -> bool:
    """Return whether a name denotes a timm model: `timm:NAME`, or `timm:NAME@WEIGHTS`."""
    return name.startswith(TIMM)


def is_pretrained(name: Path | str) -> bool:
    """Return whether a name denotes a timm model, a folder with a package, or a package on the Hugging Face Hub.

    RUNS/NAME is not taken as a name on the Hub if the folder RUNS exists: it is probably a misspelled path of a run.
    """
    path = Path(name)
    on_hub = _HUB_NAME.fullmatch(str(name)) and not path.parent.exists()
    return is_timm(str(name)) or (path / CONFIG).is_file() or bool(on_hub)


def square_transform(
    embedder: Embedder, size: int | None = None, resize: int | None = None, interpolation: str | None = None
) -> TestTransform:
    """Return the transform to squares. The default values are those of the backbone.

    Args:
        embedder: Embedder of the images.
        size: Side of the square.
        resize: Length of the shorter side before the square is cropped.
        interpolation: `bilinear` or `bicubic`.
    """
    native = embedder.data_config
    size = size or native.input_size[-1]
    kind = interpolation or ("bicubic" if native.interpolation == "bicubic" else "bilinear")
    return TestTransform(size, resize or round(size / native.crop_pct), kind)


def _open_package(folder: Path) -> OpenedModel:
    """Build the embedder of a package, without executing its load.py."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {CONFIG} and {WEIGHTS}: it is not a package that shortlist exported.")
    try:
        config: dict[str, Any] = read_json(folder / CONFIG, dict[str, Any])
        if not str(config["made_by"]).startswith("shortlist "):
            raise KeyError("made_by")
        if config["weights_sha256"] != file_digest(folder / WEIGHTS):
            raise ValueError(f"the contents of {WEIGHTS} differ from what was exported")
        tensors = load_file(folder / WEIGHTS)
        preprocessing: dict[str, Any] = dict(config["preprocessing"])
        kind = TRANSFORMS[preprocessing.pop("kind")]
        del preprocessing["reducing_gap"]  # the same for all images
        transform = kind(**preprocessing)
        settings = {name: config[name] for name in ("pooling", "layer_norm", "l2_pooled", "mean", "std")}
        settings["dim"] = config["dim"] if "linear.weight" in tensors else None
        options = {name: value for name, value in config["backbone_options"].items() if name not in RESERVED}
        name, scales = str(config["backbone"]), tuple(config["scales"])
    except (OSError, RunError) as error:
        raise ModelError(str(error)) from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder} is not a package that shortlist exported, or its {CONFIG} is damaged: {error!r}"
        ) from error
    if ":" in name:  # would import and call a function that the package names
        raise ModelError(f"{folder} names the backbone {name!r}, which is not a timm model.")
    embedder = Embedder(name, **settings, backbone_args=options, image_size=transform.size)
    load_completely(embedder, tensors, f"the weights in {folder} are not those of {name!r} with this configuration")
    return embedder.eval(), transform, scales


def _download(name: str) -> Path:
    """Download the weights and the configuration of a package, or find them in the local cache."""
    online = reachable(huggingface_hub.hf_hub_url(name, CONFIG))  # checked first: otherwise, retries take a minute
    try:
        files = [CONFIG, WEIGHTS]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files, local_files_only=not online))
    except Exception as error:  # the library raises many kinds
        problem = str(error).strip().partition("\n")[0]
        if not online:  # the text of the library is about its own options
            problem = "it cannot be reached, and no earlier download was found. Check the name and the connection."
        raise ModelError(
            f"The folder {name} does not exist, and no package of this name can be downloaded from the Hugging "
            f"Face Hub: {problem}"
        ) from error
