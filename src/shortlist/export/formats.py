"""Files that contain a network with its weights: ONNX, TorchScript and torch.export."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.jit._trace import TracerWarning

from shortlist.encoding import Encoder
from shortlist.errors import ModelError
from shortlist.export.metadata import INPUT, KEY, OUTPUT
from shortlist.export.source import Model
from shortlist.extras import extra

# Example size for images of any shape: divisible by patch sizes 14, 16 and 32, and not the native square of any ViT.
EXAMPLE_SIZE = (224, 448)
AXES = ("batch", "channels", "height", "width")
MAX_ONNX_BYTES = 2**31 - 2**24  # of weights: a file is one protobuf message of at most 2 GB, which also holds the graph
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


class OnnxFormat:
    """ONNX, with the weights in the same file. The only code that uses onnx and onnxruntime."""

    tolerance = 1e-4

    def __init__(self, encoder: Encoder, network: nn.Module) -> None:
        with extra("export", "An ONNX file"):
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        size = sum(tensor.nbytes for tensor in network.state_dict().values())
        if size > MAX_ONNX_BYTES:
            raise ModelError(f"an ONNX file holds at most 2 GB, the weights have {size / 1e9:.1f} GB: use `package`")
        program = exported_program(encoder, network)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnx|copyreg)")
            exported = torch.onnx.export(
                program,
                (example_images(encoder),),
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                external_data=False,
                verbose=False,
            )
        assert exported is not None
        self.model = exported.model_proto
        _name_axes(self.model.graph)

    def save(self, path: Path, description: dict[str, Any]) -> None:
        import onnx

        onnx.helper.set_model_props(self.model, {KEY: json.dumps(description)})
        path.write_bytes(self.model.SerializeToString())

    @staticmethod
    def open(path: Path) -> Model:
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

        return run


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


FORMATS: Mapping[str, type[Format]] = {
    "ONNX": OnnxFormat,
    "TorchScript": TorchScriptFormat,
    "torch.export": TorchExportFormat,
}


def plain_network(encoder: Encoder) -> nn.Module:
    """Copy an encoder's network with contiguous tensors, as files do not keep another memory format."""
    copied = Encoder(copy.deepcopy(encoder.embedder), encoder.transform, encoder.scales)
    copied.embedder.memory_format = torch.contiguous_format
    return copied.network.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


def example_images(encoder: Encoder) -> Tensor:
    """Return two random images of a size that the network accepts, uint8 (2, 3, H, W)."""
    size = encoder.transform.size
    sides = EXAMPLE_SIZE if size is None else (size, size)
    return torch.randint(256, (2, 3, *sides), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def exported_program(encoder: Encoder, network: nn.Module) -> ExportedProgram:
    """Export a network for any batch size and, if images keep their shapes, for any height and width."""
    dynamic = dict.fromkeys((0, 2, 3) if encoder.transform.size is None else (0,), Dim.DYNAMIC)
    with torch.no_grad():
        return torch.export.export(network, (example_images(encoder),), dynamic_shapes=(dynamic,))


def _name_axes(graph: Any) -> None:
    """Give dynamic axes of an ONNX graph readable names instead of the exporter's numbered ones."""
    axes = graph.input[0].type.tensor_type.shape.dim
    names = {axis.dim_param: name for axis, name in zip(axes, AXES, strict=True) if axis.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in names:
                axis.dim_param = names[axis.dim_param]


@contextmanager
def _ignore_torchscript_warnings() -> Iterator[None]:
    """Ignore the deprecation of TorchScript, and warnings about sizes that a trace fixes: `verify` detects these."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        yield
