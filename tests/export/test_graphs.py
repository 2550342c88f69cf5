"""Exported graphs give the vectors of the run in their own runtimes; a graph with other vectors is not written."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from shortlist.encoding import Encoder
from shortlist.encoding.conversion import plain_network
from shortlist.errors import ConfigError, ModelError, RunError, ShortlistError
from shortlist.export import Exported, export, exporter
from shortlist.export.metadata import preprocess
from shortlist.extras import MissingExtraError
from tests.export.encoders import FEW_BLOCKS, SCALES, WHOLE, encoder, pictures
from tests.state import another_state, changes

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:FutureWarning")]

KINDS = {
    "ResNet": {},
    "EfficientNet, whole images": {"backbone": "test_efficientnet", "transform": WHOLE},
    "ViT": {
        "backbone": "test_vit",
        "backbone_args": {"depth": 1},
        "pooling": "token",
        "layer_norm": False,
        "l2_pooled": True,
    },
    "several scales": {
        "backbone_args": FEW_BLOCKS,
        "transform": WHOLE,
        "scales": SCALES,
        "dim": None,
        "layer_norm": False,
    },
}


def written(folder: Path, kind: str, **described: Any) -> tuple[Encoder, Path, Exported]:
    """Export an encoder, by a call that does not change the process."""
    made = encoder(**described)
    made.save(folder / "model")
    file = folder / "new folder" / "model.file"
    done: list[Exported] = []
    with another_state():
        assert changes(lambda: done.extend(export(folder / "model", **{kind: file}))) == []
    return made, file, done[0]


def vectors_by(runtime: Any, description: dict[str, Any], images: list[Image.Image]) -> Tensor:
    """Return the vectors of single images; for images of one shape, compare them with the vectors of a batch."""
    seen = [preprocess(image, description["preprocessing"]) for image in images]
    alone = np.concatenate([runtime(each[None]) for each in seen])
    if description["preprocessing"]["kind"] == "square":
        np.testing.assert_allclose(runtime(np.stack(seen)), alone, atol=1e-5)
    return torch.from_numpy(alone)


def assert_described(description: dict[str, Any], made: Encoder, done: Exported) -> None:
    assert description["fingerprint"] == made.fingerprint
    assert description["check"] == done.check
    assert description["check"]["images"] == "8 synthetic images"  # a saved encoder has no others
    assert 0 <= description["check"]["largest_difference"] <= description["check"]["tolerance"] <= 1e-4
    assert description["output"] == {"name": "vectors", "dtype": "float32", "shape": ["batch", made.dim], "length": 1}


@pytest.mark.parametrize("kind", ["ViT", "several scales"])  # docs/export.md has a ResNet, tests/serve an EfficientNet
def test_onnx(kind: str, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    made, file, done = written(tmp_path, "onnx", **KINDS[kind])
    onnx.checker.check_model(file, full_check=True)
    assert [each.name for each in file.parent.iterdir()] == [file.name]  # the weights are inside
    session = onnxruntime.InferenceSession(file)
    (taken,), (given) = session.get_inputs(), session.get_outputs()
    sides = ["height", "width"] if made.transform.size is None else [64, 64]
    assert (taken.name, taken.type, taken.shape) == ("images", "tensor(uint8)", ["batch", 3, *sides])
    assert [(each.name, each.shape) for each in given] == [("vectors", ["batch", made.dim])]
    description = json.loads(session.get_modelmeta().custom_metadata_map["shortlist"])
    assert_described(description, made, done)
    assert description["input"]["shape"] == taken.shape
    found = vectors_by(lambda images: session.run(None, {"images": images})[0], description, pictures())
    torch.testing.assert_close(found, made.encode(pictures()), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(found)))


def test_torch_export(tmp_path: Path) -> None:
    made, file, done = written(tmp_path, "torch_export", **KINDS["EfficientNet, whole images"])
    extra = {"shortlist.json": ""}
    module = torch.export.load(io.BytesIO(file.read_bytes()), extra_files=extra).module()
    description = json.loads(extra["shortlist.json"])
    assert_described(description, made, done)
    found = vectors_by(lambda images: module(torch.from_numpy(images)).numpy(), description, pictures())
    torch.testing.assert_close(found, made.encode(pictures()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["ResNet", "EfficientNet, whole images", "ViT"])
def test_torchscript(kind: str, tmp_path: Path) -> None:
    made, file, done = written(tmp_path, "torchscript", **KINDS[kind])
    extra = {"shortlist.json": ""}
    module = torch.jit.load(file, _extra_files=extra)
    description = json.loads(extra["shortlist.json"])
    assert_described(description, made, done)
    found = vectors_by(lambda images: module(torch.from_numpy(images)).numpy(), description, pictures())
    torch.testing.assert_close(found, made.encode(pictures()), atol=1e-5, rtol=0)


def test_a_trace_with_fixed_sizes_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"TorchScript file differ from those of PyTorch.*use another format"):
        written(tmp_path, "torchscript", **KINDS["several scales"])
    assert list((tmp_path / "new folder").iterdir()) == []


def test_other_vectors_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_weights(made: Encoder) -> torch.nn.Module:
        network = plain_network(made)
        network.get_parameter("linear.bias").data += 0.01
        return network

    model, file = encoder().save(tmp_path / "model"), tmp_path / "model.file"
    file.write_text("what was there")
    monkeypatch.setattr(exporter, "plain_network", other_weights)
    with pytest.raises(ModelError, match="differ from those of PyTorch"):
        export(model, torchscript=file)
    assert file.read_text() == "what was there"
    assert {each.name for each in tmp_path.iterdir()} == {"model", "model.file"}


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    made = encoder()
    before, images = made.embedder.memory_format, pictures()
    plain = plain_network(made)
    assert all(value.is_contiguous() for value in plain.state_dict().values())
    assert made.embedder.memory_format is before
    torch.testing.assert_close(made.encode(images), encoder().encode(images))


def test_several_formats_in_one_call_and_again(tmp_path: Path) -> None:
    model = encoder().save(tmp_path / "model")
    files = {"torchscript": tmp_path / "model.pt", "package": tmp_path / "package"}
    first, second = (export(model, **files) for _ in range(2))
    assert [(each.kind, each.path) for each in first] == [
        ("TorchScript", files["torchscript"]),
        ("package", files["package"]),
    ]
    assert first == second


class TestMistakes:
    def test_no_format_is_given(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="give a path for `onnx`"):
            export(tmp_path)

    def test_a_license_without_a_model_card(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="use it with `package`"):
            export(tmp_path, onnx=tmp_path / "model.onnx", license="mit")

    def test_two_formats_in_one_file(self, tmp_path: Path) -> None:
        file = tmp_path / "model"
        with pytest.raises(ConfigError, match="Two formats cannot be written to the same file"):
            export(encoder().save(tmp_path / "encoder"), onnx=file, torchscript=str(file))

    def test_paths_are_checked_before_anything_is_written(self, tmp_path: Path) -> None:
        model = encoder().save(tmp_path / "model")
        for places in ({"torch_export": tmp_path}, {"package": model}, {"package": model / "encoder.json" / "new"}):
            with pytest.raises(ShortlistError, match=r"is a folder|something other|is a file"):
                export(model, torchscript=tmp_path / "model.pt", **places)
            assert not (tmp_path / "model.pt").exists()

    def test_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="No run found in"):
            export(tmp_path, onnx=tmp_path / "model.onnx")

    @pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
    def test_a_package_is_not_installed(self, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = encoder().save(tmp_path / "model")
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"needs the package {package}.*shortlist\[export\]"):
            export(model, onnx=tmp_path / "model.onnx")
        assert not (tmp_path / "model.onnx").exists()

    def test_too_large_for_one_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = encoder().save(tmp_path / "model")
        monkeypatch.setattr("shortlist.encoding.onnx_network.MAX_BYTES", 1000)
        with pytest.raises(ModelError, match="at most 2 GB"):
            export(model, onnx=tmp_path / "model.onnx")

    def test_an_exporter_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("an operator is not known\nand a long story")

        model = encoder().save(tmp_path / "model")
        monkeypatch.setattr(torch.export, "export", fails)
        with pytest.raises(ShortlistError) as raised:
            export(model, torch_export=tmp_path / "model.pt2")
        problem = "'test_resnet' cannot be exported as torch.export (an operator is not known)"
        assert str(raised.value) == f"{problem}: use another format, or `package`"
