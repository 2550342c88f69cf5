"""Networks as ONNX files, and encoders whose network runs in ONNX Runtime."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.encoding.conversion import (
    INPUT,
    OUTPUT,
    Model,
    converting,
    example_images,
    exported_program,
    plain_network,
    synthetic_samples,
    verify,
)
from shortlist.encoding.encoder import Encoder
from shortlist.errors import RunError
from shortlist.extras import extra
from shortlist.files import atomic_replace, exclusive_lock

AXES = ("batch", "channels", "height", "width")
KEY = "shortlist"  # key of the description in the metadata
MAX_BYTES = 2**31 - 2**24  # of weights: a file is one protobuf message of at most 2 GB, which also contains the graph
ADVICE = 'use `backend="torch"`'


class OnnxFormat:
    """ONNX, with the weights in the same file. The only code that uses onnx and onnxruntime."""

    tolerance = 1e-4

    def __init__(self, encoder: Encoder, network: nn.Module) -> None:
        require_onnx("An ONNX file")
        size = sum(tensor.nbytes for tensor in network.state_dict().values())
        if size > MAX_BYTES:
            raise ValueError(f"an ONNX file can contain at most 2 GB, but the weights have {size / 1e9:.1f} GB")
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
    def open(path: Path, threads: int = 0) -> Model:
        """Open the file in ONNX Runtime, on the CPU.

        Args:
            path: The file.
            threads: Number of threads of all calls together; 0: one per core.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Idle threads should not spin, which would slow down other threads and processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

        return run


def require_onnx(user: str) -> None:
    """Check that the packages of the extra `export` are installed; see `extra`."""
    with extra("export", user):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401


def in_onnx_runtime(encoder: Encoder, folder: Path, threads: int) -> Encoder:
    """Return the same encoder with a network that runs in ONNX Runtime, on the CPU.

    The converted network is kept in a folder. If several processes need it, one converts it while the others wait.

    Args:
        encoder: The encoder, whose model is moved to the CPU.
        folder: Folder of the converted network. Networks of other encoders in it are deleted.
        threads: Number of threads of ONNX Runtime.

    Raises:
        MissingExtraError: A package is not installed.
        ModelError: The network cannot be converted, or its vectors differ from those of PyTorch.
    """
    encoder.to("cpu")
    file = folder / f"{encoder.fingerprint}.onnx"
    in_use = RunError(f"Another process is converting a model in {folder}.")
    with exclusive_lock(folder / ".lock", in_use, timeout=-1):
        if not file.exists():
            for other in folder.glob("*.onnx"):
                other.unlink()
            _write(encoder, file)
        return replace(encoder, runtime=OnnxFormat.open(file, threads))


def _write(encoder: Encoder, file: Path) -> None:
    """Write the network of an encoder to a file, unless its vectors differ from those of PyTorch."""
    with converting(encoder, "ONNX", ADVICE):
        converted = OnnxFormat(encoder, plain_network(encoder))
    with atomic_replace(file) as temporary:
        converted.save(temporary, {})
        verify(converted.open(temporary), synthetic_samples(encoder), converted.tolerance, "ONNX", ADVICE)


def _name_axes(graph: Any) -> None:
    """Give dynamic axes of an ONNX graph readable names instead of the exporter's numbered ones."""
    axes = graph.input[0].type.tensor_type.shape.dim
    names = {axis.dim_param: name for axis, name in zip(axes, AXES, strict=True) if axis.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in names:
                axis.dim_param = names[axis.dim_param]
