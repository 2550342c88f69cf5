"""State dictionaries: safetensors files, files of other programs, differences, and loading them completely."""

from __future__ import annotations

import argparse
import errno
import pickle
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shortlist.errors import ModelError, shorten_list
from shortlist.files import open_regular_file

Tensors = dict[str, Tensor]


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. Unlike `safetensors`, allow tensors that share memory, and let other users read it.

    Raises:
        OSError: The file cannot be written.
    """
    copies = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    try:
        safetensors.torch.save_file(copies, file, metadata=dict(metadata))
    except SafetensorError as error:  # for example, if the disk is full
        raise OSError(errno.EIO, str(error), str(file)) from error
    file.chmod(0o644)


def read_tensors(file: Path) -> tuple[Tensors, dict[str, str]]:
    """Read a safetensors file, and return its tensors and metadata.

    Raises:
        OSError: The file cannot be read.
        SafetensorError: The file is damaged.
    """
    with open_regular_file(file), safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118


def read_state_dict(file: Path) -> Tensors:
    """Read the tensors in a .safetensors file, or in any file that `torch.save` wrote, in the order of the file.

    A dictionary nested under `state_dict` or `model` is found, and the prefixes `module.` and `_orig_mod.` of wrappers
    are removed. Pickles are read with `weights_only`: a file that would execute code is refused.

    Raises:
        ModelError: The file is missing, damaged, or holds anything other than a state dictionary.
    """
    if not file.is_file():
        raise ModelError(f"The weights file {file} does not exist.")
    try:
        if file.suffix == ".safetensors":
            content: object = safetensors.torch.load_file(file)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # many training scripts save their options
                content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file} is damaged, or holds more than tensors and would execute code when loaded, which is refused: "
            "save only the model's state_dict(), preferably as .safetensors."
        ) from error
    except Exception as error:
        raise ModelError(f"{file} cannot be read; it is damaged or not a weights file: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ModelError(f"{file} does not hold the state_dict of a model (names and tensors).")
    return {str(name).removeprefix("module.").removeprefix("_orig_mod."): value for name, value in content.items()}


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """Describe how names and shapes differ, or return None if they are the same.

    The batch counters of BatchNorm are not compared: old files lack them, and shortlist does not use them.

    Example:
        >>> differences({"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(3), "c": torch.zeros(1)})
        '1 missing (b), 1 unexpected (c), 1 of another shape (a: (2,) expected, (3,) found)'
    """
    wanted, present = tensor_names(expected), tensor_names(found)
    missing = [name for name in wanted if name not in present]
    unexpected = [name for name in present if name not in wanted]
    shapes = [
        f"{name}: {tuple(expected[name].shape)} expected, {tuple(found[name].shape)} found"
        for name in wanted
        if name in present and expected[name].shape != found[name].shape
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    return ", ".join(f"{len(names)} {kind} ({shorten_list(names)})" for kind, names in kinds if names) or None


def load_completely(module: nn.Module, tensors: Mapping[str, Tensor], message: str) -> None:
    """Load tensors into a module: all of them, or none if they do not fit.

    Args:
        module: Module that is changed in place.
        tensors: State dictionary; only the batch counters of BatchNorm may be missing.
        message: Start of the error message if the tensors do not fit.

    Raises:
        ModelError: Names or shapes differ from those of the module.
    """
    problem = differences(module.state_dict(), tensors)
    if problem is not None:
        raise ModelError(f"{message}: {problem}")
    module.load_state_dict(tensors, strict=False)


def tensor_names(tensors: Mapping[str, Tensor]) -> dict[str, None]:
    """Return the names, in order, without the batch counters of BatchNorm."""
    return {name: None for name in tensors if not name.endswith("num_batches_tracked")}
