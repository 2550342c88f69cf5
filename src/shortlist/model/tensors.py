"""Named tensors in files, read without running anything in them, and what makes two sets of them differ."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from shortlist.errors import ModelError

Tensors = dict[str, Tensor]


def read_tensors(file: Path) -> Tensors:
    """The tensors of a .safetensors file, or of any other that `torch.save` wrote, in the file's order.

    A dictionary nested under `state_dict` or `model` is found, prefixes of wrappers (`module.`, `_orig_mod.`) are
    taken off. Pickles are read with `weights_only`: a file that wants to run code is refused.
    """
    if not file.is_file():
        raise ModelError(f"no weights file at {file}")
    try:
        if file.suffix == ".safetensors":
            content: object = safetensors.torch.load_file(file)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # training scripts keep their options beside
                content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file} is damaged, or holds more than tensors and would run code on loading, which is refused: "
            "save only the model's state_dict(), best as .safetensors"
        ) from error
    except Exception as error:
        raise ModelError(f"{file} cannot be read, it is damaged or no weights file: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ModelError(f"{file} does not hold a model's state_dict (names and tensors)")
    return {str(name).removeprefix("module.").removeprefix("_orig_mod."): value for name, value in content.items()}


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """How the names and shapes that were found differ from those expected; None where they do not.

    BatchNorm's counters of batches, which old files lack and nothing here uses, are not compared.

    >>> differences({"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(3), "c": torch.zeros(1)})
    '1 missing (b), 1 unexpected (c), 1 of another shape (a: (2,) expected, (3,) found)'
    """
    wanted, present = names(expected), names(found)
    missing = [name for name in wanted if name not in present]
    unexpected = [name for name in present if name not in wanted]
    shapes = [
        f"{name}: {tuple(expected[name].shape)} expected, {tuple(found[name].shape)} found"
        for name in wanted
        if name in present and expected[name].shape != found[name].shape
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    return ", ".join(f"{len(which)} {kind} ({_first(which)})" for kind, which in kinds if which) or None


def fill(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy tensors into a module, all of them or none; `what` begins the message where they do not fit."""
    problem = differences(module.state_dict(), tensors)
    if problem is not None:
        raise ModelError(f"{what}: {problem}")
    module.load_state_dict(tensors, strict=False)  # only BatchNorm's counters can be missing


def names(tensors: Mapping[str, Tensor]) -> dict[str, None]:
    """The names without BatchNorm's counters, in order."""
    return {name: None for name in tensors if not name.endswith("num_batches_tracked")}


def _first(which: list[str], number: int = 3) -> str:
    return ", ".join(which[:number]) + (", ..." if len(which) > number else "")
