"""Training states on disk: tensors and JSON in one safetensors file, whole or not at all, and never pickle."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shortlist.errors import RunError

KEPT = 2  # the last, and the one before in case the last is damaged


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands after `step` steps."""

    step: int
    tensors: dict[str, Tensor]  # by dotted names
    facts: dict[str, Any]  # what JSON can hold

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with a prefix, by the rest of their names."""
        return {name[len(prefix) :]: each for name, each in self.tensors.items() if name.startswith(prefix)}


def save_state(folder: Path, state: TrainingState) -> Path:
    """Write a checkpoint, and delete those that are no longer needed, and what a killed process left half written.

    Raises:
        RunError: it could not be written; the earlier checkpoints are as they were.
    """
    path = folder / f"step-{state.step:08}.safetensors"
    temporary = folder / f".{path.name}.{os.getpid()}"
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.tensors.items()}
    facts = json.dumps({"step": state.step, **state.facts})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={"facts": facts, "digest": _digest(tensors, facts)})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # safetensors writes for its user alone
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise RunError(
            f"The checkpoint of step {state.step} cannot be written to {folder}: {error}. The earlier ones are "
            "unharmed. Put that right, and go on with shortlist train --resume RUN."
        ) from None
    for old in [*_checkpoints(folder)[KEPT:], *folder.glob(".step-*")]:
        old.unlink(missing_ok=True)
    return path


def latest_state(folder: Path) -> TrainingState | None:
    """The newest checkpoint that is whole; None where there is none. Warns of each damaged one that it passes over.

    Raises:
        RunError: there are checkpoints, and all are damaged.
    """
    found = _checkpoints(folder)
    for path in found:
        try:
            return _read(path)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            warnings.warn(f"The checkpoint {path} is damaged ({error}); the one before is used.", stacklevel=2)
    if found:
        raise RunError(f"All checkpoints in {folder} are damaged. Start a new run, or put back a copy of one.")
    return None


def _read(path: Path) -> TrainingState:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _digest(tensors, metadata["facts"]) != metadata["digest"]:
        raise ValueError("its contents are not those that were written")
    facts = json.loads(metadata["facts"])
    return TrainingState(facts.pop("step"), tensors, facts)


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's state as tensors with names such as `0.exp_avg`; its settings come from the config."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{key}": torch.as_tensor(value) for index, each in state.items() for key, value in each.items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        if tensor.shape == parameter.shape:  # in the parameter's memory layout, as it was: layouts round differently
            tensor = torch.empty_like(parameter, dtype=tensor.dtype, device="cpu").copy_(tensor)
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
