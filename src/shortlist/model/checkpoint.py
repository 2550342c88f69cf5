"""An embedder on disk: `embedder.safetensors` and `embedder.json`, never pickle.

The weights file is complete by itself: its header holds the configuration and a SHA-256 of all, so that the
one replacing that puts it in place is the whole act of saving. The JSON is the same configuration for people and
tools. It is replaced first; where a save ended between the two, its hash is not that of the weights, and the weights
(the older ones, whole) stand with their own configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shortlist.errors import ModelError
from shortlist.model.tensors import Tensors

FORMAT = 1
WEIGHTS, CONFIG = "embedder.safetensors", "embedder.json"


def write(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Save tensors and configuration; return the folder. What was saved there before stays until this is whole."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    description = {"format": FORMAT, "sha256": digest(tensors, config), "config": config}
    weights, readable = folder / (WEIGHTS + ".tmp"), folder / (CONFIG + ".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, weights, metadata={"embedder": json.dumps(description)})
        weights.chmod(0o644)  # safetensors writes for its user alone
        readable.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        for file in (weights, readable):
            _to_disk(file)
        readable.replace(folder / CONFIG)
        weights.replace(folder / WEIGHTS)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        for file in (weights, readable):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        raise ModelError(f"the model cannot be written to {folder}: {error}") from error
    return folder


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """The configuration and the tensors that `write` wrote, checked."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(f"there is no {name} in {folder}: give a folder that holds {CONFIG} and {WEIGHTS}")
    file = folder / WEIGHTS
    try:
        with safe_open(file, framework="pt") as opened:
            header = (opened.metadata() or {}).get("embedder")
            if header is None:
                raise ModelError(f"{file} is not an embedder's: its header has no configuration")
            description = _described(header, file)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is damaged ({error}): use another checkpoint, or save it again") from error
    if digest(tensors, description["config"]) != description["sha256"]:
        raise ModelError(f"{file} is damaged (it does not hold what was saved): use another checkpoint")
    readable = _described(_text(folder / CONFIG), folder / CONFIG)
    if readable["sha256"] == description["sha256"] and readable["config"] != description["config"]:
        raise ModelError(f"{folder / CONFIG} was changed after saving: the configuration belongs to the weights")
    return description["config"], tensors


def digest(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """SHA-256 over the configuration and the tensors' names, types, shapes and bytes."""
    found = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _described(text: str, file: Path) -> dict[str, Any]:
    try:
        description = json.loads(text)
        version, _, _ = description["format"], description["sha256"], description["config"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is damaged or not an embedder's configuration ({error!r})") from error
    if version != FORMAT:
        raise ModelError(f"{file} has format {version}; this version of shortlist reads {FORMAT}: update shortlist")
    return dict(description)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _to_disk(path: Path) -> None:
    """Have the system write a file, or the names in a folder, now: a power cut must not leave an empty file."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
