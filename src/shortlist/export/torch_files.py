"""A network as a TorchScript file, or one of torch.export."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.jit._trace import TracerWarning

from shortlist.encoding import Encoder
from shortlist.export.check import Run
from shortlist.export.description import KEY
from shortlist.export.graph import example, exported_program

EXTRA = f"{KEY}.json"  # where both keep what the file says of itself


class TorchScript:
    tolerance = 1e-5

    def __init__(self, encoder: Encoder, network: nn.Module) -> None:
        with _deprecated(), torch.no_grad():
            self.traced = torch.jit.trace(network, example(encoder), check_trace=False)  # type: ignore[no-untyped-call]

    def save(self, path: Path, description: dict[str, Any]) -> None:
        content = io.BytesIO()  # to a file, torch writes itself, and its error is no OSError where the disk is full
        with _deprecated():
            torch.jit.save(self.traced, content, _extra_files={EXTRA: json.dumps(description)})
        path.write_bytes(content.getbuffer())

    @staticmethod
    def open(path: Path) -> Run:
        with _deprecated():
            return torch.jit.load(path)  # type: ignore[no-untyped-call, no-any-return]


class TorchExport:
    tolerance = 1e-5

    def __init__(self, encoder: Encoder, network: nn.Module) -> None:
        self.program = exported_program(encoder, network)

    def save(self, path: Path, description: dict[str, Any]) -> None:
        content = io.BytesIO()  # a file's name would have to end with .pt2, and a temporary one does not
        torch.export.save(self.program, content, extra_files={EXTRA: json.dumps(description)})
        path.write_bytes(content.getbuffer())

    @staticmethod
    def open(path: Path) -> Run:
        return torch.export.load(io.BytesIO(path.read_bytes())).module()


@contextmanager
def _deprecated() -> Iterator[None]:
    """TorchScript is deprecated, and a trace warns of every size that it takes as constant: the check sees that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        yield
