"""A network as an ONNX file, weights inside. The only user of onnx and onnxruntime."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.encoding import Encoder
from shortlist.errors import ModelError
from shortlist.export.check import Run
from shortlist.export.description import INPUT, KEY, OUTPUT
from shortlist.export.graph import example, exported_program
from shortlist.extras import extra

SIDES = ("batch", "channels", "height", "width")
LARGEST = 2**31 - 2**24  # bytes of a file with its weights inside, which is one protobuf message; some are the graph's


class OnnxFile:
    tolerance = 1e-4

    def __init__(self, encoder: Encoder, network: nn.Module) -> None:
        _check_installed()
        size = sum(tensor.nbytes for tensor in network.state_dict().values())
        if size > LARGEST:
            raise ModelError(f"an ONNX file holds at most 2 GB, and the weights are {size / 1e9:.1f} GB: use `package`")
        program = exported_program(encoder, network)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnx|copyreg)")
            found = torch.onnx.export(
                program,
                (example(encoder),),
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                external_data=False,
                verbose=False,
            )
        assert found is not None
        self.model = found.model_proto
        _name_sides(self.model.graph)

    def save(self, path: Path, description: dict[str, Any]) -> None:
        """Write the file; the description is its metadata."""
        import onnx

        onnx.helper.set_model_props(self.model, {KEY: json.dumps(description)})
        path.write_bytes(self.model.SerializeToString())

    @staticmethod
    def open(path: Path) -> Run:
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

        return run


def _name_sides(graph: Any) -> None:
    """Free sides are called what they are, wherever they occur; the exporter numbers them."""
    sides = graph.input[0].type.tensor_type.shape.dim
    names = {side.dim_param: name for side, name in zip(sides, SIDES, strict=True) if side.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for side in value.type.tensor_type.shape.dim:
            if side.dim_param in names:
                side.dim_param = names[side.dim_param]


def _check_installed() -> None:
    with extra("export", "An ONNX file"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
