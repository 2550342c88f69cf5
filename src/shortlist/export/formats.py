"""Files that contain a network with its weights: ONNX, TorchScript and torch.export."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.jit._trace import TracerWarning

from shortlist.encoding import Encoder
from shortlist.encoding.conversion import Model, example_images, exported_program
from shortlist.encoding.onnx_network import KEY, OnnxFormat

DESCRIPTION_FILE = f"{KEY}.json"  # extra file of TorchScript and torch.export


class Format(Protocol):
    """A file format for a network with its weights. The constructor converts the network."""

    tolerance: float

    def __init__(self, encoder: Encoder, network: nn.Module) -> None: ...

    def save(self, path: Path, description: dict[str, Any]) -> None:
        """Write the file, with a description in its metadata."""

    @staticmethod
    def open(path: Path) -> Model:
        """Open the file with its own runtime."""


class TorchScriptFormat:
    """TorchScript, by tracing."""

    tolerance = 1e-5

    def __init__(self, encoder: Encoder, network: nn.Module) -> None:
        with _ignore_torchscript_warnings(), torch.no_grad():
            self.traced = torch.jit.trace(network, example_images(encoder), check_trace=False)  # type: ignore[no-untyped-call]

    def save(self, path: Path, description: dict[str, Any]) -> None:
        content = io.BytesIO()  # when torch writes to a path, a full disk is not an OSError
        with _ignore_torchscript_warnings():
            torch.jit.save(self.traced, content, _extra_files={DESCRIPTION_FILE: json.dumps(description)})
        path.write_bytes(content.getbuffer())

    @staticmethod
    def open(path: Path) -> Model:
        with _ignore_torchscript_warnings():
            return torch.jit.load(path)  # type: ignore[no-untyped-call, no-any-return]


class TorchExportFormat:
    """The format of `torch.export`."""

    tolerance = 1e-5

    def __init__(self, encoder: Encoder, network: nn.Module) -> None:
        self.program = exported_program(encoder, network)

    def save(self, path: Path, description: dict[str, Any]) -> None:
        content = io.BytesIO()  # torch accepts only paths that end with .pt2, and temporary paths do not
        torch.export.save(self.program, content, extra_files={DESCRIPTION_FILE: json.dumps(description)})
        path.write_bytes(content.getbuffer())

    @staticmethod
    def open(path: Path) -> Model:
        return torch.export.load(io.BytesIO(path.read_bytes())).module()


EXPORT_FORMATS: Mapping[str, type[Format]] = {
    "ONNX": OnnxFormat,
    "TorchScript": TorchScriptFormat,
    "torch.export": TorchExportFormat,
}


@contextmanager
def _ignore_torchscript_warnings() -> Iterator[None]:
    """Ignore the deprecation of TorchScript, and warnings about sizes that a trace fixes: `verify` detects these."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        yield
