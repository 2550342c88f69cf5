"""Save and load an embedder as `embedder.safetensors` and `embedder.json`, without pickle.

The weights file is complete by itself: its header holds the configuration and a SHA-256 digest of everything, so the
atomic replacement of this one file saves the embedder. The JSON file repeats the configuration for people and tools.
It is replaced first: if saving was interrupted between the two, its digest differs from that of the weights file, and
the older weights remain valid with their own configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from shortlist.digests import tensors_digest
from shortlist.errors import ModelError
from shortlist.files import atomic_replace, read_regular_file, remove_unfinished, write_text_atomically
from shortlist.model.state_dict import Tensors, read_tensors, write_tensors

FORMAT = 1
WEIGHTS, CONFIG = "embedder.safetensors", "embedder.json"


class SavedEmbedder(NamedTuple):
    """Contents of a folder that `write` wrote."""

    config: dict[str, Any]
    tensors: Tensors
    sha256: str  # digest of both


def write(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Save tensors and configuration, and return the folder. An earlier save stays valid until this one is complete."""
    description = {"format": FORMAT, "sha256": digest(state, config), "config": config}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            remove_unfinished(folder / name)
        with atomic_replace(folder / WEIGHTS) as weights:
            write_tensors(weights, state, {"embedder": json.dumps(description)})
            write_text_atomically(folder / CONFIG, json.dumps(description, indent=2) + "\n")
    except OSError as error:
        raise ModelError(f"The model cannot be written to {folder}: {error}") from error
    return folder


def read(folder: Path) -> SavedEmbedder:
    """Read the files that `write` wrote, and verify their digest.

    Raises:
        ModelError: A file is missing, damaged, edited, or of an unknown format.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(f"{name} not found in {folder}: give a folder that contains {CONFIG} and {WEIGHTS}.")
    file = folder / WEIGHTS
    try:
        tensors, metadata = read_tensors(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is damaged ({error}): use another checkpoint, or save it again.") from error
    if "embedder" not in metadata:
        raise ModelError(f"{file} was not saved by an Embedder: its header has no configuration.")
    description = _parse_description(metadata["embedder"], file)
    config, sha256 = description["config"], description["sha256"]
    if digest(tensors, config) != sha256:
        raise ModelError(f"{file} is damaged (its contents differ from what was saved): use another checkpoint.")
    readable = _parse_description(_read_text(folder / CONFIG), folder / CONFIG)
    if readable["sha256"] == sha256 and readable["config"] != config:
        raise ModelError(
            f"{folder / CONFIG} was edited after saving, but the configuration belongs to the weights: undo the change."
        )
    return SavedEmbedder(config, tensors, sha256)


def digest(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a configuration and of tensors."""
    return tensors_digest(tensors, json.dumps(config, sort_keys=True))


def _parse_description(text: str, file: Path) -> dict[str, Any]:
    try:
        description = json.loads(text)
        version, _, _ = description["format"], description["sha256"], dict(description["config"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is damaged, or not the configuration of an embedder ({error!r}).") from error
    if version != FORMAT:
        raise ModelError(
            f"{file} has format {version}, and this version of shortlist reads format {FORMAT}: update shortlist."
        )
    return dict(description)


def _read_text(file: Path) -> str:
    try:
        return read_regular_file(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
