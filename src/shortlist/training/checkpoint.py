"""Training checkpoints: tensors and JSON in one safetensors file, written atomically and without pickle."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from shortlist.digests import tensors_digest
from shortlist.errors import RunError
from shortlist.files import VERSION, atomic_replace, check_version
from shortlist.model.state_dict import read_tensors, write_tensors

KEPT = 2  # the last checkpoint, and the one before in case the last is damaged


@dataclass(frozen=True)
class TrainingState:
    """State of a run after `step` steps."""

    step: int
    tensors: dict[str, Tensor]  # by dotted names
    facts: dict[str, Any]  # JSON-compatible

    def with_prefix(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with a prefix, by the rest of their names."""
        return {name[len(prefix) :]: each for name, each in self.tensors.items() if name.startswith(prefix)}


def save_state(folder: Path, state: TrainingState) -> Path:
    """Write a checkpoint, then delete older checkpoints and the incomplete files of killed processes.

    Returns:
        Path of the checkpoint.

    Raises:
        RunError: The checkpoint cannot be written; earlier checkpoints are unchanged.
    """
    path = folder / f"step-{state.step:08}.safetensors"
    facts = json.dumps({"format": VERSION, "step": state.step, **state.facts})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as temporary:
            write_tensors(temporary, state.tensors, {"facts": facts, "digest": tensors_digest(state.tensors, facts)})
    except OSError as error:
        raise RunError(
            f"The checkpoint of step {state.step} cannot be written to {folder}: {error}. Earlier checkpoints are "
            "unchanged. Fix the cause, then resume with: shortlist train --resume RUN"
        ) from None
    delete_old_states(folder)
    return path


def delete_old_states(folder: Path) -> None:
    """Delete all checkpoints but the newest ones, and the incomplete files of killed processes."""
    for old in [*_checkpoints(folder)[KEPT:], *folder.glob(".step-*")]:
        old.unlink(missing_ok=True)


def latest_state(folder: Path) -> TrainingState | None:
    """Read the newest intact checkpoint, and warn about each damaged one that is skipped.

    Returns:
        The state, or None if there is no checkpoint.

    Raises:
        RunError: There are checkpoints, but all of them are damaged, or a later version of shortlist has written one.
    """
    found = _checkpoints(folder)
    for path in found:
        try:
            return _read(path)
        except (OSError, SafetensorError, KeyError, ValueError, RecursionError, TypeError) as error:
            warnings.warn(f"The checkpoint {path} is damaged ({error}); using the previous one.", stacklevel=2)
    if found:
        raise RunError(f"All checkpoints in {folder} are damaged. Restore a copy of one, or start a new run.")
    return None


def _read(path: Path) -> TrainingState:
    tensors, metadata = read_tensors(path)
    if tensors_digest(tensors, metadata["facts"]) != metadata["digest"]:
        raise ValueError("its contents differ from what was written")
    facts = json.loads(metadata["facts"])
    check_version(facts.pop("format"), path)
    return TrainingState(facts.pop("step"), tensors, facts)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer as tensors with names such as `0.exp_avg`, without its hyper-parameters."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{key}": torch.as_tensor(value) for index, each in state.items() for key, value in each.items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the state of an optimizer from `optimizer_tensors`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        if tensor.shape == parameter.shape:  # restore the memory layout too, since rounding depends on it
            tensor = torch.empty_like(parameter, dtype=tensor.dtype, device="cpu").copy_(tensor)
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
